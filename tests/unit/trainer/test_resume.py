import re

import pytest

from infra.errors import ConfigError
from trainer.config import make_config
from trainer.resume import RULES, changes, identity, refuse_changes, rule, table


def run_of(**values):
    """Return what is written down about a run."""
    config = make_config({"run": "r", "model": "/m", "directory": "/d", **values})
    return identity(config, values.get("tokenizer", "t"), "m")


def keys(values):
    return {f"{key}.{part}" for key, inner in values.items() if isinstance(inner, dict) for part in inner} | {
        key for key, inner in values.items() if not isinstance(inner, dict)
    }


def test_every_key_of_the_configuration_has_a_line():
    """A new key is decided about, not forgotten; and no line is about a key that does not exist."""
    known = keys(run_of())

    assert all(rule(key).why for key in known)
    sections = {key.partition(".")[0] for key in known} | {"tasks"}
    assert {key for key in RULES if key not in known | sections} == {
        "ranks",
        *("tasks.family", "tasks.payload", "tasks.name"),
    }


@pytest.mark.parametrize(
    "free",
    [
        {"algorithm": {"lr": 1e-5}},
        {"algorithm": {"groups": 3, "minibatches": 1}},
        {"algorithm": {"max_lag": 4}},
        {"algorithm": {"horizon": 30, "temperature": 0.5}},
        {"stop": {"max_steps": 7}},
        {"checkpoints": {"every": 5}},
        {"model": "/elsewhere", "directory": "/moved", "publish": "/v"},
        {"tasks": {"jsonl": "moved.jsonl", "count": 9}},
    ],
)
def test_what_later_steps_rest_on_may_change_and_is_told(free):
    """Rates, batches, staleness, horizons, limits and places."""
    changed = refuse_changes("r", run_of(), run_of(**free))

    assert set(changed) == keys(free)


@pytest.mark.parametrize(
    ("fixed", "named"),
    [
        ({"seed": 4}, "seed was 0, now it is 4 (every derived seed"),
        ({"tokenizer": "other"}, 'tokenizer_digest was "t", now it is "other" (tokenizer and chat template'),
        ({"algorithm": {"samples": 4}}, "algorithm.samples was 8, now it is 4 (siblings"),
        ({"algorithm": {"shuffle_seed": 1}}, "algorithm.shuffle_seed was null, now it is 1 (a constant of the reward"),
        (
            {"algorithm": {"overlong": {"max_tokens": 9, "cache_tokens": 3}}},
            'algorithm.overlong was null, now it is {"cache_tokens": 3, "max_tokens": 9} (a constant of the reward',
        ),
        ({"algorithm": {"lora": {"rank": 8}}}, "algorithm.lora was null, now it is {"),
        ({"tasks": {"family": "other"}}, "tasks.family was null"),
    ],
)
def test_what_recorded_steps_rest_on_is_refused_with_its_reason_and_the_way_out(fixed, named):
    """The error names both values, the fork, and the whole table."""
    tokenizer = fixed.pop("tokenizer", "t")
    now = {**run_of(**fixed), "tokenizer_digest": tokenizer}

    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        refuse_changes("r", run_of(), now)

    assert "--fork NEW_RUN" in str(refused.value)
    assert table() in str(refused.value)


def test_a_key_that_was_not_known_then_had_its_default():
    """A run of an older program goes on; what it wrote and nobody knows any more is no obstacle."""
    before = run_of()
    del before["checkpoints"]["milestones"]
    del before["algorithm"]["overlong"]
    before["algorithm"]["forgotten"] = before["forgotten"] = 1

    assert "checkpoints.milestones" not in changes(before, run_of())
    assert refuse_changes("r", before, run_of()).keys() <= {"algorithm.forgotten"}
    with pytest.raises(ConfigError, match=r"algorithm\.overlong was null"):
        refuse_changes("r", before, run_of(algorithm={"overlong": {"max_tokens": 9, "cache_tokens": 3}}))


def test_the_number_of_ranks_may_change_and_is_told():
    """One rank is what runs had before there could be more, so it is not written down."""
    config = make_config({"run": "r", "model": "/m", "directory": "/d"})
    one, two = (identity(config, "t", "m", ranks=count) for count in (1, 2))

    assert refuse_changes("r", one, two) == {"ranks": (None, 2)}
    assert one == run_of()


@pytest.mark.parametrize("now", [{"rank": 8}, {"alpha": 64}, {"targets": ["q_proj"]}, None])
def test_adapters_stay_what_they_were(now):
    """A checkpoint holds nothing else."""
    before = run_of(algorithm={"lora": {"rank": 16}})

    with pytest.raises(ConfigError, match=r"algorithm\.lora was .* \(checkpoints hold these adapters"):
        refuse_changes("r", before, run_of(algorithm={"lora": now}))
