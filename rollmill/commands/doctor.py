"""`rollmill doctor`: says what works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from infra.config import load
from rollmill import output
from rollmill.doctor import diagnose, render


@click.command("doctor")
@click.option("--bootstrap", default=None, help="Also ask a Kafka that runs elsewhere, `host:port`.")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with `bus.security` of that Kafka.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting.")
@output.json_option
def command(bootstrap: str | None, config: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check this machine. Exits with 1 when something that is needed is missing."""
    security = load(config, overrides).bus.security if bootstrap else None
    diagnosis = output.run(diagnose(bootstrap=bootstrap, security=security))
    result = {**asdict(diagnosis), "healthy": diagnosis.healthy}
    output.print_result(result, as_json, lambda _: render(diagnosis, output.console))
    if not diagnosis.healthy:
        raise SystemExit(1)
