"""What commands print for a person."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollmill import output
from rollmill.commands import diff, replay
from rollmill.commands.check import MEANINGS
from schemas.dispositions import Disposition
from trainer.diff import Diff, Divergence, Kind
from trainer.replay import ReplayReport, StepComparison


@pytest.fixture
def printed(monkeypatch):
    """Return what was printed, by a terminal of 60 columns."""
    console = Console(width=60, record=True, file=io.StringIO())
    monkeypatch.setattr(output, "console", console)
    return console.export_text


def test_rows_that_fit_are_a_table(printed):
    """One line each."""
    output.print_rows(["name", "count"], [["a", 1], ["b", 22]])

    assert any("a" in line and "1" in line and "\u2502" in line for line in printed().splitlines())


def test_rows_that_do_not_fit_are_shown_one_by_one(printed):
    """A table of thirty columns would show three letters of each."""
    output.print_rows(["name", "text"], [["a", "x" * 100], ["b", "y"]])

    text = printed()
    assert ["row 1", "row 2"] == [line for line in text.splitlines() if line.startswith("row")]
    assert "x" * 100 == "".join(line.strip() for line in text.splitlines() if "xx" in line).removeprefix("text").strip()


def test_no_name_in_a_table_is_cut(printed):
    """Not even where the terminal is too narrow for it: whoever reads it wants to type it."""
    name = "a-run-of-" + "long" * 12
    output.print_table("runs", ["run", "created", "cause"], [[name, "2026-01-01", "budget"]])

    cells = [line.split("\u2502")[1].strip() for line in printed().splitlines() if line.startswith("\u2502")]
    assert name == "".join(cells)


def test_what_a_policy_said_is_shown_and_not_obeyed(printed):
    """Neither by the terminal nor as markup."""
    output.print_rows(["said"], [["\x1b[2J [red]"]])

    assert "\\x1b[2J [red]" in printed()


def test_no_rows_are_an_empty_table(printed):
    """And not an error."""
    output.print_rows(["name"], [])

    assert "name" in printed()


def test_every_disposition_is_explained():
    """`rollmill check` leaves nobody guessing."""
    assert set(MEANINGS) == set(Disposition)


def test_the_names_that_a_changed_record_has_are_shown_and_not_obeyed(printed):
    """Groups of foreign producers, and what a flipped bit made of them, may be any text."""
    cause = "g[/bold]/0: its record at offset 3 is changed, as the end of g[/red]\x1b[2J/0: its bytes were changed"
    named = Divergence(step=1, kind=Kind.CHANGED, cause=cause)
    compared = StepComparison(step=1, recorded="a", found="b", cause=cause)

    diff._show(Diff(runs=("r", "r"), steps=(1, 1), same_steps=0, divergence=named, settings={"model": ("[/a]", "b")}))
    replay._show(ReplayReport(run="r", steps=(compared,), drops=0, other_drops=()))

    text = printed()
    assert "[/a]" in text
    assert text.count("g[/red]") == text.count("g[/bold]") == 3
    assert "\x1b[2J" not in text
