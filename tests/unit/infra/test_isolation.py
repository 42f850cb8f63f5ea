"""A suspect runs alone: its own death is counted against it, and nothing else is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from infra import leash
from infra.bus import Record
from infra.errors import BusError, ConfigError, OffsetLost, ServiceError, WaitTimeout
from infra.isolation import AROUND_S, CHILDREN, CODES, LOG_AWAY, NOT_BEGUN, OVERDUE, ChildProcess, isolation
from infra.middleware import Job
from infra.offsets import Start
from infra.service import run_service
from infra.wire import Received
from schemas.messages import Budgets
from schemas.telemetry import EventKind
from tests.logs import make_task

TASK = make_task(budgets=Budgets(init_s=10.0, run_s=20.0, eval_s=30.0))
RECORD = Record("tasks", 0, 5, 1000, None, b"")
PATIENCE_S = 60.0
"""Far more than a child of these tests needs to start, seconds."""
BEGINS = "from infra.isolation import tell_begun; tell_begun(); "
"""What a stage's process says once it has all that it needs."""
HANGS = f"{BEGINS}import re; re.match('(a+)+$', 'a' * 64 + 'b')"
"""A program that stays in native code and keeps the interpreter's lock: none of its own timers runs."""


@dataclass
class Suspect:
    """A record that was started twice without an end, run alone with these exit codes."""

    codes: list[int]
    deaths: int = 0
    limits: list[float] = field(default_factory=list)

    async def alone(self, record, limit_s):
        self.limits.append(limit_s)
        return self.codes.pop(0)

    def died(self):
        self.deaths += 1
        return Start(2 + self.deaths)

    async def run(self, stage="run", outage_s=0.0):
        job = Job(stage, Received(RECORD, TASK, b""), Start(2), self.died)
        return await isolation(self.alone, outage_s)(here)(job)


async def here(job):
    raise AssertionError("a suspect is not run in the worker's own process")


@pytest.mark.parametrize("code", [NOT_BEGUN, leash.NOT_STARTED])
async def test_a_process_that_did_not_begin_says_nothing_against_its_record(code):
    """Two slow starts of a busy machine must not end an innocent sample; the worker ends and begins anew."""
    suspect = Suspect([code])
    with pytest.raises(ServiceError, match="did not begin its work"):
        await suspect.run()

    assert 0 == suspect.deaths


async def test_a_process_that_hangs_twice_has_shown_that_its_record_does_it():
    """It ends as failed, like one that crashes."""
    suspect = Suspect([OVERDUE, OVERDUE])
    result = await suspect.run()

    assert (1, EventKind.DEAD) == (suspect.deaths, result.kind)
    assert "by hanging until it was killed" in result.death.cause


async def test_a_process_has_the_budget_of_its_stage_and_what_surrounds_it():
    """An outage that only the child knows of makes the budget stand still."""
    suspect = Suspect([0])
    await suspect.run("run", outage_s=100.0)

    assert [20.0 + 100.0 + AROUND_S] == suspect.limits


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError, NOT_BEGUN), (WaitTimeout, NOT_BEGUN), (BusError, LOG_AWAY), (OffsetLost, LOG_AWAY)],
)
def test_a_process_tells_by_its_code_what_kept_it_from_its_work(error, code):
    """Only a code that none of these gives is a death."""

    async def main():
        raise error("as it may be")

    assert code == run_service(main, codes=CODES)


async def test_a_process_that_hangs_in_native_code_is_killed():
    """It would hold its slot for ever, and no commit of its partition would pass it."""
    code = NOT_BEGUN
    for limit_s in (0.5, 5.0, 50.0):  # on a busy machine it may not have begun in the first of them
        if code == NOT_BEGUN:
            code = await asyncio.wait_for(ChildProcess(["-c", HANGS])(RECORD, limit_s), PATIENCE_S)

    assert OVERDUE == code


async def test_a_wait_for_a_place_is_not_counted_against_a_record():
    """Others may hold all places for as long as they like."""
    child = ChildProcess(["-c", HANGS])
    others = [asyncio.create_task(child(RECORD, PATIENCE_S)) for _ in range(CHILDREN)]
    await asyncio.sleep(0)  # they are in
    waiting = asyncio.create_task(child(RECORD, 0.0))
    ended, _ = await asyncio.wait([waiting], timeout=0.3)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)

    assert not ended
    assert NOT_BEGUN == await asyncio.wait_for(waiting, PATIENCE_S)  # no time to begin in


async def test_a_process_that_ends_in_time_gives_its_code():
    """A signal as a negative number."""
    ends = ChildProcess(["-c", f"{BEGINS}import sys; sys.exit(7)"])
    dies = ChildProcess(["-c", f"{BEGINS}import os; os.kill(os.getpid(), 9)"])

    assert (7, -9) == (await ends(RECORD, PATIENCE_S), await dies(RECORD, PATIENCE_S))


@pytest.mark.parametrize(
    "program",
    [
        "import there_is_no_such_module",
        "raise OSError(28, 'No space left on device')",
        "import os; os.kill(os.getpid(), 9)",
        "import sys; sys.exit(2)",
    ],
)
async def test_what_ends_a_process_before_it_takes_up_its_record_is_no_death(program):
    """A module that is gone, a full disk, a system without memory: it would have ended any other record's as well."""
    assert NOT_BEGUN == await ChildProcess(["-c", program])(RECORD, PATIENCE_S)


@pytest.mark.parametrize(("program", "code"), [("", 0), (f"import sys; sys.exit({LOG_AWAY})", LOG_AWAY)])
async def test_a_process_that_says_what_happened_is_believed_whether_it_began_or_not(program, code):
    """It was asked to stop, or the log was away when it looked for its record."""
    assert code == await ChildProcess(["-c", program])(RECORD, PATIENCE_S)
