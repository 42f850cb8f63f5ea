"""Task sources by description, and sources that generate."""

from __future__ import annotations

import itertools
import math

import pytest

from infra.errors import ConfigError
from producers.generated import GeneratedSource
from producers.jsonl import JsonlSource
from producers.source import Instance
from producers.sources import describe, make_source
from schemas.messages import Budgets
from schemas.transcript import Repetition, Sampling


def test_a_generated_source_counts_up_for_ever():
    """Same template, next index; from any place on."""
    source = GeneratedSource("keydoor", {"size": 5})

    assert source.name == "keydoor"
    assert [
        Instance(0, 0, "keydoor", {"size": 5, "index": 0}),
        Instance(0, 1, "keydoor", {"size": 5, "index": 1}),
    ] == list(itertools.islice(source.instances(), 2))
    assert next(source.instances(10**6)) == Instance(0, 10**6, "keydoor", {"size": 5, "index": 10**6})


def test_a_generated_source_ends_at_its_count():
    """An evaluation has a size."""
    source = GeneratedSource("keydoor", {}, name="held out", count=3)

    assert ([0, 1, 2], [2], []) == tuple([i.row for i in source.instances(start)] for start in (0, 2, 7))
    assert source.name == "held out"


def test_a_section_describes_a_generated_source(tmp_path):
    """Family, payload, count and name."""
    described = describe({"family": "keydoor", "payload": {"size": 7}, "count": 1, "name": "big", "max_tokens": 8})
    source = make_source(described, tmp_path)

    assert isinstance(source, GeneratedSource)
    assert ("big", [{"size": 7, "index": 0}]) == (source.name, [instance.payload for instance in source.instances()])
    assert (8, 4096, Budgets()) == (described.max_tokens, described.max_sampled_tokens, described.budgets)


def test_a_section_describes_a_file_beside_it(tmp_path):
    """The path is relative to RUN.toml, and a file is repeated unless told otherwise."""
    (tmp_path / "a.jsonl").write_text('{"family": "toy", "payload": {}}\n')
    endless = make_source(describe({"jsonl": "a.jsonl"}), tmp_path)
    once = make_source(describe({"jsonl": "a.jsonl", "repeat": False}), tmp_path)

    assert isinstance(endless, JsonlSource)
    assert (3, 1) == (len(list(itertools.islice(endless.instances(), 3))), len(list(once.instances())))


def test_a_section_says_where_an_answer_ends(tmp_path):
    """Limits of a turn, stop sequences by token and what counts as a loop go into how the policy samples."""
    loop = {"max_pattern_size": 16, "min_count": 3}
    described = describe({"family": "toy", "max_tokens": 8, "stop_sequences": [[4, 5], [6]], "repetition": loop})

    assert described.sampling(0.5) == Sampling(
        temperature=0.5,
        max_tokens=8,
        stop_sequences=((4, 5), (6,)),
        repetition=Repetition(max_pattern_size=16, min_pattern_size=1, min_count=3),
    )


@pytest.mark.parametrize("section", [{}, {"jsonl": "a.jsonl", "family": "toy"}])
def test_a_section_needs_exactly_one_source(tmp_path, section):
    """Neither and both are errors."""
    with pytest.raises(ConfigError, match=r"either `jsonl` .* or `family` .* and not both"):
        make_source(describe(section), tmp_path)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"familly": "toy"}, r"\[tasks\]: .*unknown field `familly`"),
        ({"family": 7}, r"\[tasks\]: family: "),
        ({"family": "toy", "budgets": {"run_s": "long"}}, r"\[tasks\]: budgets.run_s: "),
        ({"family": "toy", "budgets": {"run_s": -1}}, r"\[tasks\]: budgets.run_s is -1"),
        ({"family": "toy", "budgets": {"init_s": math.nan}}, r"\[tasks\]: budgets.init_s is nan"),
        ({"family": "toy", "max_tokens": 0}, r"\[tasks\]: max_tokens: Expected `int` >= 1"),
        ({"family": "toy", "max_sampled_tokens": 2**31}, r"\[tasks\]: max_sampled_tokens: Expected `int` <= "),
        ({"family": "toy", "count": -1}, r"\[tasks\]: count: "),
        ({"family": "toy", "budgets": {"run": 9}}, r"\[tasks\]: budgets has unknown fields \['run'\]; it has init_s"),
        ({"family": "toy", "stop_sequences": [[]]}, r"\[tasks\]: stop_sequences has \(\); it is 1 to 256 token ids"),
        ({"family": "toy", "stop_sequences": ["</a>"]}, r"\[tasks\]: stop_sequences\[0\]: Expected `array`.*\[\[13"),
        ({"family": "toy", "repetition": 5}, r"\[tasks\]: repetition: .*table of max_pattern"),
        ({"family": "toy", "repetition": {"min_count": 4}}, r"\[tasks\]: repetition: .*missing .*`max_pattern_size`"),
        (
            {"family": "toy", "repetition": {"max_pattern_size": 8, "count": 4}},
            r"\[tasks\]: repetition has unknown fields \['count'\]",
        ),
    ],
)
def test_a_misspelt_section_names_the_field(section, says):
    """A typo is not silently a default."""
    with pytest.raises(ConfigError, match=says):
        describe(section)
