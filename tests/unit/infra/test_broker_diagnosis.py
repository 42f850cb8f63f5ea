"""A broker's last words: what a person must act on is told apart, and stack frames are left out."""

from __future__ import annotations

import pytest

from infra.broker import diagnosis
from infra.broker.errors import DiskFull, NotStarted, WrongData

FRAMES = "\n".join(f"\tat org.apache.kafka.Class{number}.method(Class.java:{number})" for number in range(50))


def test_the_line_before_a_long_stack_trace_is_shown():
    """The reason stands at the head of the trace, far above the end of the log."""
    said = f"ERROR fatal\njava.io.IOException: boom\n{FRAMES}\nCaused by: x\n\t... 12 more\n\n"
    assert diagnosis.tail(said) == "  ERROR fatal\n  java.io.IOException: boom\n  Caused by: x"


def test_a_tail_is_bounded():
    """Some lines hold a whole record."""
    shown = diagnosis.tail("\n".join(["x" * 10_000] * 100)).splitlines()
    assert (diagnosis.TAIL_LINES, diagnosis.LINE_CHARS + 2) == (len(shown), max(map(len, shown)))


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("java.io.IOException: No space left on device", DiskFull),
        ("java.io.IOException: Disk quota exceeded", DiskFull),
        ("java.io.IOException: File too large", DiskFull),
        ("java.lang.RuntimeException: Unknown meta.properties version number 7", WrongData),
        ("java.lang.RuntimeException: Stored node id 2 doesn't match previous node id 1 in /x", WrongData),
        ("RuntimeException: Tried to apply FeatureLevelRecord ..., but this controller only supports 7-27", WrongData),
        ("java.net.BindException: Address already in use", NotStarted),
    ],
)
def test_known_causes_are_told_with_the_line_that_says_so(line, kind):
    """Anything else is shown as it is."""
    found = diagnosis.cause(f"WARN something\n{line}\n{FRAMES}\n")
    assert found == (kind, "" if kind is NotStarted else line)


def test_a_full_disk_wins_over_what_follows_from_it():
    """It also makes files that cannot be read."""
    said = "No readable meta.properties files found.\njava.io.IOException: No space left on device\n"
    assert diagnosis.cause(said)[0] is DiskFull
