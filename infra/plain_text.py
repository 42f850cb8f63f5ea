"""Text that others wrote, made safe to show: a policy says anything, also to a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    """Return text whose control characters are shown and not obeyed."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text)
