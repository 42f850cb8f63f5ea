"""`rollmill doctor`: says what works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict

import click

from infra.arguments import TEXT
from infra.config import Config
from infra.connect import blob_store
from rollmill import output
from rollmill.doctor import diagnose, render


@click.command("doctor")
@click.option("--bootstrap", type=TEXT, default=None, help="Also ask a Kafka that runs elsewhere, `host:port`.")
@output.json_option
@output.config_options
def command(bootstrap: str | None, as_json: bool, config: Config) -> None:
    """Check this machine. Exits with 1 when something that is needed is missing.

    The configuration says where the blob store is, and how to connect to a Kafka that runs elsewhere.
    """
    security = config.bus.security if bootstrap else None
    diagnosis = output.run(diagnose(bootstrap=bootstrap, security=security, blobs=blob_store(config.bus)))
    result = {**asdict(diagnosis), "healthy": diagnosis.healthy}
    output.print_result(result, as_json, lambda _: render(diagnosis, output.console))
    if not diagnosis.healthy:
        raise SystemExit(1)
