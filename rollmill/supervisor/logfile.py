"""What one service says: a bounded file, its last lines in memory, and a way to wait for a line.

A new file begins with each supervisor (`NAME.log`; the one before becomes `NAME.log.1`) and whenever it has grown to
its limit, so a service takes at most twice the limit on disk. The lives of a restarted service follow each other in
one file, each under a heading. Nothing is parsed or reformatted.

A disk that is full stops no service: its output is read on, the last lines are in memory as ever, and once there is
room again the file says how much of it is missing.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from pathlib import Path

from infra.disk import is_full, room_for

MAX_BYTES = 16 * 1024 * 1024
"""Size at which a log file is rotated."""

TAIL_LINES = 20
"""Last lines shown in an error."""

_KEPT_LINES = 500
"""Lines of this life kept in memory, for errors and for `said`."""

_LONGEST_LINE = 64 * 1024
"""Bytes after which an unfinished line counts as one."""


class LogFile:
    """The output of one instance of a service, over all its lives."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Begin a new file at this path, keeping the one before."""
        self.path = path
        self._max_bytes = max_bytes
        with room_for("the log of a service", path, then="Then call it again; the service was not started."):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._keep_old()
            self._file = path.open("ab", buffering=0)
        self._size = 0
        self.missing = 0
        """Bytes that the disk had no room for since it took some last."""
        self._unfinished = b""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._waiting: list[tuple[re.Pattern[str], asyncio.Future[str]]] = []

    def begin(self, heading: str) -> None:
        """Start the output of a new life: its lines are the only ones that count from now on."""
        self._append(f"=== {heading} ===\n".encode())
        self._unfinished = b""
        self._lines.clear()

    def write(self, data: bytes) -> None:
        """Add output as it came."""
        self._append(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE:
            lines.append(self._unfinished)
            self._unfinished = b""
        for line in lines:
            self._see(line.decode(errors="replace").rstrip("\r"))

    async def said(self, pattern: re.Pattern[str]) -> str:
        """Return the first line of this life that matches, waiting for it when it has not come yet."""
        for line in self._lines:
            if pattern.search(line):
                return line
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        entry = (pattern, found)
        self._waiting.append(entry)
        try:
            return await found
        finally:
            self._waiting.remove(entry)

    def tail(self) -> tuple[str, ...]:
        """Return the last lines of this life."""
        lines = [*self._lines, self._unfinished.decode(errors="replace")] if self._unfinished else list(self._lines)
        return tuple(lines[-TAIL_LINES:])

    def close(self) -> None:
        """Close the file; the lines in memory stay."""
        self._file.close()

    def _see(self, line: str) -> None:
        self._lines.append(line)
        for pattern, found in self._waiting:
            if not found.done() and pattern.search(line):
                found.set_result(line)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            if self._size and self._size + len(data) > self._max_bytes:
                self._rotate()
            if self.missing:
                gap = f"=== {self.missing} bytes are missing here: the disk was full ===\n"
                self._size += self._file.write(gap.encode())
                self.missing = 0
            while rest:
                # The last bytes that a disk has room for are taken without an error; the others bring it.
                written = self._file.write(rest)
                self._size += written
                rest = rest[written:]
        except OSError as error:
            if not is_full(error):
                raise
            self.missing += len(rest)

    def _rotate(self) -> None:
        if self.path.exists():  # else the new one could not be made the last time
            self._keep_old()
        fresh = self.path.open("ab", buffering=0)
        self._file.close()
        self._file, self._size = fresh, 0

    def _keep_old(self) -> None:
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
