import json
import sys
import types

import pytest
from click.testing import CliRunner

from benchmarks import report
from benchmarks.__main__ import command
from benchmarks.result import Result
from benchmarks.table import TABLE, Benchmark, Row
from infra.errors import WaitTimeout


@pytest.fixture
def fake(monkeypatch):
    """Put one benchmark that takes no time into the table; it notes how it was called."""
    calls = []

    def measure(*, quick):
        calls.append(quick)
        return Result(name="fake", ours=4.0, rival=2.0, unit="1/s", ratio=2.0, detail={"spread": 0.0})

    module = types.ModuleType("fake_benchmark")
    module.measure = measure
    monkeypatch.setitem(sys.modules, "fake_benchmark", module)
    for name in list(TABLE):
        monkeypatch.delitem(TABLE, name)
    row = Row(key="ratio", rival="nobody", at_least=1.0)
    monkeypatch.setitem(TABLE, "fake", Benchmark(module="fake_benchmark", work="nothing", rows=(row,)))
    monkeypatch.setattr(command.params[0].type, "choices", ["fake"])
    return calls


def test_the_last_line_is_the_result(fake):
    """A program reads one JSON object, which also says how busy the machine was."""
    done = CliRunner().invoke(command, ["fake", "--json", "--quick"])

    found = json.loads(done.stdout.splitlines()[-1])
    assert (done.exit_code, fake) == (0, [True])
    assert (found["name"], found["ratio"], found["detail"]["spread"]) == ("fake", 2.0, 0.0)
    assert found["detail"]["machine"]["before"]["cores"] >= 1


def test_a_person_gets_a_table(fake):
    """Figure and bound beside each other."""
    done = CliRunner().invoke(command, ["fake"])

    assert "| `fake` `ratio` | nobody | 2 | at least 1 | yes |" in done.stdout
    assert fake == [False]


@pytest.mark.usefixtures("fake")
def test_all_writes_the_file_and_the_page(monkeypatch, tmp_path):
    """The docs show what was measured, and say when it was measured in a hurry."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")

    done = CliRunner().invoke(command, ["--all", "--json", "--quick"])

    written = json.loads((tmp_path / "results.json").read_text())
    page = (tmp_path / "page.md").read_text()
    assert json.loads(done.stdout.splitlines()[-1]).keys() == {"fake"}
    assert (written["quick"], written["results"]["fake"]["ours"]) == (True, 4.0)
    assert "| `fake` `ratio` |" in page
    assert "Taken with `--quick`" in page


@pytest.mark.parametrize("arguments", [[], ["fake", "--all"], ["unknown"]])
def test_a_call_names_one_benchmark_or_all(fake, arguments):
    """Anything else is a wrong call, and nothing is measured."""
    assert (CliRunner().invoke(command, arguments).exit_code, fake) == (2, [])


@pytest.mark.usefixtures("fake")
def test_an_expected_error_is_one_sentence(monkeypatch):
    """A machine without Java, or a pipeline that stands still, gives its reason and no trace."""

    def fails(*, quick):
        raise WaitTimeout(f"3 of 4 samples were on trajectories after {60 if quick else 120} s")

    monkeypatch.setattr(sys.modules["fake_benchmark"], "measure", fails)

    done = CliRunner().invoke(command, ["fake", "--json"])

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: 3 of 4 samples were on trajectories after 120 s\n"
