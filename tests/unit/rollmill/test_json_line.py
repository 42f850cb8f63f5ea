"""The object that `--json` prints: valid JSON whatever is in it."""

from __future__ import annotations

import json
import math
from datetime import date
from decimal import Decimal
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from rollmill.json_line import error_line, json_line


class Colour(StrEnum):
    RED = "red"


def strict(text):
    """Read JSON as a parser does that knows no NaN."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"a": [math.nan, math.inf, -math.inf, 1.5]}, {"a": [None, None, None, 1.5]}),
        ({date(2024, 1, 2): (1, 2)}, {"2024-01-02": [1, 2]}),
        ({1: Decimal("0.1"), "b": b"\xff"}, {"1": "0.1", "b": "\\xff"}),
        ([Colour.RED, True, None, 2**200], ["red", True, None, 2**200]),
        ("\udcff\x1b", "\udcff\x1b"),
    ],
)
def test_what_json_has_not_is_written_as_what_it_has(value, found):
    """NaN and infinity as null, which ClickHouse's own JSON formats do too."""
    line = json_line(value)

    assert strict(line) == found
    assert line.isascii()
    assert "\n" not in line


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates() | st.uuids(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.dates(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_is_one_line_of_json(value):
    """A result of SQL may hold anything."""
    line = json_line(value)

    strict(line)
    assert line.isascii()
    assert "\n" not in line


def test_an_error_has_one_key_by_which_it_is_known():
    """With its kind, what it says and the exit code."""
    found = strict(error_line(ConfigError("it is so"), "it is so", 1))

    assert {"error": {"kind": "ConfigError", "message": "it is so", "exit_code": 1}} == found
