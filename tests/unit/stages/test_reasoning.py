from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from infra.envhost.protocol import Create
from schemas.messages import Task
from stages.handlers import reasoning as module
from stages.handlers import reasoning_puzzles
from stages.handlers.base import Action, Invalid
from stages.handlers.reasoning import Reasoning
from stages.handlers.reasoning_answers import refusal
from stages.handlers.reasoning_puzzles import generators, puzzle

ROOT = Path(__file__).parents[3]

QUICK = [
    *("ab", "base_conversion", "basic_arithmetic", "binary_matrix", "caesar_cipher", "chain_sum", "countdown"),
    *(
        "fraction_simplification",
        "game_of_life_halting",
        "gcd",
        "graph_color",
        "gsm_symbolic",
        "isomorphic_strings",
        "knights_knaves",
        "lcm",
    ),
    *("leg_counting", "n_queens", "number_sorting", "palindrome_generation", "polynomial_multiplication"),
    *("prime_factorization", "propositional_logic", "ransom_note", "rubiks_cube", "simple_integration"),
    *("spell_backward", "spiral_matrix", "string_insertion", "sudoku", "tower_of_hanoi", "zebra_puzzles"),
]
"""Generators of every kind that together take a second."""

NONSENSE = ["", "garbage <", "[1,2", "None", "{'a'", "1/0", "-3", "\u0663", "9" * 5000, "[[[", "a b c", "x**x", "\0"]

REPAIRED = sorted(reasoning_puzzles._REPAIRS)
"""Generators whose order depends on the process's hash seed and is restored, or that score anything."""

OWN_CHOICE = {"knight_swap"}
"""Generators whose solver names any one of several right answers; the question is the same."""


