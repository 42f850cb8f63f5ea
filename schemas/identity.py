"""Deterministic names and seeds: the same task published twice is the same task.

Group ids are the first 20 characters of lower-case base32 of blake2b(msgpack([run, source, visit, row, payload])).
The payload is canonical: map keys sorted by their UTF-8 bytes, smallest integers, floats as float64, so that any
language can compute the id. Seeds are derived, never drawn: a retry draws the same tokens, so that a crash does not
resample luck.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import msgpack

RUN_CHARS = 100
"""Longest name of a run."""

RUN_NAME = rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{RUN_CHARS - 1}}}"
"""What a run may be called: its name is part of keys, paths and addresses, and an argument of commands."""

SHOWN_CHARS = 60
"""So many characters of a name that is none are shown."""

GROUP_ID_CHARS = 20
"""Length of a group id: 100 bits, so that a million runs of a million groups do not collide."""

SEED_BITS = 63
"""Seeds fit a signed 64-bit integer in every language."""


def run_name(text: str) -> str:
    """Return the text if a run may be called so; the one place that says so. Raises ValueError."""
    return _name("a run", text)


def backend_name(text: str) -> str:
    """Return the text if an engine may be called so; it is what a run may be called. Raises ValueError."""
    return _name("a backend", text)


def _name(what: str, text: str) -> str:
    if not re.fullmatch(RUN_NAME, text):
        shown = repr(text) if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]!r}... ({len(text)} characters)"
        raise ValueError(
            f"{shown} is no name for {what}: it begins with a letter, a digit or `_`, goes on with these, `.` and `-`, "
            f"and has at most {RUN_CHARS} characters"
        )
    return text


def redriven_place(source: str, group: str) -> str:
    """Return the source, as `group_id` takes it, of the work of a group that is done again.

    The old group is part of it: a source that is passed again has a group of that visit and row already, and a foreign
    producer may have given two groups one place.
    """
    return f"{source} redrive of {group}"


def canonical(payload: Any) -> bytes:
    """Return the canonical msgpack bytes of a payload.

    Raises:
        TypeError: a map key is not text, or a value has no msgpack form.
    """
    packed: bytes = msgpack.packb(_ordered(payload), use_bin_type=True)
    return packed


def payload_digest(payload: Any) -> str:
    """Return the hex blake2b-128 of the canonical payload."""
    return hashlib.blake2b(canonical(payload), digest_size=16).hexdigest()


def group_id(run: str, source: str, visit: int, row: int, payload: Any) -> str:
    """Return the id of one task instance at one visit."""
    digest = hashlib.blake2b(canonical([run, source, visit, row, payload]), digest_size=16).digest()
    return base64.b32encode(digest).decode().lower()[:GROUP_ID_CHARS]


def task_seed(run_seed: int, source: str, visit: int, row: int) -> int:
    """Return the environment's seed, the same for all siblings of a group."""
    return _seed([run_seed, source, visit, row])


def sampling_seed(seed: int, sample: int, turn: int) -> int:
    """Return the seed of one generation; the attempt is left out on purpose."""
    return _seed([seed, sample, turn])


def _seed(parts: list[int | str]) -> int:
    digest = hashlib.blake2b(canonical(parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << SEED_BITS) - 1)


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a payload's map keys must be text")
        return {key: _ordered(value[key]) for key in sorted(value, key=str.encode)}
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    return value
