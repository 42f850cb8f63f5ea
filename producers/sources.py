"""Task sources by description: the `[tasks]` section of RUN.toml.

[tasks]                          [tasks]
jsonl = "train.jsonl"            family = "keydoor"
repeat = true                    payload = { size = 5 }
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from infra.errors import ConfigError
from producers.generated import GeneratedSource
from producers.jsonl import JsonlSource
from producers.source import TaskSource


class Described(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `[tasks]` may say."""

    jsonl: str | None = None
    repeat: bool = True
    family: str | None = None
    payload: dict[str, Any] = {}
    count: int | None = None
    name: str | None = None


def make_source(description: dict[str, Any], folder: Path) -> TaskSource:
    """Return the source that a `[tasks]` section describes.

    Args:
        description: the section.
        folder: relative paths in it start here.

    Raises:
        ConfigError: it describes no source, or two.
    """
    try:
        described = msgspec.convert(description, Described)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[tasks]: {error}") from error
    if described.jsonl and not described.family:
        return JsonlSource(folder / described.jsonl, name=described.name, repeat=described.repeat)
    if described.family and not described.jsonl:
        return GeneratedSource(described.family, described.payload, name=described.name, count=described.count)
    raise ConfigError("[tasks] needs either `jsonl` (a file) or `family` (with `payload`), and not both")
