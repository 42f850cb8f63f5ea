"""The turns of one episode, decided without I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import Failure
from infra.inference.base import PROCESSED_LOGPROBS, Generation, ModelInfo, VersionSpan
from schemas import transcript
from schemas.identity import sampling_seed
from schemas.messages import Episode
from schemas.outcome import Boundary, FailureKind, StopReason
from schemas.transcript import Sampling
from stages.handlers.base import Action, Invalid
from stages.run.episode import Act, Ask, EpisodeMachine, Stop
from stages.run.render import Renderer
from tests.chat_templates import QWEN_3
from tests.logs import make_task
from tests.model_directory import SPECIAL_TOKENS, family_model, word_model

WORDS = ("go", "north", "south", "key", "at", "take", "nonsense")
END_ID = SPECIAL_TOKENS.index("<|end|>")
GO, NORTH, NONSENSE = (len(SPECIAL_TOKENS) + sorted(WORDS).index(word) for word in ("go", "north", "nonsense"))
ENGINE = ModelInfo(
    model="m",
    tokenizer_digest="",
    max_model_len=1024,
    version=3,
    dtype="float32",
    logprobs_mode=PROCESSED_LOGPROBS,
)
OPENING = ({"role": "user", "content": "key at"},)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(word_model(tmp_path_factory.mktemp("words"), WORDS))


def opening_of(renderer, messages):
    return renderer.encode(renderer.render(messages))


def act(text):
    return Invalid(text=text, reason="go north") if "nonsense" in text else Action(text=text, name=text[:2])


def machine(renderer, *, invalid_ends=True, context=1024, messages=OPENING, act=act, **task):
    info = replace(ENGINE, max_model_len=context)
    episode = Episode(task=make_task(**task), host="local:", lease="l", messages=messages)
    return EpisodeMachine(episode, renderer, info, act, invalid_ends=invalid_ends)


def said(*ids, finish="stop", versions=None, run=""):
    versions = versions or [3] * len(ids)
    spans = [VersionSpan(start=at, stop=at + 1, version=version, run=run) for at, version in enumerate(versions)]
    return Generation(
        token_ids=np.array(ids, np.int32),
        logprobs=-0.25 * np.arange(1, len(ids) + 1, dtype=np.float32),
        finish_reason=finish,
        versions=tuple(spans),
    )


def checked(episode):
    record = episode.transcript()
    transcript.check(record)
    return record


def test_an_episode_ends_when_the_environment_says_so(renderer):
    """Ask, act, observe, ask again; `done` stops, and the record holds every turn."""
    episode = machine(renderer)
    first = episode.start(10)
    prompt = episode.prompt
    assert isinstance(first, Ask)
    assert Act(Action(text="go north", name="go")) == episode.generated(said(GO, NORTH, END_ID), ENGINE, 11)
    assert isinstance(episode.observed(Action(text="go north", name="go"), "key at", 12, done=False), Ask)
    longer = episode.prompt
    episode.generated(said(GO, END_ID), ENGINE, 13)

    assert Stop(StopReason.DONE) == episode.observed(Action(text="go", name="go"), "", 14, done=True)
    record = checked(episode)
    assert longer[: len(prompt) + 3].tolist() == [*prompt.tolist(), GO, NORTH, END_ID]
    assert (
        longer.tolist()
        == opening_of(renderer, [*OPENING, {"role": "assistant", "content": "go north"}, *OPENING]).tolist()
    )
    assert [("go", True, 10, 11, 12), ("go", True, 12, 13, 14)] == [
        (turn.action, turn.valid, turn.began_ms, turn.generated_ms, turn.ended_ms) for turn in record.turns
    ]
    assert len(record.token_ids) == len(longer) + 2


def thinker(tmp_path, *, context=1024):
    """Return an episode of a model whose template leaves the thoughts out of earlier turns, and how it answers."""
    renderer = Renderer(family_model(tmp_path, QWEN_3))
    episode = machine(renderer, context=context, act=lambda text: Action(text=text, name="go"))

    def answers(text, *, done=False):
        ids = [*renderer.encode(text).tolist(), renderer.stop_ids[0]]
        assert isinstance(episode.generated(said(*ids), ENGINE, 1), Act)
        return episode.observed(Action(text=text, name="go"), "key", 2, done=done)

    return renderer, episode, answers


def test_a_rewritten_history_begins_a_segment_in_which_everything_sampled_stays(tmp_path):
    """The next prompt is all of what the template makes of the conversation; the turn before keeps its tokens."""
    renderer, episode, answers = thinker(tmp_path)
    episode.start(0)
    answers("<think>\nabc\n</think>\n\ngo")
    prompt = episode.prompt
    answers("go", done=True)
    record = checked(episode)
    second = record.segments[1]

    assert record.segments == (0, second)
    assert [turn.start for turn in record.turns] == [0, second]
    assert "abc" in renderer.display(record.token_ids[:second])
    assert "abc" not in renderer.display(prompt)
    assert record.token_ids[second : second + len(prompt)].tolist() == prompt.tolist()
    assert record.sampled_count == sum(turn.stop - turn.sampled for turn in record.turns)


def test_each_segment_has_the_context_for_itself(tmp_path):
    """Only one prompt is in the model at a time."""
    thoughts = "<think>\n" + "abc " * 20 + "\n</think>\n\ngo"
    _, alone, answers = thinker(tmp_path / "alone")
    alone.start(0)
    answers(thoughts)
    second = alone.prompt.size
    answers("go", done=True)
    first = checked(alone).segments[1]
    context = max(first, second + 4)

    _, episode, answers = thinker(tmp_path / "short", context=context)
    episode.start(0)
    ask = answers(thoughts)
    answers("go", done=True)

    assert ask.max_tokens == context - second
    assert len(checked(episode).token_ids) == first + second + 3 > context


def test_an_invalid_action_ends_the_episode_where_the_family_says_so(renderer):
    """It is the policy's doing: the episode is graded, not truncated."""
    episode = machine(renderer)
    episode.start(0)

    assert Stop(StopReason.INVALID_ACTION) == episode.generated(said(NONSENSE, END_ID), ENGINE, 1)
    assert [(False, "go north")] == [(turn.valid, turn.action) for turn in checked(episode).turns]
    assert not StopReason.INVALID_ACTION.truncated


