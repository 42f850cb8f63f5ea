"""`rollmill replay RUN`: decides again (by the same rules or others), grades again or samples again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

from infra.arguments import COUNT, RUN, TEXT
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output
from rollmill.again import Rescored, resample, rescore
from trainer.replay import ReplayReport, replay
from trainer.what_if import WhatIf, require_rules, what_if

T = TypeVar("T")


@click.command("replay")
@click.argument("run", type=RUN)
@click.option(
    "--from",
    "start",
    type=click.Choice(["trainer", "eval", "run"]),
    default="trainer",
    help="The stage from which on it is done again.",
)
@click.option("--last", default=None, type=COUNT, help="From `trainer`: report only the last steps.")
@click.option(
    "--grader", default=None, type=TEXT, help="From `eval`: family whose grader is asked, not each task's own."
)
@click.option(
    "--into", default=None, metavar="NEW", type=RUN, help="From `eval` and `run`: name of the run to publish to."
)
@output.json_option
@output.config_and_rules_options
def command(
    run: str,
    start: str,
    last: int | None,
    grader: str | None,
    into: str | None,
    as_json: bool,
    config: Config,
    rules: tuple[str, ...],
) -> None:
    """Replay a run from its topics.

    From `trainer`: the recorded trajectories are fed through the same rules, and every batch must come out with the
    digest that the trainer recorded; exits with 1 when one differs. Nothing is sampled and nothing is graded anew.
    With `--set filter=off` or another rule of the run's `[algorithm]`: what the trainer would have decided over the
    same trajectories; where a run was resumed with other rules, all its trainers have this one. Nothing is written.

    From `eval`: the recorded tokens and verdicts are graded anew; what differs is reported, and with `--into` the
    outcomes become the log of a new run. From `run`: the tasks are published again as the new run `--into`; its
    stages sample them anew.
    """
    _refuse_unused(start, last, grader, into, rules)
    require_rules(rules)
    if start == "eval":
        rescored = output.run(_with_bus(config, lambda bus: rescore(bus, SystemClock(), run, grader=grader, into=into)))
        output.print_result({**rescored.as_dict(), "from": start}, as_json, lambda _: _show_rescored(rescored))
    elif start == "run":
        published = output.run(_with_bus(config, lambda bus: resample(bus, SystemClock(), run, into=into or "")))
        result = {"run": run, "from": start, "into": into, "published": published}
        output.print_result(result, as_json, lambda _: click.echo(f"published {published} tasks of {run} to {into}"))
    elif rules:
        found = output.run(_with_bus(config, lambda bus: what_if(bus, SystemClock(), run, rules)))
        output.print_result({**found.as_dict(), "from": start}, as_json, lambda _: _show_what_if(found))
    else:
        report = output.run(_with_bus(config, lambda bus: replay(bus, SystemClock(), run, last=last)))
        output.print_result({**report.as_dict(), "from": start}, as_json, lambda _: _show(report))
        if not report.all_equal:
            raise SystemExit(1)


def _refuse_unused(start: str, last: int | None, grader: str | None, into: str | None, rules: tuple[str, ...]) -> None:
    """Raise UsageError for what the chosen stage has no use for."""
    given = {"--last": last, "--set RULE=VALUE": rules, "--grader": grader, "--into": into}
    useful = {"trainer": {"--last", "--set RULE=VALUE"}, "eval": {"--grader", "--into"}, "run": {"--into"}}[start]
    for name, value in given.items():
        if value and name not in useful:
            raise click.UsageError(f"{name} says nothing to a replay from `{start}`")
    if start == "run" and into is None:
        raise click.UsageError("a replay from `run` samples anew: name the new run with --into")


async def _with_bus(config: Config, work: Callable[[Bus], Awaitable[T]]) -> T:
    async with connected(config.bus, client="replay") as bus:
        return await work(bus)


def _show(report: ReplayReport) -> None:
    rows = [(step.step, "equal" if step.equal else f"DIFFERS: {output.safe(step.cause)}") for step in report.steps]
    output.print_table(f"replay of {report.run}", ("step", "batch digest"), rows)
    output.console.print(output.safe(report.summary()))


def _show_what_if(found: WhatIf) -> None:
    names = ", ".join(
        f"{name} = {_one(value)} instead of {_one(before)}" for name, (before, value) in found.rules.items()
    )
    sides = (found.recorded, found.changed)
    reasons = sorted({reason for side in sides for reason in side.dropped})
    rows = [
        ("steps", *(side.steps for side in sides)),
        ("groups trained on", *(side.groups for side in sides)),
        ("samples trained on", *(side.samples for side in sides)),
        ("their mean success", *(f"{side.success:.3f}" for side in sides)),
        *((f"groups dropped: {reason}", *(side.dropped.get(reason, 0) for side in sides)) for reason in reasons),
    ]
    output.print_table(f"{found.run} with {names or 'the same rules'}", ("", "as recorded", "changed"), rows)
    if found.first_other_step is not None:
        output.console.print(f"step {found.first_other_step} is the first that holds another batch")


def _one(value: object) -> str:
    """Return a rule's value; those of several trainers of a run in their order."""
    return ", then ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _show_rescored(found: Rescored) -> None:
    if found.named:
        rows = [(output.safe(one.sample), f"{one.before:g}", f"{one.after:g}") for one in found.named]
        output.print_table("graded otherwise", ("sample", "recorded reward", "reward now"), rows)
    for cause, count in found.causes.items():
        output.console.print(f"{count} x {output.safe(cause)}", highlight=False)
    graded = found.graded - found.failed
    before = found.success_before / found.graded if found.graded else 0.0
    after = found.success_after / graded if graded else 0.0
    output.console.print(
        f"{found.graded} samples of {found.run} graded anew: {found.same} the same, {found.other} otherwise, "
        f"{found.failed} failures of the grader; {found.left} had never completed. Mean success {before:.3f} -> "
        f"{after:.3f}" + (f"; published as run {found.into}" if found.into else "")
    )
