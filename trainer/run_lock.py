"""One trainer per run directory on a machine; trainers on other machines are fenced by the log.

The kernel drops the lock when its holder dies, however it dies, so there is no stale lock to remove by hand.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.errors import ConfigError


class RunLock:
    """An exclusive lock on a run directory, held inside a `with` block."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "lock"
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Take the lock. Raises ConfigError when another process holds it."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise ConfigError(
                f"another trainer (pid {holder}) works in {self._file.parent}: stop it, or give this run a `directory` "
                f"of its own"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back."""
        os.close(self._descriptor)
