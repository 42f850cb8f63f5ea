"""`rollmill replay RUN --from trainer`: makes the recorded decisions again, by the same rules or by others."""

from __future__ import annotations

import click

from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output
from trainer.replay import ReplayReport, replay
from trainer.what_if import WhatIf, what_if


@click.command("replay")
@click.argument("run")
@click.option("--from", "start", type=click.Choice(["trainer"]), default="trainer", help="What is done again.")
@click.option("--last", default=None, type=click.IntRange(1), help="Report only the last steps; all are made again.")
@output.json_option
@output.config_and_rules_options
def command(run: str, start: str, last: int | None, as_json: bool, config: Config, rules: tuple[str, ...]) -> None:
    """Replay a run from its topics. Exits with 1 when a digest differs.

    From `trainer`: the recorded trajectories are fed through the same rules, and every batch must come out with the
    digest that the trainer recorded. Nothing is sampled and nothing is graded anew.

    With `--set filter=off` or another rule of the run's `[algorithm]`: what the trainer would have decided over the
    same trajectories. Nothing is written.
    """
    if rules:
        found = output.run(_what_if(run, rules, config))
        output.print_result({**found.as_dict(), "from": start}, as_json, lambda _: _show_what_if(found))
        return
    report = output.run(_replay(run, last, config))
    output.print_result({**report.as_dict(), "from": start}, as_json, lambda _: _show(report))
    if not report.all_equal:
        raise SystemExit(1)


async def _replay(run: str, last: int | None, config: Config) -> ReplayReport:
    async with connected(config.bus, client="replay") as bus:
        return await replay(bus, SystemClock(), run, last=last)


async def _what_if(run: str, rules: tuple[str, ...], config: Config) -> WhatIf:
    async with connected(config.bus, client="replay") as bus:
        return await what_if(bus, SystemClock(), run, rules)


def _show(report: ReplayReport) -> None:
    rows = [(step.step, "equal" if step.equal else f"DIFFERS: {step.cause}") for step in report.steps]
    output.print_table(f"replay of {report.run}", ("step", "batch digest"), rows)
    output.console.print(report.summary())


def _show_what_if(found: WhatIf) -> None:
    names = ", ".join(f"{name} = {value} instead of {before}" for name, (before, value) in found.rules.items())
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
