"""Task instances from a JSONL file: one object a line with `family` and `payload`, optionally `horizon`.

A line that is not such an object is reported with its number and what is wrong; the others are used. Blank lines are
skipped and do not count as rows: a row's number is its line number.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from infra.errors import ConfigError
from producers.source import Instance
from schemas.codec import MAX_DEPTH, check_plain
from schemas.identity import canonical
from schemas.messages import TASK_RANGES

PAYLOAD_BYTES = 4 * 1024 * 1024
"""Largest payload of a line, in bytes: every message of the sample carries it, beside a transcript and a verdict that
together with it may have 16 MiB. What does not fit into a record needs a blob store (`bus.blobs`)."""

_SHORTEST, _LONGEST = TASK_RANGES["horizon"]


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a line holds."""

    family: str
    """Which handler runs it."""
    payload: dict[str, Any]
    """What the family needs."""
    horizon: Annotated[int, msgspec.Meta(ge=_SHORTEST, le=_LONGEST)] | None = None
    """Most turns; the run's unless given."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be used."""

    number: int
    """Line number, from 1."""
    reason: str
    """What is wrong with it, with the field's path."""

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


class JsonlSource:
    """The instances of one file.

    Attributes:
        name: the source's name in group ids; the file's name unless given.
        bad: the lines that cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str | None = None,
        repeat: bool = False,
        known_families: Collection[str] | None = None,
    ) -> None:
        """Read and check the file.

        Args:
            path: the file.
            name: the source's name.
            repeat: pass the file again and again, with a visit number each.
            known_families: when given, a line that asks for another family is a bad one.

        Raises:
            ConfigError: the file cannot be read, or holds no usable line.
        """
        self.name = name or path.name
        self.bad: list[BadLine] = []
        self._repeat = repeat
        self._known = known_families
        self._rows = list(self._read(path))
        if not self._rows:
            reasons = "; ".join(str(bad) for bad in self.bad[:3]) or "it is empty"
            raise ConfigError(f"{path} holds no task: {reasons}")

    def instances(self, start: int = 0) -> Iterator[Instance]:
        """Yield instances from the start-th on; endless when repeating."""
        for index in itertools.count(start):
            visit, place = divmod(index, len(self._rows))
            if visit and not self._repeat:
                return
            row, line = self._rows[place]
            yield Instance(visit, row, line.family, line.payload, line.horizon)

    def _read(self, path: Path) -> Iterator[tuple[int, Line]]:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        decoder = msgspec.json.Decoder(Line)
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.bad.append(BadLine(number, str(error)))
                continue
            except RecursionError:
                self.bad.append(BadLine(number, f"nested over {MAX_DEPTH} deep - at `$`"))
                continue
            problem = self._problem(line)
            if problem:
                self.bad.append(BadLine(number, problem))
                continue
            yield number, line

    def _problem(self, line: Line) -> str | None:
        if self._known is not None and line.family not in self._known:
            known = ", ".join(sorted(self._known))
            return f"unknown family {line.family!r} - at `$.family`; known: {known}"
        try:
            check_plain({"task": {"payload": line.payload}})  # as deep as it will lie in a rollout
            size = len(canonical(line.payload))
        except (TypeError, ValueError, OverflowError) as error:
            return f"no form on the wire: {error} - at `$.payload`"
        if size > PAYLOAD_BYTES:
            return f"{size} bytes, at most {PAYLOAD_BYTES} are carried - at `$.payload`"
        return None