def config_of(generator: str) -> dict:
    if generator != "composite":
        return {}
    return {"datasets": [{"name": "ransom_note"}, {"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 3}}]}


def question(generator: str = "chain_sum", seed: int = 7, **payload):
    payload = {"generator": generator, "config": config_of(generator), **payload}
    return Reasoning().environment(payload, seed)


def answered(environment, answer: str) -> dict:
    environment.reset()
    environment.step({"name": "answer", "arguments": {"answer": answer}, "text": answer})
    return environment.verdict()


def graded(verdict):
    return Reasoning().grade(None, verdict)


@pytest.fixture(scope="session", autouse=True)
def _imported():
    """The package takes seconds to import, which no single test should be charged for."""
    generators()


class TestTalk:
    """How the question is put and the answer read."""

    def test_the_opening_holds_the_prompt_and_the_question(self):
        """The system prompt is the versioned file; the question is as the generator words it."""
        task = Task(
            run="r",
            group="g",
            sample=0,
            samples=1,
            source="s",
            payload={"generator": "chain_sum"},
            payload_digest="",
            family="reasoning",
            seed=7,
            start_by_ms=0,
        )
        environment = Reasoning().environment(task.payload, task.seed)
        opening = Reasoning().init(task, environment.reset())

        assert [message["role"] for message in opening.messages] == ["system", "user"]
        assert "<answer>" in opening.messages[0]["content"]
        assert opening.messages[1]["content"].startswith("State the final answer to the following")
        assert Reasoning().prompt_version == "reasoning.v1"

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("<answer>12</answer>", "12"),
            ("So it is\n<answer>\n a b\nc </answer> indeed", "a b\nc"),
            ("<answer>1</answer> no, <answer>2</answer>", "2"),
            ("<answer></answer>", ""),
        ],
    )
    def test_the_last_tagged_answer_counts(self, text, answer):
        """What stands around it, and what was answered before, does not matter."""
        assert Reasoning().act(text) == Action(text=text, name="answer", arguments={"answer": answer})

    @pytest.mark.parametrize("text", ["", "12", "<answer>12", "12</answer>", "</answer>12<answer>"])
    def test_a_text_without_a_tagged_answer_is_invalid(self, text):
        """The reason says what was expected."""
        read = Reasoning().act(text)

        assert isinstance(read, Invalid)
        assert "<answer>" in read.reason


class TestScore:
    """What an answer is worth."""

    @pytest.mark.parametrize("generator", QUICK)
    def test_the_expected_answer_succeeds_and_nonsense_never_breaks_a_generator(self, generator):
        """The generator's own answer scores 1; whatever a policy writes instead is a score, not a failure."""
        environment = question(generator)
        expected = environment.verdict()["expected"]
        if expected is not None:
            grade = graded(answered(environment, expected))
            assert (grade.components, grade.success) == ({"answer": 1.0}, 1.0)
        for text in NONSENSE:
            grade = graded(answered(environment, text))
            assert (0.0 <= grade.components["answer"] < 0.99, grade.success) == (True, 0.0)

    def test_partial_credit_is_reward_but_no_success(self):
        """The shaped reward keeps the scorer's grading, the success does not."""
        environment = question()
        expected = environment.verdict()["expected"]
        grade = graded(answered(environment, f"it is {expected}"))

        assert 0.0 < grade.components["answer"] < 0.99
        assert grade.success == 0.0

    def test_no_answer_is_worth_nothing(self):
        """A malformed text ends the episode; the verdict then holds no answer."""
        environment = question()
        environment.reset()
        verdict = environment.verdict()

        assert (verdict["answer"], verdict["score"]) == (None, None)
        assert (graded(verdict).components, graded(verdict).success) == ({"answer": 0.0}, 0.0)

    def test_a_scorer_that_breaks_at_the_policys_text_scores_zero(self):
        """The error is in the verdict, for whoever wonders."""
        verdict = answered(question("prime_factorization"), "two times three")

        assert verdict["score"] == 0.0
        assert verdict["fault"].startswith("ValueError")

    def test_a_scorer_that_is_broken_itself_is_a_failure(self, monkeypatch):
        """If not even the expected answer can be scored, the policy is not to blame and gets no reward."""

        class Broken:
            def score_answer(self, answer, entry):
                raise KeyError("metadata")

        environment = question()
        monkeypatch.setattr(module, "dataset", lambda *_: Broken())

        with pytest.raises(KeyError):
            answered(environment, "12")
        assert environment.verdict()["answer"] is None

    def test_a_question_takes_one_answer(self):
        """After it only a reset helps, and the same question is asked again."""
        environment = question()
        first = environment.reset()
        answered(environment, "12")

        with pytest.raises(ValueError, match="was answered"):
            environment.step({"name": "answer", "arguments": {"answer": "13"}, "text": "13"})
        assert environment.reset() == first
        assert environment.verdict()["answer"] is None


class TestEvaluatedAnswers:
    """Some scorers evaluate the answer as code, and a policy would find out."""

    ATTACKS: ClassVar = [
        "__import__('os').system('touch {marker}')",
        "[__import__('pathlib').Path('{marker}').touch()]",
        "(lambda: open('{marker}', 'w'))()",
        "[open('{marker}', 'w') for _ in [1]]",
        "9**9**9",
        "((9**60)**60)**60",
        "factorial(10**8)",
        "99999999!",
        "sqrt.__class__",
    ]

    @pytest.mark.parametrize(
        "generator",
        sorted({"countdown", "puzzle24", "simple_integration", "binary_matrix", "n_queens", "spiral_matrix"}),
    )
    def test_code_in_an_answer_is_not_run(self, generator, tmp_path):
        """It scores 0, leaves no trace and takes no time."""
        environment, marker = question(generator), tmp_path / "marker"
        for attack in self.ATTACKS:
            assert graded(answered(environment, attack.format(marker=marker))).success == 0.0
        assert not marker.exists()

    @pytest.mark.parametrize(
        "answer",
        ["(3 + 4) * 2 - 10/5", "x**3/3 + 2*x + C", "-3*X**3*sin(X) + exp(2*x)", "sqrt(x)*log(x)", "x**-2", "2**x"],
    )
    def test_honest_expressions_pass(self, answer):
        """Arithmetic, names and the functions that integrals are made of are left alone."""
        assert refusal("simple_integration", answer) is None

    @pytest.mark.parametrize(
        "answer", ["[1, -2, 3]", "[['Q', '_'], ['_', 'Q']]", "1 2 3", "ABC", "Q _\n_ Q", "0 1\n1 0"]
    )
    def test_honest_lists_pass(self, answer):
        """What `eval` would read as a list or not at all is left to the scorer."""
        assert refusal("n_queens", answer) is None

    def test_other_scorers_take_any_text(self):
        """They compare texts and evaluate nothing; only the length is bounded."""
        assert refusal("chain_sum", "__import__('os')") is None
        assert "at most 20000 are scored" in refusal("chain_sum", 20_001 * "x")

    def test_every_expected_answer_may_be_scored(self):
        """The guard refuses no generator's own answer."""
        for generator in sorted(module_evaluated()):
            for index in range(5):
                expected = puzzle(generator, {}, 11, index).expected
                assert refusal(generator, expected) is None, (generator, expected)


def module_evaluated():
    from stages.handlers.reasoning_answers import EXPRESSIONS, LITERALS

    return EXPRESSIONS | LITERALS


class TestPayload:
    """What a task may ask for."""

    def test_siblings_and_retries_meet_the_same_question(self):
        """The task's seed decides; another seed, or another index, is another question."""
        same = {question(seed=3).reset(), question(seed=3).reset()}
        others = {question(seed=4).reset(), question(seed=3, index=2).reset()}

        assert len(same) == 1
        assert len(same | others) == 3

    def test_a_seed_in_the_payload_wins(self):
        """A fixed question is the same under every task."""
        assert question(seed=1, index=2).reset() != question(seed=5, index=2).reset()
        assert (
            Reasoning().environment({"generator": "gcd", "seed": 9}, 1).reset()
            == Reasoning().environment({"generator": "gcd", "seed": 9}, 2).reset()
        )

    def test_every_seed_of_a_task_is_allowed(self):
        """Task seeds have 63 bits, the generators' fewer."""
        for generator in ("chain_sum", "pool_matrix", "knights_knaves"):
            assert question(generator, seed=2**63 - 1, index=3).reset()

    @pytest.mark.parametrize(
        ("payload", "says"),
        [
            ({}, "unknown generator ''"),
            ({"generator": "chainsum"}, r"did you mean chain_sum.*Known: ab, acre, .* and \d+ more \(\d+ in all\)"),
            ({"generator": ["gcd"]}, "unknown generator"),
            ({"generator": "gcd", "config": {"colour": 1}}, "gcd refuses the config.*colour.*its fields: min_numbers"),
            ({"generator": "gcd", "config": {"min_numbers": 1}}, "gcd refuses the config"),
            ({"generator": "gcd", "config": {"seed": 1}}, "beside `config`"),
            ({"generator": "gcd", "config": {"size": 2}, "index": 2}, "index 2 is beyond"),
            ({"generator": "gcd", "config": 5}, "config must be a map"),
            ({"generator": "gcd", "index": -1}, "index must be an integer from 0"),
            ({"generator": "gcd", "seed": "x"}, "seed must be an integer"),
            ({"generator": "gcd", "level": 1}, "unknown field 'level'"),
            ({"generator": "composite"}, "composite refuses the config"),
            ({"generator": "composite", "config": {"datasets": ["gcd"]}}, "composite wants datasets"),
        ],
    )
    def test_a_bad_payload_says_what_is_wrong(self, payload, says):
        """A ValueError is a bad task; its text names the field and what is known."""
        with pytest.raises(ValueError, match=says):
            Reasoning().environment(payload, 1)

    def test_a_payload_travels_in_a_request(self):
        """Nothing in it needs more than msgpack."""
        request = Create(
            run="r",
            group="g",
            sample=0,
            attempt=0,
            family="reasoning",
            payload={"generator": "composite", "config": config_of("composite")},
            seed=1,
            reap_at_ms=0,
        )
        assert Reasoning().environment(request.payload, request.seed).reset()


PROBE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from stages.handlers.reasoning_puzzles import puzzle
found = {}
for generator, config, indices in json.load(sys.stdin):
    made = [puzzle(generator, config, 5, index) for index in indices]
    found[generator] = [[one.question, one.expected] for one in made]
print()  # a generator prints
print(json.dumps(found))
"""


def in_another_process(hash_seed: int, names: list[str], indices: list[int]) -> dict:
    """Ask for questions in a process with its own order of sets; shuffled, so that shared state would show too."""
    order = random.Random(hash_seed).sample(names, len(names))
    wanted = json.dumps([(name, config_of(name), indices) for name in order])
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=wanted,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_questions_are_the_same_in_another_process():
    """A retry on another host meets the same question, also where a generator iterates over sets."""
    here = {
        name: [[made.question, made.expected] for made in (puzzle(name, config_of(name), 5, index) for index in (0, 1))]
        for name in [*REPAIRED, "chain_sum", "zebra_puzzles"]
    }

    assert in_another_process(1, list(here), [0, 1]) == here


@pytest.mark.slow
def test_every_generator_is_the_same_in_every_process():
    """All of them, several questions each, in two processes with different hash seeds."""
    first = in_another_process(1, generators(), [0, 1, 2, 7])
    second = in_another_process(2, generators(), [0, 1, 2, 7])

    assert sorted(first) == generators()
    for name in OWN_CHOICE:
        first[name], second[name] = ([text for text, _ in found[name]] for found in (first, second))
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_generator_scores_its_answer_and_survives_nonsense():
    """The sweep over all: the expected answer succeeds, nonsense does not, and no text of a policy is a failure."""
    for generator in generators():
        environment = question(generator)
        expected = environment.verdict()["expected"]
        if expected is not None:
            assert graded(answered(environment, expected)).success == 1.0, generator
        for text in NONSENSE:
            assert graded(answered(environment, text)).success == 0.0, (generator, text)