def test_an_answer_that_ends_by_itself_at_the_budget_was_not_cut(renderer):
    """It is invalid, and no limit is to blame."""
    episode = machine(renderer, max_sampled_tokens=2)
    episode.start(0)

    assert Stop(StopReason.INVALID_ACTION) == episode.generated(said(NONSENSE, END_ID), ENGINE, 1)


def test_an_engine_that_does_not_say_how_long_a_sequence_may_be_sets_no_limit(renderer):
    """The model's own is there."""
    assert isinstance(machine(renderer, context=0).start(0), Ask)


def test_an_invalid_action_goes_on_with_its_reason_where_the_family_says_so(renderer):
    """The reason is the next observation."""
    episode = machine(renderer, invalid_ends=False)
    episode.start(0)
    before = len(episode.prompt)

    assert isinstance(episode.generated(said(NONSENSE, END_ID), ENGINE, 1), Ask)
    assert "go north" in renderer.display(episode.prompt[before + 2 :])


def test_the_horizon_stops_the_episode_as_truncated(renderer):
    """Valid or not, a turn counts."""
    episode = machine(renderer, invalid_ends=False, horizon=2)
    episode.start(0)
    episode.generated(said(NONSENSE, END_ID), ENGINE, 1)
    episode.generated(said(GO, END_ID), ENGINE, 2)

    assert Stop(StopReason.TURNS) == episode.observed(Action(text="go", name="go"), "key at", 3, done=False)
    assert len(checked(episode).turns) == 2


def test_done_in_the_last_turn_is_done(renderer):
    """The environment's word comes before the horizon."""
    episode = machine(renderer, horizon=1)
    episode.start(0)
    episode.generated(said(GO, END_ID), ENGINE, 1)

    assert Stop(StopReason.DONE) == episode.observed(Action(text="go", name="go"), "", 2, done=True)


def test_the_budget_of_sampled_tokens_bounds_each_answer_and_stops_the_episode(renderer):
    """An answer gets what is left; with nothing left the episode stops as truncated, its last prompt not recorded."""
    episode = machine(renderer, max_sampled_tokens=5, sampling=Sampling(max_tokens=3))
    assert episode.start(0).max_tokens == 3
    episode.generated(said(GO, NORTH, END_ID), ENGINE, 1)
    assert episode.observed(Action(text="go", name="go"), "key", 2, done=False).max_tokens == 2
    episode.generated(said(GO, END_ID), ENGINE, 3)

    assert Stop(StopReason.TOKENS) == episode.observed(Action(text="go", name="go"), "key", 4, done=False)
    record = checked(episode)
    assert (5, END_ID) == (record.sampled_count, int(record.token_ids[-1]))


