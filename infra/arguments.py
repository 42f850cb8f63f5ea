"""What commands take from a person: types of arguments that let nothing in that no command could use.

A wrong argument is refused while the call is read, before anything is opened, with what was given and what is expected;
the exit code is 2. Numbers have 64 bits at most, since records and files have no more. What an argument is for is not
known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from schemas.identity import backend_name, run_name

INT64 = click.IntRange(-(2**63), 2**63 - 1)
"""A seed, or any other number."""

COUNT = click.IntRange(1, 2**31 - 1)
"""How many of something there are, at least one."""

STEP = click.IntRange(0, 2**53)
"""The number of a step or version."""

PORT = click.IntRange(0, 65_535)
"""A port to listen on; 0 means a free one."""

TEXT_CHARS = 1_000
"""Longest name, address or other short text."""


class Number(click.FloatRange):
    """A number within bounds; NaN, which no bound keeps out, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no number", param, ctx)
        return found


class FilePath(click.Path):
    """A path that names something: an empty one would be the current directory."""

    def __init__(self, *, directory: bool = False) -> None:
        super().__init__(path_type=Path, file_okay=not directory)
        self._what = "directory" if directory else "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if not str(value) or "\0" in str(value):
            self.fail(f"{value!r} names no {self._what}", param, ctx)
        return super().convert(value, param, ctx)


class Text(click.ParamType[str]):
    """A short text of one line that is printed, sent and stored as it is: a name, an address, a cause."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text."""
        if not value:
            self.fail("it is empty", param, ctx)
        if not value.isprintable():
            self.fail(f"{value[:80]!r} holds what cannot be printed", param, ctx)
        if len(value) > TEXT_CHARS:
            self.fail(f"it has {len(value)} characters; at most {TEXT_CHARS}", param, ctx)
        return value


class Checked(click.ParamType[Any]):
    """A text that a function takes, or refuses by a ValueError that says why."""

    def __init__(self, name: str, check: Callable[[str], Any]) -> None:
        self.name = name
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the function makes of the text."""
        try:
            return self._check(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TEXT = Text()
"""A short text."""

RUN = Checked("run", run_name)
"""The name of a run."""

BACKEND = Checked("backend", backend_name)
"""The name of an engine."""


def require_text(arguments: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raise UsageError for an argument or a setting of ours whose bytes are not UTF-8.

    Python hands such bytes over as lone surrogates, which no record, file or table can hold: paths too end up there.
    """
    given = {f"argument {number}": argument for number, argument in enumerate(arguments, 1)}
    given |= {f"the environment's {name}": value for name, value in environment.items() if name.startswith("ROLLMILL_")}
    for what, text in given.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raw = text.encode("utf-8", "surrogateescape" if _is_escaped(text) else "backslashreplace")
            raise click.UsageError(
                f"{what} is not UTF-8: {raw[:80]!r}. Names and paths end up in records and files, which are"
            ) from None


def _is_escaped(text: str) -> bool:
    """Tell whether all lone surrogates stand for a byte."""
    return all("\udc80" <= char <= "\udcff" for char in text if "\ud800" <= char <= "\udfff")
