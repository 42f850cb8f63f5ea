"""A record that was started twice and never ended runs alone, in a process of its own.

It may have killed the workers that started it (memory, a crash in native code), or only have been in flight when
something else did. Alone it can kill nothing but its own process; only that death is counted, and the second one ends
the sample as failed and puts the record into `dead`. The child does all of the work, events and output included; the
worker here only waits, within the same limits as for any record. It does not know what the work is: the child is the
stage's own command with `--only TOPIC:PARTITION:OFFSET`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from infra import leash
from infra.bus import Record
from infra.dead_letter import CRASHED, Death
from infra.errors import BusError, Failure
from infra.middleware import Call, Job, Middleware, Output, Result
from infra.terminal import terminal
from schemas.outcome import Boundary, FailureKind
from schemas.telemetry import EventKind
from schemas.topics import TRAJECTORIES

log = logging.getLogger(__name__)

LOG_AWAY = 75
"""Exit code of a child that could not do its work because the log was away (EX_TEMPFAIL of sysexits.h)."""

CHILDREN = 2
"""Most such processes of one worker at once: each loads what the stage loads."""

Alone = Callable[[Record], Awaitable[int]]
"""Runs a record in a process of its own and returns its exit code, a negative number for a signal."""


def isolation(alone: Alone | None) -> Middleware:
    """Run suspects alone; without a way to do that they run as all others do."""

    def around(call: Call) -> Call:
        async def guarded(job: Job) -> Result:
            if alone is None or not job.start.suspect:
                return await call(job)
            return await _suspect(job, alone)

        return guarded

    return around


async def _suspect(job: Job, alone: Alone) -> Result:
    record, start = job.received.record, job.start
    log.warning("%s: %s was started %d times without an end; it runs alone now", job.stage, job.task.id, start.starts)
    while True:
        code = await alone(record)
        if code == 0:
            return Result(EventKind.FINISHED)
        if code == LOG_AWAY:
            raise BusError(f"the process of {job.task.id} found the log away; see its lines above")
        if start.proven:
            return _doomed(job, code)
        start = job.died()
        log.warning("%s: the process of %s ended with code %d; once more", job.stage, job.task.id, code)


def _doomed(job: Job, code: int) -> Result:
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    cause = f"it ended its own process twice in {job.stage}, the last time {how}"
    failure = Failure(FailureKind.INFRASTRUCTURE, Boundary.STAGE, cause)
    trajectory = terminal(job.task, failure.outcome(), job.stage)
    death = Death(stage=job.stage, cause=cause, kind=CRASHED, attempts=job.task.attempt + 1)
    return Result(EventKind.DEAD, Output(TRAJECTORIES, trajectory), detail=cause, death=death)


class ChildProcess:
    """Runs records by a command that takes `--only` (`Alone`)."""

    def __init__(self, command: Sequence[str]) -> None:
        """Take the command.

        Args:
            command: what follows the interpreter on the command line, such as `-m stages.run --config FILE`.
        """
        self._command = command
        self._slots = asyncio.Semaphore(CHILDREN)

    async def __call__(self, record: Record) -> int:
        """Run one record. A cancelled call kills the child."""
        place = f"{record.topic}:{record.partition}:{record.offset}"
        async with self._slots:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid())),
                *(sys.executable, *self._command, "--only", place),
                stdin=asyncio.subprocess.DEVNULL,
            )
            try:
                return await child.wait()
            finally:
                if child.returncode is None:
                    with suppress(ProcessLookupError):
                        child.kill()
                    await child.wait()