def test_the_context_bounds_each_answer_and_stops_the_episode(renderer):
    """The shorter of the renderer's and the engine's context counts, prompt and answer together."""
    opening = len(opening_of(renderer, OPENING))
    episode = machine(renderer, context=opening + 5)
    assert episode.start(0).max_tokens == 5
    episode.generated(said(GO, END_ID), ENGINE, 1)

    assert Stop(StopReason.CONTEXT) == episode.observed(Action(text="go", name="go"), "key at", 2, done=False)
    assert len(checked(episode).token_ids) == opening + 2


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_sampled_tokens": 2}, StopReason.TOKENS),
        ({"context": 2}, StopReason.CONTEXT),
        ({"sampling": Sampling(max_tokens=2)}, StopReason.INVALID_ACTION),
    ],
)
def test_an_answer_that_a_limit_of_the_episode_cut_is_truncated_and_not_malformed(renderer, limits, reason):
    """What could not be said to its end is not held against its form; a turn's own limit is part of the form."""
    if "context" in limits:
        limits = {"context": len(opening_of(renderer, OPENING)) + limits["context"]}
    episode = machine(renderer, **limits)
    episode.start(0)

    assert Stop(reason) == episode.generated(said(NONSENSE, GO, finish="length"), ENGINE, 1)


def test_an_answer_that_loops_ends_its_episode_as_truncated(renderer):
    """Its tokens are recorded as sampled; what it says is not carried out, even in a family that forgives."""
    episode = machine(renderer, invalid_ends=False)
    episode.start(0)

    assert Stop(StopReason.REPETITION) == episode.generated(said(GO, GO, GO, finish="repetition"), ENGINE, 1)
    assert StopReason.REPETITION.truncated
    record = checked(episode)
    assert (3, [(False, "repetition", "the answer repeats itself")]) == (
        record.sampled_count,
        [(turn.valid, turn.finish, turn.action) for turn in record.turns],
    )


def test_a_turn_that_a_stop_sequence_ended_is_closed_as_its_template_says(renderer):
    """Its last id is not the template's own, so that one comes before the observation, as for a turn that was cut."""
    episode = machine(renderer)
    episode.start(0)
    prompt = episode.prompt.tolist()
    episode.generated(said(GO, NORTH, finish="stop_sequence"), ENGINE, 1)
    episode.observed(Action(text="go north", name="go"), "key at", 2, done=False)

    said_so = [*OPENING, {"role": "assistant", "content": "go north"}, *OPENING]
    assert episode.prompt.tolist() == opening_of(renderer, said_so).tolist()
    assert episode.prompt.tolist()[: len(prompt) + 3] == [*prompt, GO, NORTH, END_ID]


def test_an_opening_that_leaves_no_room_is_a_bad_task(renderer):
    """No turn fits, at any attempt."""
    with pytest.raises(Failure, match="no turn fits") as caught:
        machine(renderer, context=3).start(0)

    assert (FailureKind.INVALID_TASK, Boundary.TASK) == (caught.value.kind, caught.value.boundary)


def test_a_generation_that_the_engine_withdrew_is_a_failure(renderer):
    """Half an answer is never trained on; another attempt may end differently."""
    episode = machine(renderer)
    episode.start(0)

    with pytest.raises(Failure, match="withdrew") as caught:
        episode.generated(said(GO, finish="abort"), ENGINE, 1)

    assert FailureKind.ENGINE is caught.value.kind


def test_a_conversation_that_the_template_refuses_is_a_bad_task(tmp_path):
    """The same messages would fail again: no second attempt."""
    renderer = Renderer(word_model(tmp_path, WORDS, chat_template="{{ raise_exception('no such role') }}"))

    with pytest.raises(Failure, match="no such role") as caught:
        machine(renderer).start(0)

    assert (FailureKind.INVALID_TASK, Boundary.TRANSCRIPT) == (caught.value.kind, caught.value.boundary)


def test_new_weights_in_the_middle_of_an_answer_are_recorded_token_by_token(renderer):
    """Each span names the version that sampled it, at its place in the whole record."""
    episode = machine(renderer)
    episode.start(0)
    opening = len(episode.prompt)
    episode.generated(said(GO, NORTH, END_ID, versions=[3, 4, 4]), ENGINE, 1)
    episode.observed(Action(text="go", name="go"), "", 2, done=True)
    record = checked(episode)

    assert [(opening, 3), (opening + 1, 4), (opening + 2, 4)] == [(span.start, span.version) for span in record.spans]
    assert {("float32", PROCESSED_LOGPROBS, Sampling())} == {
        (span.dtype, span.logprobs_mode, span.sampling) for span in record.spans
    }
    assert [-0.25, -0.5, -0.75] == record.logprob_array[opening:].tolist()


