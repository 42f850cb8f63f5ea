"""Nested settings as a person gives them: a TOML file, and KEY=VALUE beside it; and where a wrong one came from.

A wrong value is blamed on whoever gave it: the file, `--set KEY` or an environment variable. An unknown key is an
error with the keys that are near, since a misspelt limit would silently be the default. What a key means is said by
the models that check it. Errors repeat keys and never values: one of them may be a password.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from infra.errors import ConfigError

Given = Mapping[str, str]
"""Key -> who gave it, for a person: `--set run.max_in_flight`."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of 5,000 digits, or a tower of brackets
        raise ConfigError(f"{path} is not TOML: {error}") from error


def apply_override(settings: dict[str, Any], override: str, *, as_text: bool = False, option: str = "--set") -> None:
    """Put `a.b=value` into nested settings.

    Args:
        settings: changed in place.
        override: the key with its value, in TOML syntax or plain text.
        as_text: leave numbers, truth values and dates as they are written.
        option: how it was given, for errors.

    Raises:
        ConfigError: the text has no `=`.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{option} {key[:80]!r}: expected KEY=VALUE, such as run.max_in_flight=32")
    *parents, last = key.split(".")
    for parent in parents:
        settings = settings.setdefault(parent, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{option} {key}: {parent} is not a section")
    # A password is what was given, character by character, brackets and quotes included.
    value = text if as_text and last.endswith("password") else _value(text)
    settings[last] = text if as_text and not isinstance(value, str | list | dict) else value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def plain_texts(values: Any) -> Any:
    """Return what a section was given, unchanged; raise ValueError for a text that no file name or message can be.

    Control characters, and bytes that are not UTF-8. A password is what it is.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            if isinstance(value, str) and not value.isprintable() and "password" not in str(key):
                raise ValueError(f"{key} is {value[:80]!r}, which holds what cannot be printed")
    return values


def given_by(option: str, overrides: Iterable[str]) -> dict[str, str]:
    """Return who gave the keys of `a.b=value` texts."""
    keys = (override.partition("=")[0] for override in overrides)
    return {key: f"{option} {key}" for key in keys}


def explain(error: ValidationError, where: str, model: type[BaseModel], given: Given | None = None) -> str:
    """Return a validation error for a person: each wrong key, what is wrong, and who gave it.

    Args:
        error: what the model found.
        where: the file, or whatever the other keys are from.
        model: the model, for the keys that it knows.
        given: who gave keys that are not from there.
    """
    ours: list[str] = []
    theirs: list[str] = []
    for item in error.errors(include_url=False, include_input=False):
        key, message = ".".join(str(part) for part in item["loc"]), item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = unknown(model, item["loc"])
        line, by = f"{key}: {message}" if key else message, _giver(key, given or {})
        if by is None:
            ours.append(line)
        else:
            theirs.append(f"{by}: {message}" if by.endswith(f" {key}") else f"{by}: {line}")
    return "; ".join([f"{where}: {'; '.join(ours)}", *theirs] if ours else theirs)


def _giver(key: str, given: Given) -> str | None:
    """Return who gave a key, something in it, or the section that it is in."""
    for known, by in given.items():
        if key == known or key.startswith(f"{known}."):
            return by
    # A rule about several keys of a section: whoever changed one of them has broken it.
    return ", ".join(by for known, by in given.items() if not key or known.startswith(f"{key}.")) or None


def unknown(model: type[BaseModel], place: tuple[int | str, ...]) -> str:
    """Return what to say of a key that no model knows: the nearest ones, and all of its section."""
    section, name = place[:-1], str(place[-1])
    keys = sorted(_keys(model, section))
    near = get_close_matches(name, keys, n=3)
    meant = f", did you mean {' or '.join(f'`{key}`' for key in near)}?" if near else "."
    inside = f"[{'.'.join(map(str, section))}] has" if section else "There are"
    return f"there is no such key{meant} {inside} {', '.join(keys)}"


def _keys(model: type[BaseModel], section: tuple[int | str, ...]) -> list[str]:
    """Return the keys of a section of a model; none where it is no model's."""
    found: type[BaseModel] | None = model
    for part in section:
        field = found.model_fields.get(str(part)) if found is not None else None
        found = _model_in(field.annotation) if field is not None else None
    return list(found.model_fields) if found is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field, which may also be none."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
