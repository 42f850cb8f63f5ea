"""`rollmill replay RUN --from trainer`: makes the recorded decisions again and compares the digests."""

from __future__ import annotations

import click

from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output
from trainer.replay import ReplayReport, replay


@click.command("replay")
@click.argument("run")
@click.option("--from", "start", type=click.Choice(["trainer"]), default="trainer", help="What is done again.")
@click.option("--last", default=None, type=click.IntRange(1), help="Report only the last steps; all are made again.")
@output.json_option
@output.config_options
def command(run: str, start: str, last: int | None, as_json: bool, config: Config) -> None:
    """Replay a run from its topics. Exits with 1 when a digest differs.

    From `trainer`: the recorded trajectories are fed through the same rules, and every batch must come out with the
    digest that the trainer recorded. Nothing is sampled and nothing is graded anew.
    """
    report = output.run(_replay(run, last, config))
    output.print_result({**report.as_dict(), "from": start}, as_json, lambda _: _show(report))
    if not report.all_equal:
        raise SystemExit(1)


async def _replay(run: str, last: int | None, config: Config) -> ReplayReport:
    async with connected(config.bus, client="replay") as bus:
        return await replay(bus, SystemClock(), run, last=last)


def _show(report: ReplayReport) -> None:
    rows = [(step.step, "equal" if step.equal else f"DIFFERS: {step.cause}") for step in report.steps]
    output.print_table(f"replay of {report.run}", ("step", "batch digest"), rows)
    output.console.print(report.summary())
