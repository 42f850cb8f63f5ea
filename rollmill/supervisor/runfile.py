"""Who supervises a directory, and with what: a lock and a state file.

The lock is held by the system for the life of the supervisor and vanishes with it, however it ends: it alone decides
whether a second one may start. The state file tells people and `rollmill status` the rest. A process in it counts as
running only when its start time matches too, so nothing here ever names or ends a stranger.
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from infra.broker.pidfile import identity_of
from infra.disk import room_for
from rollmill.supervisor.errors import AlreadyRunning

LOCK_NAME = "supervisor.lock"
"""Held by whoever supervises the directory."""

STATE_NAME = "supervisor.json"
"""Says what is supervised."""


@dataclass(frozen=True, kw_only=True)
class InstanceState:
    """One instance of a service, as the state file has it."""

    service: str
    """Name of the service."""
    instance: int
    """Which of its instances, from 0."""
    state: str
    """What happened to it last, in the words of `What`."""
    pid: int
    """Process of its last life."""
    identity: str
    """Tells that process from any other that ever has its pid."""
    started_ms: int
    """When that life began."""
    lives: int
    """How often it was started."""
    log: str
    """Its log file."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a supervisor runs."""

    pid: int
    """The supervisor."""
    identity: str
    """Tells it from any other process that ever has its pid."""
    started_ms: int
    """When it began."""
    addresses: dict[str, str]
    """Where its services are reached, by service."""
    instances: list[InstanceState]
    """Its services; empty until the first one is started."""

    @property
    def since(self) -> str:
        """When it began, in local time."""
        return datetime.fromtimestamp(self.started_ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def read(run_dir: Path) -> State | None:
    """Return what the directory's last supervisor wrote, whether it still runs or not; None without such a file."""
    try:
        return msgspec.json.decode((run_dir / STATE_NAME).read_bytes(), type=State)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def running(run_dir: Path) -> State | None:
    """Return what runs on a directory now; None if nothing does."""
    state = read(run_dir)
    return state if state is not None and identity_of(state.pid) == state.identity else None


class RunFile:
    """The right to supervise a directory, held until `release`."""

    def __init__(self, run_dir: Path) -> None:
        """Take the right.

        Raises:
            AlreadyRunning: another process has it.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / STATE_NAME
        self._lock: IO[bytes] = (run_dir / LOCK_NAME).open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise AlreadyRunning(_describe(run_dir)) from None
        _end_leftovers(read(run_dir))

    def write(self, state: State) -> None:
        """Replace the state file.

        Raises:
            NoSpace: the disk is full; the file is as it was.
        """
        part = self._path.with_suffix(".part")
        then = "Services run on, and one that needs room is started again until it has some."
        with room_for("what is supervised", self._path, then=then):
            try:
                part.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
                part.replace(self._path)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    def release(self) -> None:
        """Give the right back; the state file goes, since nothing runs any more."""
        self._path.unlink(missing_ok=True)
        self._lock.close()


def _describe(run_dir: Path) -> str:
    state = running(run_dir)
    if state is None:
        return f"already running: another process is just starting or stopping the services in {run_dir}"
    return (
        f"already running (pid {state.pid}, since {state.since}) with its data in {run_dir}; "
        f"`rollmill status` shows it, `kill {state.pid}` stops it in order"
    )


def _end_leftovers(state: State | None) -> None:
    """End what a killed supervisor left. On Linux the leash did so already; elsewhere nothing else does."""
    for instance in state.instances if state else []:
        if instance.identity and identity_of(instance.pid) == instance.identity:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(instance.pid, signal.SIGKILL)
