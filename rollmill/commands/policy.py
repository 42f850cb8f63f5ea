"""`rollmill policy`: serves a model, or brings the weights of a run into an engine that is served elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from infra.arguments import PORT, RUN, FilePath
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.control import ControlView
from infra.errors import ConfigError
from infra.inference.base import NumberFormat, PolicyError
from infra.inference.sync_pool import PoolSync
from infra.inference.vllm import VllmClient
from infra.service import set_up_logging, until_stopped
from infra.wire import Publisher
from rollmill import output

MAX_THREADS = 1024
"""Most threads of Torch."""


@click.group("policy")
def command() -> None:
    """Serve a policy, or follow a run's weights."""


@command.command("serve")
@click.option("--model", type=FilePath(), default=None, help="Model directory; `policy.model` if not.")
@click.option("--port", type=PORT, default=8000, show_default=True, help="Port on loopback; 0 for a free one.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1, MAX_THREADS), help="Torch threads.")
@click.option(
    "--dtype",
    type=click.Choice(get_args(NumberFormat)),
    default=None,
    help="Number format of the weights, `policy.dtype` if not; int8 is that of linear layers, the rest is float32.",
)
@output.config_options
def serve(model: Path | None, port: int, threads: int, dtype: NumberFormat | None, config: Config) -> None:
    """Serve a model directory until stopped; needs the extra `train`."""
    set_up_logging()
    try:
        from infra.inference.local_server.app import serve as serve_model  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise ConfigError(f"the local policy needs torch: pip install 'rollmill[train]' ({error})") from error
    try:
        serve_model(
            model or config.policy.model,
            port=port,
            name=config.policy.name,
            dtype=dtype or config.policy.dtype,
            threads=threads,
            ready=_say,
        )
    except (PolicyError, OSError) as error:
        raise ConfigError(str(error)) from error


@command.command("follow")
@click.argument("run", type=RUN)
@click.option("--take", is_flag=True, help="Take the engine from a run that has not ended.")
@output.config_options
def follow(run: str, take: bool, config: Config) -> None:
    """Bring every version that a run's trainer announces into its engines (ours or vLLM).

    Those are the registered backends that name this run or none (`rollmill backends`), or the one at `policy.url` while
    none is registered. An engine serves one run: runs that train at the same time need engines of their own.
    """
    set_up_logging()
    output.run(_follow(run, config, take=take))


async def _follow(run: str, config: Config, *, take: bool) -> None:
    clock = SystemClock()
    async with connected(config.bus, client="policy") as bus:
        control = ControlView(bus, clock)
        sync = PoolSync(
            control,
            lambda url: VllmClient(url, model=config.policy.name),
            clock,
            Publisher(bus, clock, "policy"),
            run=run,
            url=config.policy.url,
            take=take,
            rolling=config.policy.rolling,
            limit_nats=config.policy.canary_nats,
        )
        async with control.following():
            await until_stopped(sync.run())


def _say(url: str) -> None:
    click.echo(f"policy at {url}")
