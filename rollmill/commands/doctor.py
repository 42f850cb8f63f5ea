"""`rollmill doctor`: says what works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict

import click

from rollmill import output
from rollmill.doctor import diagnose, render


@click.command("doctor")
@click.option("--bootstrap", default=None, help="Also ask a Kafka that runs elsewhere, `host:port`.")
@output.json_option
def command(bootstrap: str | None, as_json: bool) -> None:
    """Check this machine. Exits with 1 when something that is needed is missing."""
    diagnosis = output.run(diagnose(bootstrap=bootstrap))
    result = {**asdict(diagnosis), "healthy": diagnosis.healthy}
    output.print_result(result, as_json, lambda _: render(diagnosis, output.console))
    if not diagnosis.healthy:
        raise SystemExit(1)