@pytest.mark.parametrize(
    ("wanted", "served", "recorded"),
    [(None, "r", ""), (None, "", ""), (None, "other", "other"), ("trained", "trained", ""), ("trained", "", "")],
)
def test_a_span_names_the_run_of_its_weights_if_that_is_another_one(renderer, wanted, served, recorded):
    """A trainer must not take another run's version 3 for its own."""
    episode = machine(renderer, run="r", weights_of=wanted)
    episode.start(0)
    episode.generated(said(GO, END_ID, run=served), ENGINE, 1)
    episode.observed(Action(text="go", name="go"), "", 2, done=True)

    assert {recorded} == {span.weights_of for span in checked(episode).spans}


def test_each_turn_has_a_seed_of_its_own_that_no_attempt_changes(renderer):
    """A retry draws the same tokens: a crash does not resample luck."""
    seeds = []
    for attempt in (0, 1):
        episode = machine(renderer, attempt=attempt, sample=2)
        seeds.append([episode.start(0).seed])
        episode.generated(said(GO, END_ID), ENGINE, 1)
        seeds[-1].append(episode.observed(Action(text="go", name="go"), "key", 2, done=False).seed)

    assert [[sampling_seed(7, 2, 0), sampling_seed(7, 2, 1)]] * 2 == seeds


@dataclass(frozen=True)
class Said:
    """One turn of a random script."""

    ids: list[int]
    version: int
    done: bool
    observation: str


TURNS = st.lists(
    st.builds(
        Said,
        ids=st.lists(st.integers(0, len(SPECIAL_TOKENS) + len(WORDS) - 1), min_size=1, max_size=8),
        version=st.integers(0, 9),
        done=st.integers(0, 5).map(lambda roll: roll == 0),
        observation=st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join),
    ),
    min_size=8,
    max_size=8,
)


def answer(ask, turn):
    """Answer as an engine does: up to a stop id or the limit, whichever comes first."""
    endless = [*turn.ids, *[GO] * ask.max_tokens][: ask.max_tokens]
    at = endless.index(END_ID) + 1 if END_ID in endless else None
    ids = endless[:at]
    versions = [turn.version + (place > len(ids) // 2) for place in range(len(ids))]
    return said(*ids, finish="stop" if at else "length", versions=versions)


@given(
    turns=TURNS,
    invalid_ends=st.booleans(),
    horizon=st.integers(1, 8),
    budget=st.integers(1, 25),
    per_turn=st.integers(1, 8),
    context=st.integers(10, 60),
)
def test_whatever_is_said_the_record_keeps_its_invariants(
    renderer, turns, invalid_ends, horizon, budget, per_turn, context
):
    """Prompts extend each other, sampled ids stay as they came, no limit is passed, and the stop fits the record."""
    episode = machine(
        renderer,
        invalid_ends=invalid_ends,
        context=context,
        horizon=horizon,
        max_sampled_tokens=budget,
        sampling=Sampling(max_tokens=per_turn),
    )
    sampled, prompt, move = [], [], episode.start(0)
    for now_ms, turn in enumerate(turns):
        if isinstance(move, Stop):
            break
        assert isinstance(move, Ask)
        assert 1 <= move.max_tokens <= per_turn
        assert episode.prompt[: len(prompt)].tolist() == prompt
        generation = answer(move, turn)
        prompt = [*episode.prompt.tolist(), *generation.token_ids.tolist()]
        sampled += generation.token_ids.tolist()
        move = episode.generated(generation, ENGINE, now_ms)
        if isinstance(move, Act):
            move = episode.observed(move.action, turn.observation, now_ms, done=turn.done)
    record = checked(episode)

    assert isinstance(move, Stop)
    assert record.token_ids.tolist() == prompt
    assert record.token_ids[record.mask_array == 1].tolist() == sampled
    assert len(record.turns) <= horizon
    assert record.sampled_count <= budget
    assert len(record.token_ids) <= context
    assert (move.reason is StopReason.DONE) <= record.turns[-1].valid
    assert (move.reason is StopReason.INVALID_ACTION) <= (invalid_ends and not record.turns[-1].valid)
    assert (move.reason is StopReason.TURNS) <= (len(record.turns) == horizon)
    assert (move.reason is StopReason.TOKENS) <= (record.sampled_count == budget)
