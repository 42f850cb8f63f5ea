"""What a broker's last words mean: pure, from the text of its log.

Kafka explains itself in stack traces of hundreds of lines, with the reason at their head. Shown are the lines that say
something; two causes that a person must act on are told apart: a disk without room, and data that this Kafka or this
node cannot use. Anything else is shown as it is.
"""

from __future__ import annotations

import re

from infra.broker.errors import DiskFull, NotStarted, WrongData

TAIL_LINES = 20
"""Last lines of a log shown, those of stack frames not counted."""

LINE_CHARS = 600
"""Longest line shown: some hold a whole record."""

_FRAME = re.compile(r"^\s+(at |\.\.\. \d+ more)")

_CAUSES: tuple[tuple[type[NotStarted], re.Pattern[str]], ...] = (
    (DiskFull, re.compile(r"No space left on device|Disk quota exceeded|File too large")),
    (
        WrongData,
        re.compile(
            r"doesn't match previous node id|Unknown meta\.properties version|No readable meta\.properties"
            r"|Tried to apply FeatureLevelRecord|only supports versions|INCONSISTENT_CLUSTER_ID|Invalid cluster\.id"
        ),
    ),
)
"""What to look for, in this order: a full disk also makes files that cannot be read."""


def tail(said: str) -> str:
    """Return the last lines of a log that say something, indented."""
    lines = [line for line in said.splitlines() if line.strip() and not _FRAME.match(line)]
    return "\n".join(f"  {line[:LINE_CHARS]}" for line in lines[-TAIL_LINES:])


def cause(said: str) -> tuple[type[NotStarted], str]:
    """Return what kind of end a log tells of, and the line that says so; (NotStarted, "") when it is no known kind."""
    for kind, pattern in _CAUSES:
        for line in said.splitlines():
            if pattern.search(line):
                return kind, line.strip()[:LINE_CHARS]
    return NotStarted, ""
