"""A record that was started twice and never ended runs alone, in a process of its own.

It may have killed the workers that started it (memory, a crash in native code), or only have been in flight when
something else did. Alone it can kill nothing but its own process; only that death is counted, and the second one ends
the sample as failed and puts the record into `dead`. A child that did not begin its work, or found the log away, says
nothing against its record: the worker ends, as it would itself. It says when it begins (`tell_begun`), through a pipe
that its death cannot take back: whatever ended it before that, a module that is gone, a disk that is full, a system
without memory, was not the record. The child does all of the work, events and output
included, and keeps the limits of the record; the worker here only waits, a little longer than these, since a child that
hangs in native code keeps no limit. It does not know what the work is: the child is the stage's own command with
`--only TOPIC:PARTITION:OFFSET`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from infra import leash
from infra.bus import Record
from infra.dead_letter import CRASHED, Death
from infra.errors import BusError, Failure, RollmillError, ServiceError
from infra.middleware import Call, Job, Middleware, Output, Result
from infra.middleware.deadline import budget_s
from infra.terminal import terminal
from schemas.outcome import Boundary, FailureKind
from schemas.telemetry import EventKind
from schemas.topics import TRAJECTORIES

log = logging.getLogger(__name__)

LOG_AWAY = 75
"""Exit code of a child that could not do its work because the log was away (EX_TEMPFAIL of sysexits.h)."""

NOT_BEGUN = 69
"""Exit code of a child that could not begin: settings, a service, the end of `control` (EX_UNAVAILABLE)."""

CODES: Mapping[type[RollmillError], int] = {BusError: LOG_AWAY, RollmillError: NOT_BEGUN}
"""How a child ends with an error of ours, the first that fits. None is its record's: those became records."""

OVERDUE = 124
"""Instead of the exit code of a child that did not end within its limit and was killed, as `timeout` has it."""

AROUND_S = 240.0
"""What a child may take besides its record's budget, seconds: to start, connect, read `control` to its end, publish.
Each of these has a limit of its own; together they take less."""

CHILDREN = 2
"""Most such processes of one worker at once: each loads what the stage loads."""

BEGUN = "ROLLMILL_BEGUN_FD"
"""Names the descriptor, in the child's environment, that it writes a byte to when it begins its work."""

Alone = Callable[[Record, float], Awaitable[int]]
"""Runs a record in a process of its own, at most so many seconds, and returns its exit code: a negative number for a
signal, OVERDUE if it did not end; NOT_BEGUN instead of all of them if it had not begun its work."""


def isolation(alone: Alone | None, outage_s: float = 0.0) -> Middleware:
    """Run suspects alone.

    Args:
        alone: how; without it they run as all others do.
        outage_s: most time that an outage of a service adds to a budget, seconds. Whether there was one only the child
            may know.
    """

    def around(call: Call) -> Call:
        async def guarded(job: Job) -> Result:
            if alone is None or not job.start.suspect:
                return await call(job)
            return await _suspect(job, alone, budget_s(job.task, job.stage) + outage_s + AROUND_S)

        return guarded

    return around


async def _suspect(job: Job, alone: Alone, limit_s: float) -> Result:
    record, start = job.received.record, job.start
    log.warning("%s: %s was started %d times without an end; it runs alone now", job.stage, job.task.id, start.starts)
    while True:
        code = await alone(record, limit_s)
        if code == 0:
            return Result(EventKind.FINISHED)
        if code == LOG_AWAY:
            raise BusError(f"the process of {job.task.id} found the log away; see its lines above")
        if code in (NOT_BEGUN, leash.NOT_STARTED):
            raise ServiceError(
                f"the process of {job.task.id} did not begin its work (code {code}); see its lines above"
            )
        if start.proven:
            return _doomed(job, code)
        start = job.died()
        log.warning("%s: %s ended its process %s; once more", job.stage, job.task.id, _how(code))


def _doomed(job: Job, code: int) -> Result:
    cause = f"it ended its own process twice in {job.stage}, the last time {_how(code)}"
    failure = Failure(FailureKind.INFRASTRUCTURE, Boundary.STAGE, cause)
    trajectory = terminal(job.task, failure.outcome(), job.stage)
    death = Death(stage=job.stage, cause=cause, kind=CRASHED, attempts=job.task.attempt + 1)
    return Result(EventKind.DEAD, Output(TRAJECTORIES, trajectory), detail=cause, death=death)


def _how(code: int) -> str:
    if code == OVERDUE:
        return "by hanging until it was killed"
    return f"by signal {-code}" if code < 0 else f"with code {code}"


class ChildProcess:
    """Runs records by a command that takes `--only` (`Alone`)."""

    def __init__(self, command: Sequence[str]) -> None:
        """Take the command.

        Args:
            command: what follows the interpreter on the command line, such as `-m stages.run --config FILE`.
        """
        self._command = command
        self._slots = asyncio.Semaphore(CHILDREN)

    async def __call__(self, record: Record, limit_s: float) -> int:
        """Run one record. A child that does not end in time is killed, and so is that of a cancelled call."""
        place = f"{record.topic}:{record.partition}:{record.offset}"
        async with self._slots:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            try:
                child = await self._start(place, writer)
                code = await _ended(child, limit_s)
                return code if code in (0, LOG_AWAY) or _has_begun(reader) else NOT_BEGUN
            finally:
                os.close(reader)

    async def _start(self, place: str, writer: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid())),
                *(sys.executable, *self._command, "--only", place),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, BEGUN: str(writer)},
                pass_fds=(writer,),
            )
        finally:
            os.close(writer)


async def _ended(child: asyncio.subprocess.Process, limit_s: float) -> int:
    """Return how a child ended; it is gone whichever way this is left."""
    try:
        async with asyncio.timeout(limit_s):  # from its start on: to wait for a place is not its fault
            return await child.wait()
    except TimeoutError:
        return OVERDUE
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def tell_begun() -> None:
    """Say to the worker that started this process that its record is taken up now; without one, say nothing."""
    descriptor = os.environ.pop(BEGUN, "")
    if descriptor.isdigit():
        # A worker that is gone reads no more; then nobody counts.
        with suppress(OSError):
            os.write(int(descriptor), b"1")
            os.close(int(descriptor))


def _has_begun(reader: int) -> bool:
    try:
        return bool(os.read(reader, 1))
    except BlockingIOError:  # something that the child left behind holds the other end
        return False
