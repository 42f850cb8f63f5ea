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
ROWS = [line.split("|") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]

ENGINE = {21}
"""A case of weights that go wrong inside an engine; the page says that it leaves it out."""

ROLLOUTS = [case for case in range(1, 32) if case not in ENGINE]
LOG = list(range(1, 34))


@cache
def names_in(path: str) -> dict[str, bool]:
    """Return the names of a file's tests, those of classes included, and which of them only `make test-full` runs."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {
        node.name: any("mark.slow" in ast.unparse(mark) for mark in [*marks, *marks_of(node)])
        for node in functions
        if node.name.startswith("test_")
    }


def marks_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    """Return what marks a test as a whole, not some of its parameters."""
    return [mark for mark in node.decorator_list if "parametrize" not in ast.unparse(mark)]


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_that_the_page_names_is_there(path, name):
    """A test that is renamed is renamed here too."""
    assert name in names_in(path)


def test_every_case_has_its_tests():
    """No row is empty, none is missing, and all references are of the form that is checked above."""
    assert [int(row[1]) for row in ROWS] == [*ROLLOUTS, *LOG]
    assert all("::" in row[5] for row in ROWS)
    assert len(re.findall("::", PAGE)) == len(re.findall(r"`tests/[\w/]+\.py::\w+`", PAGE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].strip().split(",")[0])
def test_every_case_has_a_test_that_each_change_must_pass(row):
    """What only the long tests show would be broken for days."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[5])

    assert not all(names_in(path)[name] for path, name in named)
    assert len(named) == len(set(named)), "one test is named twice"
