"""Serve a model directory: `python -m infra.inference.local_server MODEL_DIR`."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from infra.inference.base import PolicyError
from infra.inference.local_server.app import serve
from infra.inference.local_server.engine import EngineLimits
from infra.inference.local_server.weights import DTYPES


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--name", default="policy", show_default=True, help="Model name that requests carry.")
@click.option("--version", default=0, show_default=True, help="Version of the weights in the directory.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="float32",
    show_default=True,
    help="Number format of the weights; int8 is that of linear layers, and the rest is float32.",
)
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
@click.option("--max-model-len", default=0, help="Prompt and answer, tokens; 0 takes the model's own limit.")
@click.option("--max-running", default=EngineLimits.max_running, show_default=True, help="Requests at once.")
def main(
    model_dir: Path,
    host: str,
    port: int,
    name: str,
    version: int,
    dtype: str,
    threads: int,
    max_model_len: int,
    max_running: int,
) -> None:
    """Serve MODEL_DIR with vLLM's token-in, token-out protocol."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    limits = EngineLimits(max_model_len=max_model_len, max_running=max_running)
    try:
        serve(
            model_dir,
            host,
            port,
            name=name,
            version=version,
            dtype=dtype,
            threads=threads,
            limits=limits,
            ready=lambda url: click.echo(f"serving {name} at {url}"),
        )
    except (PolicyError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
