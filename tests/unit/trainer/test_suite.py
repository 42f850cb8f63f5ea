"""A suite that was played is read back as it was counted when it was played."""

from __future__ import annotations

import pytest

from infra.errors import ConfigError
from tests.suite_log import CLOCK, FAILED, SuiteLog, graded
from trainer.suite import Name, TaskKey, parse_name, read_suite


@pytest.fixture
async def log():
    """Return a log with all topics."""
    log = SuiteLog()
    await log.begin()
    return log


async def read(log, text):
    """Read a suite by what a person calls it."""
    return await read_suite(log.bus, CLOCK, parse_name(text))


def key(row, seed=3):
    return TaskKey(f"d{row}", seed * 100 + row, row)


async def test_a_version_of_a_run_leads_to_the_suite_that_it_played(log):
    """By `best`, `last` or its step; each sample in its place, and how they came about."""
    await log.play("r.eval.2.v5", {(0, 1): 0.5, (0, 0): 1.0, (1, 0): 0.0, (1, 1): 1.0}, samples=2)
    await log.write_down("r", 2, 5, "r.eval.2.v5", tasks=2)

    for name in ("r@best", "r@last", "r@step:2"):
        found = await read(log, name)
        assert (found.run, found.version, str(found.name), found.silent) == ("r.eval.2.v5", 5, name, 0)
        assert found.tasks == {key(0): (1.0, 0.5), key(1): (0.0, 1.0)}
        assert (found.settings["seed"], found.settings["samples"]) == (3, 2)


async def test_what_failed_or_was_sampled_by_other_weights_is_missing(log):
    """The version is the one that was written down; a run that nobody wrote down has samples of any."""
    ends = {(0, 0): FAILED, (1, 0): graded(1.0, version=4), (2, 0): graded(1.0)}
    await log.play("r.eval.2.v5", ends)
    await log.play("other", ends)
    await log.write_down("r", 2, 5, "r.eval.2.v5", tasks=3)

    assert list((await read(log, "r@best")).tasks.values()) == [(None,), (None,), (1.0,)]
    assert list((await read(log, "other")).tasks.values()) == [(None,), (1.0,), (1.0,)]


async def test_a_second_try_counts_where_the_first_one_does_not(log):
    """It is another group of the same task, with the same seed; what counted once stays."""
    await log.play("r.eval.2.v5", {(0, 0): FAILED, (1, 0): 0.0})
    await log.end("r.eval.2.v5", 0, 0, graded(1.0), visit=1)
    await log.end("r.eval.2.v5", 1, 0, graded(1.0), visit=1)

    assert (await read(log, "r.eval.2.v5")).tasks == {key(0): (1.0,), key(1): (0.0,)}


async def test_tasks_of_which_nothing_is_in_the_log_are_counted(log):
    """By what was written down when the suite was played, under either of its names."""
    await log.play("r.eval.2.v5", {(0, 0): 1.0}, extra={"evaluates": {"run": "r", "step": 2}})
    await log.write_down("r", 2, 5, "r.eval.2.v5", tasks=4)

    assert [(await read(log, name)).silent for name in ("r@best", "r.eval.2.v5")] == [3, 3]
    assert (await read(log, "r.eval.2.v5")).version == 5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nosuch", "run 'nosuch' has no manifest"),
        ("nosuch@best", "no trainer ever started"),
        ("r", r"is trained.*r@best, r@last or r@step:N"),
        ("r@step:7", "run 'r': .*no version of step 7"),
        ("r@last", r"run 'r': 'last': the version of step 3 was not evaluated; .* there are: 2"),
        ("r@first", "names no version"),
    ],
)
async def test_a_suite_that_there_is_not_is_told_with_those_that_there_are(log, name, says):
    """Nothing is compared by guess."""
    await log.play("r", {(0, 0): 1.0})
    await log.play("r.eval.2.v5", {(0, 0): 1.0})
    await log.write_down("r", 2, 5, "r.eval.2.v5", tasks=1)
    await log.announce("r", 3, 6)

    with pytest.raises(ConfigError, match=says):
        await read(log, name)


def test_a_name_is_a_run_or_one_of_its_versions():
    """The last @ parts them; neither may be missing."""
    assert parse_name("my-run@step:3") == Name("my-run", "step:3")
    assert parse_name("my-run") == Name("my-run", "")
    for text in ("@best", "my-run@", "a b@best", ""):
        with pytest.raises(ValueError, match="name"):
            parse_name(text)
