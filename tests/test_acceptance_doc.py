"""The page that names a test for each public report is true: every test is there, and every case has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "acceptance.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))

ROLLOUTS = [*range(4, 19), *range(22, 26), 27, 30, 31]
LOG = list(range(1, 34))


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of a file's tests, those of classes included."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_that_the_page_names_is_there(path, name):
    """A test that is renamed is renamed here too."""
    assert name in names_in(path)


def test_every_case_has_its_tests():
    """No row is empty, none is missing, and all references are of the form that is checked above."""
    rows = [line.split("|") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]

    assert [int(row[1]) for row in rows] == [*ROLLOUTS, *LOG]
    assert all("::" in row[5] for row in rows)
    assert len(re.findall("::", PAGE)) == len(re.findall(r"`tests/[\w/]+\.py::\w+`", PAGE))
