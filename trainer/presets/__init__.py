"""Presets: values to begin a run from, one TOML file each, named by `preset = "NAME"` in RUN.toml or `--preset NAME`.

What RUN.toml says wins, key by key, also inside a section; lists are taken whole. A preset is a way to write values
down: what is recorded of a run is the values, and not where they came from. The first line of a file says what it is
for; each value has a comment that says why, and whether a paper states it. No preset knows a model or a task.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from infra.errors import ConfigError

FOLDER = Path(__file__).parent
"""Where they lie, in the wheel too."""


def names() -> list[str]:
    """Return the names of all presets."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def summary(name: str) -> str:
    """Return what a preset is for, in one line."""
    return _text(name).partition("\n")[0].removeprefix("# ").removesuffix(".")


def read(name: Any) -> dict[str, Any]:
    """Return the values of a preset.

    Raises:
        ConfigError: there is none of that name; lists the known ones.
    """
    if name not in names():
        known = "; ".join(f"{each!r}: {summary(each)}" for each in names())
        raise ConfigError(f"there is no preset {name!r}. There are {known}")
    return tomllib.loads(_text(name))


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with others laid over them."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


@cache
def _text(name: str) -> str:
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
