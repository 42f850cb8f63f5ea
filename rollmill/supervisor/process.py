"""One child process: on a leash, in a session of its own, its output in a log file.

Promises: the pid is that of the program itself, not of a wrapper; when a life is over, by itself or by `stop`, nothing
that it started in its process group is left; the child ends when the supervisor does (`infra/leash.py`). It does not
know restarts, readiness or other services.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra import leash
from infra.broker.pidfile import identity_of
from rollmill.supervisor.errors import NotStopped
from rollmill.supervisor.logfile import LogFile

LEASH = Path(leash.__file__)

OUTPUT_LIMIT_S = 1.0
"""Longest wait for the last output of a process that has ended."""

KILL_LIMIT_S = 10.0
"""Longest wait for a killed process to be gone; more means that the system holds it."""

PIPE_BYTES = 1 << 20
"""Output that a child may write ahead while the supervisor is busy; a full pipe would hold the child up."""


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int
    """Its exit code; the negative number of the signal that ended it."""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:  # a real-time signal has no name
            return f"killed by signal {-self.code}"


class _Output(asyncio.Protocol):
    """Passes what a pipe brings to the log file."""

    def __init__(self, log: LogFile) -> None:
        self._log = log
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self._log.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that nothing more will come."""
        self.ended.set()


class Process:
    """A running child; made by `start`."""

    def __init__(self, child: asyncio.subprocess.Process, output: _Output, pipe: asyncio.ReadTransport) -> None:
        self._child = child
        self._output = output
        self._pipe = pipe
        self.pid = child.pid
        # Empty when it has ended already: such a process is nobody's.
        self.identity = identity_of(child.pid) or ""
        self._over = False

    @classmethod
    async def start(cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: LogFile) -> Process:
        """Start a program.

        Args:
            argv: the program, looked up on the PATH, and its arguments.
            env: added to the supervisor's environment.
            cwd: directory to start it in.
            log: where both its outputs go.
        """
        # A pipe of our own: with asyncio's, some Python versions report an exit only when the last descendant has
        # closed its output, and then a leftover that holds it would hide the death that leads to its removal.
        reader, writer = os.pipe()
        output = _Output(log)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: output, os.fdopen(reader, "rb", 0))
        try:
            _widen(writer)
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                cwd=cwd,
                # Ctrl-C at the terminal must reach the supervisor alone, which then ends things in order.
                start_new_session=True,
            )
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(writer)
        return cls(child, output, pipe)

    async def wait(self) -> Exit:
        """Return how it ended, once it has."""
        return Exit(await self._child.wait())

    def signal(self, number: int) -> bool:
        """Send a signal to the process alone; False if it has ended already."""
        # Not by the child's own method: before Python 3.12.9 that may take its exit code away from asyncio.
        if self._over or identity_of(self.pid) != self.identity:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def kill_group(self) -> None:
        """Kill the process and all that it started in its group, now."""
        if self._over:
            return  # its number may belong to somebody else by now
        # Without a member left this finds nothing. macOS answers "not permitted" for a group of zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """End it without waiting, when nobody can wait any more; nothing to do after `stop`."""
        self.kill_group()
        self._over = True
        self._pipe.close()

    async def stop(self, number: int, *, grace_s: float) -> Exit:
        """End it by a signal, or by force when it takes longer than its grace."""
        self.signal(number)
        try:
            async with asyncio.timeout(grace_s):
                await self._child.wait()
        except TimeoutError:
            self.kill_group()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                return await self._clear()
        except TimeoutError:
            raise NotStopped(
                f"process {self.pid} was killed {KILL_LIMIT_S:.0f} s ago and is still there; "
                "the system holds it (often a hanging disk): look at it with ps"
            ) from None

    async def _clear(self) -> Exit:
        """Remove what an ended process left in its group, take its last output, and return how it ended."""
        ended = await self.wait()
        self.kill_group()
        self._over = True
        # Something outside its group may still hold the pipe; what that says is no output of this service.
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_LIMIT_S):
                await self._output.ended.wait()
        self._pipe.close()
        return ended


def _widen(pipe: int) -> None:
    if sys.platform == "linux":
        import fcntl  # noqa: PLC0415 - F_SETPIPE_SZ is Linux only

        # Refused when an unprivileged user has many pipes; the default of 64 KiB works too.
        with suppress(PermissionError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
