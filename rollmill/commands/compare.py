"""`rollmill compare RUN@best RUN@step:0`: which of two versions achieves more on the same held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from infra.arguments import Checked
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.errors import ConfigError
from rollmill import output
from trainer.paired import Better, Comparison, Estimate, compare
from trainer.suite import Name, Suite, parse_name, read_suite

SHOWN_K = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of samples whose pass@k is shown to a person, beside the largest."""

EVALUATION = Checked("evaluation", parse_name)
"""RUN@NAME, or the run under which a suite was played."""


@click.command("compare")
@click.argument("first", metavar="RUN@NAME", type=EVALUATION)
@click.argument("second", metavar="RUN@NAME", type=EVALUATION)
@output.json_option
@output.config_options
def command(first: Name, second: Name, as_json: bool, config: Config) -> None:
    """Say which of two evaluated versions is better. Exits with 1 when too much is missing to say.

    NAME is `best`, `last` or `step:N` of a run with an [evaluation]; a name without it is the run under which a suite
    was played, by anybody. Both must have played the same tasks with the same environment seeds: two versions of a
    run have, two runs have if their `seed` and their suites are the same.

    Success is compared task by task: a bootstrap over tasks gives the interval of the difference, McNemar's exact test
    says whether one is better on more of them. One is called better only if both say so. Samples that the system
    failed are in no figure but `at worst` and `at best`: all of them against a version, or all for it.
    """
    suites = output.run(_read(first, second, config))
    one, other = suites
    if not one.tasks.keys() & other.tasks.keys():
        raise ConfigError(_why_nothing_in_common(one, other))
    found = compare(one.tasks, other.tasks, silent=(one.silent, other.silent))
    settings = _differences(one.settings, other.settings)
    output.print_result(_as_dict(suites, found, settings), as_json, lambda _: _show(suites, found, settings))
    if found.incomplete:
        raise SystemExit(1)


async def _read(first: Name, second: Name, config: Config) -> tuple[Suite, Suite]:
    async with connected(config.bus, client="compare") as bus:
        one, other = await asyncio.gather(*(read_suite(bus, SystemClock(), name) for name in (first, second)))
    return one, other


def _why_nothing_in_common(one: Suite, other: Suite) -> str:
    """Return why two suites share no task, and what to do."""
    payloads = {key.payload_digest for key in one.tasks} & {key.payload_digest for key in other.tasks}
    why = (
        f"{len(payloads)} tasks are alike but for seed or place: the runs have seeds {one.settings['seed']} and "
        f"{other.settings['seed']}, or their suites another order"
        if payloads
        else "their suites are of other tasks, or nothing of one has ended yet"
    )
    return (
        f"{one.name} ({len(one.tasks)} tasks, run {one.run}) and {other.name} ({len(other.tasks)} tasks, run "
        f"{other.run}) have no task in common: {why}. Give both runs the same `seed` and `[evaluation] tasks`"
    )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings by which samples of two suites came about otherwise."""
    flat = [dict(_flat(settings)) for settings in (one, other)]
    return {key: (flat[0][key], flat[1][key]) for key in flat[0] if flat[0][key] != flat[1].get(key)}


def _as_dict(suites: Sequence[Suite], found: Comparison, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a comparison as plain values."""
    names = [
        {"name": str(suite.name), "run": suite.run, "version": suite.version, "left_out": left}
        for suite, left in zip(suites, _left_out(suites), strict=True)
    ]
    figures = asdict(found)
    return {
        **figures,
        "better": found.better.value,
        "first": {**names[0], **figures["first"]},
        "second": {**names[1], **figures["second"]},
        "settings": settings,
    }


def _verdict(first: str, second: str, found: Comparison) -> str:
    """Return one sentence for a person."""
    match found.better:
        case Better.INCOMPLETE:
            return (
                "incomplete: more than 2 % of the samples are missing, or no task has grades of both. With all that "
                f"is missing the difference is between {found.worst:+.3f} and {found.best:+.3f}"
            )
        case Better.NEITHER:
            return (
                f"{found.pairs} tasks do not tell {first} and {second} apart: a larger suite may, more samples hardly"
            )
        case Better.FIRST:
            return f"{first} is better than {second}"
        case Better.SECOND:
            return f"{second} is better than {first}"


def _show(suites: Sequence[Suite], found: Comparison, settings: Mapping[str, tuple[Any, Any]]) -> None:
    one, other = (str(suite.name) for suite in suites)
    if settings:
        rows = [(key, *values) for key, values in settings.items()]
        output.print_table("settings that differ", ("setting", one, other), rows)
    output.print_table(
        f"{found.tasks} tasks, with 95 % intervals over tasks", ("", one, other, "difference"), _rows(found)
    )
    for suite, left in zip(suites, _left_out(suites), strict=True):
        if left:
            output.console.print(f"{left} tasks of {suite.name} are not in the other suite: left out")
    if suites[0].run == suites[1].run:
        output.console.print(f"{one} and {other} are the same evaluation: {suites[0].run}")
        return
    output.console.print(_verdict(one, other, found))
    if "best" in {suite.name.version for suite in suites}:
        output.console.print(
            "`best` was chosen by this very suite, which flatters it: tasks of another suite would not"
        )


def _rows(found: Comparison) -> list[tuple[Any, ...]]:
    """Return the figures of both and their differences, a row each."""
    first, second = found.first, found.second
    numbers = [k for k in range(1, len(found.pass_at) + 1) if k in {*SHOWN_K, len(found.pass_at)}]
    estimates = [
        ("success", first.success, second.success, found.difference),
        *((f"pass@{k}", first.pass_at[k - 1], second.pass_at[k - 1], found.pass_at[k - 1]) for k in numbers),
    ]
    return [
        *(
            (name, _estimate(ours), _estimate(theirs), _estimate(difference, signed=True))
            for name, ours, theirs, difference in estimates
        ),
        ("missing samples", *(f"{side.missing} of {side.samples}" for side in (first, second)), ""),
        ("success at worst", f"{first.worst:.3f}", f"{second.worst:.3f}", f"{found.worst:+.3f}"),
        ("success at best", f"{first.best:.3f}", f"{second.best:.3f}", f"{found.best:+.3f}"),
        ("tasks done better", found.first_better, found.second_better, f"McNemar p = {found.p:.3g}"),
    ]


def _left_out(suites: Sequence[Suite]) -> tuple[int, int]:
    one, other = suites
    return len(one.tasks.keys() - other.tasks.keys()), len(other.tasks.keys() - one.tasks.keys())


def _estimate(found: Estimate, *, signed: bool = False) -> str:
    form = "+.3f" if signed else ".3f"
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    nested = [
        _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
        for key, value in settings.items()
    ]
    return [pair for pairs in nested for pair in pairs]
