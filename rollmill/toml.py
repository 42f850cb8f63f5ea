"""Nested settings as TOML text, for the files that Rollmill writes itself; Python reads TOML and writes none.

Texts, numbers, booleans and lists of them look in TOML as in JSON. A map inside a section becomes an inline table. What
the settings mean is not known here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any


def dumps(values: Mapping[str, Any]) -> str:
    """Return settings as TOML: plain values first, then a section for each map."""
    plain = [f"{key} = {_inline(value)}" for key, value in values.items() if not isinstance(value, dict)]
    sections = [
        "\n".join([f"[{name}]", *(f"{key} = {_inline(value)}" for key, value in section.items())])
        for name, section in values.items()
        if isinstance(section, dict)
    ]
    blocks = ["\n".join(plain), *sections] if plain else sections
    text = "\n\n".join(blocks) + "\n"
    assert tomllib.loads(text) == values, "what is written must read back the same"
    return text


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
