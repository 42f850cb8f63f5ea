"""What a person names in the log, and why it has no outcome: unknown, on its way or withdrawn are told apart."""

from __future__ import annotations

import pytest

from infra.bus import TopicPartition
from infra.clock import VirtualClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill.target import Target, parse_target, why_none
from schemas.control import Cancel, RunManifest
from schemas.messages import Budgets
from schemas.topics import CONTROL, TABLE, TASKS
from tests.logs import make_task

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("text", "run", "group", "sample"),
    [("r", "r", "", None), ("r/g", "r", "g", None), ("r/g/0", "r", "g", 0), ("r.eval.3/g/12", "r.eval.3", "g", 12)],
)
def test_a_name_is_a_run_a_group_or_a_sample(text, run, group, sample):
    """And is written as it was read."""
    target = parse_target(text)

    assert Target(run=run, group=group, sample=sample) == target
    assert text == str(target)


@pytest.mark.parametrize(
    "text", ["", "/", "r/", "r//0", "r/g/", "r/g/x", "r/g/-1", "r/g/0/1", "../g/0", "r/g\n/0", "r/g/²"]
)
def test_what_is_no_name_is_refused(text):
    """With what is expected."""
    with pytest.raises(ValueError, match=r"is no name for a run|expected RUN, RUN/GROUP or RUN/GROUP/NUMBER"):
        parse_target(text)


class Log:
    """A log with one run of one task, an hour after it was published."""

    def __init__(self):
        self.clock = VirtualClock(HOUR_MS)
        self.bus = MemoryBus(self.clock)
        self.publisher = Publisher(self.bus, self.clock, "test")

    async def fill(self, *, start_by_ms=2 * HOUR_MS):
        await self.bus.create_topics(TABLE)
        await self.publisher.publish(CONTROL, RunManifest(run="r", seed=1, samples=2))
        budgets = Budgets(init_s=1, run_s=1, eval_s=1)
        task = make_task(run="r", group="g", sample=0, samples=2, start_by_ms=start_by_ms, budgets=budgets)
        await self.publisher.publish(TASKS, task)
        return self

    async def why(self, text):
        return await why_none(self.bus, self.clock, parse_target(text))


async def test_an_unknown_run_is_named_with_the_known_ones():
    """Nothing of it was ever written, so it does not run either."""
    why = await (await Log().fill()).why("nosuch")

    assert why == "there is no run 'nosuch' in this log; known runs: r"


@pytest.mark.parametrize("text", ["r/x", "r/g/7"])
async def test_an_unknown_sample_of_a_known_run_is_told_from_one_that_runs(text):
    """A misspelt id is nobody's task."""
    assert await (await Log().fill()).why(text) == f"run 'r' is known, but no task of it is {text}"


async def test_what_has_a_task_is_on_its_way_and_ends_in_time():
    """The task says until when."""
    why = await (await Log().fill()).why("r/g/0")

    assert why.startswith("its task is in `tasks`, so it is queued or running")
    assert why.endswith("at 1970-01-01T02:00:33+00:00 it expires")


async def test_what_should_have_ended_is_the_reapers():
    """Its time is over, and nobody has said so yet."""
    why = await (await Log().fill(start_by_ms=1)).why("r/g/0")

    assert why == "its time ran out at 1970-01-01T00:00:33+00:00, and the reaper has not ended it yet: does it run?"


@pytest.mark.parametrize("target", ["r", "r/g", "r/g/0"])
async def test_what_was_withdrawn_is_said_with_its_cause(target):
    """However much was withdrawn with it."""
    log = await Log().fill()
    await log.publisher.publish(CONTROL, Cancel(target=target, cause="wrong reward"))

    assert (await log.why("r/g/0")).startswith(f"{target} is cancelled (wrong reward), and the reaper has not ended it")


async def test_what_the_log_has_forgotten_is_not_called_unknown():
    """Tasks are kept for a week, outcomes for longer."""
    log = await Log().fill()
    for partition, end in (await log.bus.end_offsets(TASKS.name)).items():
        log.bus.log.trim(TopicPartition(TASKS.name, partition), end)

    assert (await log.why("r/g/0")).endswith("; the oldest tasks are no longer in the log")
