"""`rollmill compare`: what a person and a program are told of two evaluations, on the in-memory log."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner

from infra.errors import ConfigError
from rollmill.commands import compare
from tests.suite_log import FAILED, SuiteLog


@pytest.fixture
def log(monkeypatch, tmp_path):
    """The log that the command finds, wherever it looks."""
    log = SuiteLog()
    asyncio.run(log.begin())

    @asynccontextmanager
    async def connected(config, *, client):
        yield log.bus

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "connected", connected)
    monkeypatch.setenv("COLUMNS", "200")  # no line of a table is broken
    return log


def evaluate(log, run, step, ends, **options):
    """Play a version's suite, one sample per task unless said otherwise, and write it down."""
    suite = f"{run}.eval.{step}.v{step}"

    async def work():
        await log.play(suite, ends, version=step, **options)
        tasks, solved = len({row for row, _ in ends}), sum(end == 1.0 for end in ends.values())
        await log.write_down(run, step, step, suite, tasks=tasks, solved=solved)

    asyncio.run(work())


def singles(count, tasks=40, **other):
    """Return how single samples of tasks ended: so many solved theirs."""
    return {(row, 0): other.get(f"row{row}", float(row < count)) for row in range(tasks)}


def call(*arguments):
    return CliRunner().invoke(compare.command, arguments)


def test_the_better_version_of_a_run_is_named_with_how_sure_that_is(log):
    """7 of 40 tasks more: 2 / 2^7, and every bootstrap of them is above 0."""
    evaluate(log, "r", 0, singles(20))
    evaluate(log, "r", 10, singles(27))

    done = call("r@step:0", "r@best")

    assert done.exit_code == 0, done.output
    assert "40 tasks, with 95 % intervals over tasks" in done.stdout
    assert "McNemar p = 0.0156" in done.stdout
    assert "r@best is better than r@step:0" in done.stdout
    assert "`best` was chosen by this very suite" in done.stdout


def test_a_program_gets_every_figure(log):
    """By the same names as in `trainer/paired.py`."""
    evaluate(log, "r", 0, {(row, s): float(row < 3) for row in range(6) for s in (0, 1)}, samples=2)
    evaluate(log, "r", 10, {(row, s): float(row < 3 or s) for row in range(6) for s in (0, 1)}, samples=2)

    found = json.loads(call("r@step:0", "r@step:10", "--json").stdout)

    assert found["first"]["name"] == "r@step:0"
    assert (found["second"]["run"], found["second"]["version"]) == ("r.eval.10.v10", 10)
    assert (found["difference"]["value"], found["second_better"], found["p"]) == (0.25, 3, 0.25)
    assert [one["value"] for one in found["pass_at"]] == [0.25, 0.5]
    assert (found["better"], found["incomplete"], found["settings"]) == ("neither", False, {})


def test_two_runs_are_compared_where_their_suites_are_the_same(log):
    """Settings by which their samples came about otherwise are listed, and tasks of one alone are left out."""
    evaluate(log, "one", 5, singles(20))
    evaluate(log, "two", 7, {**singles(20), (40, 0): 1.0}, horizon=4)

    done = call("one@last", "two.eval.7.v7")

    assert done.exit_code == 0, done.output
    assert "settings that differ" in done.stdout
    assert "horizon" in done.stdout
    assert "1 tasks of two.eval.7.v7 are not in the other suite: left out" in done.stdout
    assert "40 tasks do not tell one@last and two.eval.7.v7 apart" in done.stdout


def test_too_many_missing_samples_are_no_verdict(log):
    """However clear the rest is; the bounds are given, and the exit code says so too."""
    evaluate(log, "r", 0, singles(0))
    evaluate(log, "r", 10, singles(40, row3=FAILED))

    done = call("r@step:0", "r@step:10")

    assert done.exit_code == 1
    assert "1 of 40" in done.stdout
    assert "incomplete: more than 2 % of the samples are missing" in done.stdout
    assert "between +0.975 and +1.000" in done.stdout


def test_one_evaluation_under_two_names_is_said_to_be_one(log):
    """A run whose last version is its best one has nothing to compare."""
    evaluate(log, "r", 10, singles(27))

    assert "r@best and r@last are the same evaluation: r.eval.10.v10" in call("r@best", "r@last").stdout


def test_other_seeds_are_other_tasks(log):
    """The same payloads played in other environments say nothing, task by task."""
    evaluate(log, "one", 5, singles(20))
    evaluate(log, "two", 5, singles(20), seed=4)

    done = call("one@last", "two@last")

    assert isinstance(done.exception, ConfigError)
    assert "40 tasks are alike but for seed or place: the runs have seeds 3 and 4" in str(done.exception)


@pytest.mark.parametrize("name", ["r@", "@best", "no run@best"])
def test_what_names_no_evaluation_is_refused_at_once(log, name):
    """Nothing is connected."""
    assert call(name, "r@best").exit_code == 2
