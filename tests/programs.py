"""Programs under test that run beside the test, and never longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

LIMIT_S = 90.0
"""Longest wait for a program to print everything, seconds."""


def block_of(page: Path, name: str) -> str:
    """Return the Python program of a page that begins with a comment of its name."""
    _, _, rest = page.read_text(encoding="utf-8").partition(f"```python\n# {name}\n")
    assert rest, f"{page} has no program {name}"
    return rest.partition("```")[0]


async def printed(
    command: list[str], count: int, *, then: Callable[[], Awaitable[None]] | None = None, **options: Any
) -> list[str]:
    """Run a program until it has printed this many lines and what comes `then` has come; then kill it."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, **options
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(lines) < count:
                line = await process.stdout.readline()
                assert line, (await process.stderr.read()).decode()
                lines.append(line.decode())
            if then is not None:
                await then()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    return lines
