"""Results beside what they must reach: as a table for a person or a page, and as a file for a program.

The figures say on which machine they were taken and how busy it was; a ratio holds for that machine.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.result import Result
from benchmarks.table import Benchmark

RESULTS = Path(__file__).with_name("results.json")
"""Written by `--all`: every result."""

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
"""Written by `--all`: the table for a person."""

HEAD = """# Benchmarks

Written by `python -m benchmarks --all`; do not edit. Every figure is the median of several rounds in which both sides
ran in turns on one machine; `benchmarks/results.json` has the spread and how each was measured.

"""


def machine() -> dict[str, Any]:
    """Return what a figure depends on besides the code: cores and load."""
    one, five, _ = os.getloadavg()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": round(one, 2),
        "load_5m": round(five, 2),
        "python": platform.python_version(),
    }


def as_table(results: Mapping[str, Result], benchmarks: Mapping[str, Benchmark], *, quick: bool = False) -> str:
    """Return the results as a Markdown table, a line per ratio."""
    lines = ["| name | against | figure | bound | holds |", "|---|---|---|---|---|"]
    for name, result in results.items():
        for row in benchmarks[name].rows:
            figure = result.figure(row.key)
            verdict = "yes" if row.holds(figure, quick=quick) else "**no**"
            bound = row.bound(quick=quick)
            lines.append(f"| `{name}` `{row.key}` | {row.rival} | {figure:.3g} | {bound} | {verdict} |")
    return "\n".join(lines) + "\n"


def write(results: Mapping[str, Result], benchmarks: Mapping[str, Benchmark], *, quick: bool) -> None:
    """Write the file and the page."""
    content = {"quick": quick, "results": {name: asdict(result) for name, result in results.items()}}
    RESULTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    note = "\nTaken with `--quick`.\n" if quick else ""
    PAGE.write_text(HEAD + as_table(results, benchmarks, quick=quick) + note, encoding="utf-8")
