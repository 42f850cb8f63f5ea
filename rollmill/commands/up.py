"""`rollmill up`: all services on this machine, supervised until stopped."""

from __future__ import annotations

from pathlib import Path

import click

from infra import broker
from infra.arguments import TEXT, FilePath
from infra.config import load
from infra.errors import ConfigError
from infra.service import set_up_logging
from rollmill import output
from rollmill.paths import DATA_DIR
from rollmill.services import LocalPlan, local_services, make_plan, reach_elsewhere
from rollmill.supervisor import Event, Supervisor, What, supervise

MAX_WORKERS = 256
"""Most RUN workers of one machine."""

DEBUG_MODEL = "debug-model"
"""Folder of the model that is made when none is given."""


@click.command("up")
@click.option(
    "--data",
    type=FilePath(directory=True),
    default=DATA_DIR,
    show_default=True,
    help="Everything of the local system is kept here.",
)
@click.option("--model", type=FilePath(), default=None, help="Model directory; a debug one without it.")
@click.option(
    "--bootstrap", type=TEXT, envvar="ROLLMILL_BUS__BOOTSTRAP", default=None, help="A Kafka that runs already."
)
@click.option(
    "--policy-url", type=TEXT, envvar="ROLLMILL_POLICY__URL", default=None, help="An engine that runs already."
)
@click.option(
    "--clickhouse-url",
    type=TEXT,
    envvar="ROLLMILL_CLICKHOUSE__URL",
    default=None,
    help="A ClickHouse that runs already.",
)
@click.option("--run-workers", default=2, show_default=True, type=click.IntRange(1, MAX_WORKERS), help="RUN workers.")
@click.option("--config", "config_path", type=FilePath(), default=None, help="TOML file with limits.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting.")
def command(
    data: Path,
    model: Path | None,
    bootstrap: str | None,
    policy_url: str | None,
    clickhouse_url: str | None,
    run_workers: int,
    config_path: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Start broker, ClickHouse, policy, environment host, stages, reaper, sink and board, and keep them running."""
    set_up_logging("WARNING")
    plan = make_plan(
        data,
        base=load(config_path, overrides),
        model=model or data / DEBUG_MODEL,
        bootstrap=bootstrap,
        policy_url=policy_url,
        clickhouse_url=clickhouse_url,
        run_workers=run_workers,
    )
    # Before anything is fetched or made: a wrong address is known in seconds.
    output.run(reach_elsewhere(plan))
    if bootstrap is None:
        broker.prepare()
    if model is None:
        _make_debug_model(data / DEBUG_MODEL)
    output.run(_up(plan))


def _make_debug_model(directory: Path) -> None:
    """Make a small byte-level model with random weights: it exercises everything and earns nothing, honestly."""
    if (directory / "config.json").exists():
        return
    try:
        from trainer.models import create_debug_model  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise ConfigError(f"the local policy needs torch: pip install 'rollmill[train]' ({error})") from error
    create_debug_model(directory, seed=0)
    output.console.print(f"no --model given: the policy is a debug model with random weights ({directory})")


async def _up(plan: LocalPlan) -> None:
    supervisor = Supervisor(local_services(plan), run_dir=plan.run_dir, addresses=plan.addresses, on_event=_say)
    await supervise(supervisor, before=plan.write, ready=lambda: _ready(plan, supervisor))


def _say(event: Event) -> None:
    words = f"; the last line of its log: {event.last_words}" if event.what is What.DIED and event.last_words else ""
    output.console.print(f"{event}{words}", style="dim", highlight=False, markup=False)


def _ready(plan: LocalPlan, supervisor: Supervisor) -> None:
    unwell = {event.service: event for event in supervisor.unwell()}
    addresses = [(name, where) for name, where in plan.addresses.items() if name not in unwell]
    output.print_table("ready", ("service", "address"), addresses)
    if "board" not in plan.ports:
        output.console.print("no live board: pip install 'rollmill[board]'", markup=False)
    logs = plan.run_dir / "logs"
    for name, event in unwell.items():
        where = f" at {plan.addresses[name]}" if name in plan.addresses else ""
        output.errors.print(
            f"{name}{where} is not ready, the rest does without it and it is started again; its last line: "
            f"{event.last_words or 'none'} ({logs / name}.log)",
            style="yellow",
            highlight=False,
            markup=False,
        )
    output.console.print(f"logs: {logs}\nsettings for commands called here: {plan.config_path}", markup=False)
    output.console.print("next: rollmill publish FILE.jsonl --run RUN; rollmill status; stop with Ctrl-C", markup=False)
