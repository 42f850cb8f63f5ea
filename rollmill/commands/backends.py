"""`rollmill backends list | add | drain | remove | serve`: the engines that sample, while they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import click

from infra.arguments import BACKEND, PORT, RUN, TEXT, Number
from infra.bus import Bus
from infra.clock import Clock, SystemClock
from infra.config import Config
from infra.connect import connected
from infra.inference.vllm import VllmClient
from infra.service import set_up_logging, until_stopped
from rollmill import backends, output
from rollmill.backends_http import BackendsApi, serving
from rollmill.output import safe
from schemas.control import LARGEST_WEIGHT, SMALLEST_WEIGHT, Backend


@click.group("backends")
def command() -> None:
    """See which engines sample, add some, drain and remove them."""


@command.command("list")
@output.json_option
@output.config_options
def list_backends(as_json: bool, config: Config) -> None:
    """List the engines of the pool and what each serves.

    Without a registered one that is the engine at `policy.url`.
    """

    async def work(bus: Bus, clock: Clock) -> dict[str, Any]:
        return {"backends": await backends.listed(bus, clock, _connect(config), url=config.policy.url)}

    output.print_result(_on(config, work), as_json, _show_list)


@command.command("add")
@click.argument("name", type=BACKEND)
@click.argument("url", type=TEXT)
@click.option(
    "--weight",
    type=Number(SMALLEST_WEIGHT, LARGEST_WEIGHT),
    default=1.0,
    show_default=True,
    help="Its share of the work, relative to what its speed would give it.",
)
@click.option("--run", type=RUN, default=None, help="Only this run's weights are brought into it.")
@click.option("--force", is_flag=True, help="Do not ask the engine first.")
@output.json_option
@output.config_options
def add(name: str, url: str, weight: float, run: str | None, *, force: bool, as_json: bool, config: Config) -> None:
    """Register the engine at URL as NAME, or change it; one that was drained takes work again.

    The first one that is registered takes the place of `policy.url`: register that, too, if it is to go on.
    """
    backend = Backend(name=name, url=url.rstrip("/"), weight=weight, run=run or "")

    async def work(bus: Bus, clock: Clock) -> dict[str, Any]:
        return await backends.added(bus, clock, backend, None if force else _connect(config))

    output.print_result(_on(config, work), as_json, _show_one)


@command.command("drain")
@click.argument("name", type=BACKEND)
@output.json_option
@output.config_options
def drain(name: str, as_json: bool, config: Config) -> None:
    """Give an engine nothing new; what runs there ends there, and its episodes go on elsewhere."""
    output.print_result(_on(config, lambda bus, clock: backends.drained(bus, clock, name)), as_json, _show_one)


@command.command("remove")
@click.argument("name", type=BACKEND)
@output.json_option
@output.config_options
def remove(name: str, as_json: bool, config: Config) -> None:
    """Forget an engine; what runs there may end there, if it is left running."""
    output.print_result(_on(config, lambda bus, clock: backends.removed(bus, clock, name)), as_json, _show_one)


@command.command("serve")
@click.option("--port", type=PORT, default=8030, show_default=True, help="Port on loopback; 0 for a free one.")
@output.config_options
def serve(port: int, config: Config) -> None:
    """Offer the same over HTTP: GET /backends, PUT and DELETE /backends/NAME, PUT /backends/NAME/drain."""
    set_up_logging()

    async def work(bus: Bus, clock: Clock) -> dict[str, Any]:
        api = BackendsApi(bus, clock, _connect(config), url=config.policy.url)

        async def forever() -> None:
            async with serving(api, port) as url:
                click.echo(f"backends at {url}/backends")
                await asyncio.Event().wait()

        await until_stopped(forever())
        return {}

    _on(config, work)


def _on(config: Config, work: Callable[[Bus, Clock], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    async def done() -> dict[str, Any]:
        async with connected(config.bus, client="backends") as bus:
            return await work(bus, SystemClock())

    return output.run(done())


def _connect(config: Config) -> Callable[[str], VllmClient]:
    return lambda url: VllmClient(url, model=config.policy.name)


def _show_list(result: dict[str, Any]) -> None:
    rows = [
        [
            safe(one["name"]),
            safe(one["url"]),
            one["state"],
            safe(one.get("serves", "")),
            f"{one['weight']:g}",
            safe(one["run"] or "any"),
            safe(one["cause"]),
        ]
        for one in result["backends"]
    ]
    output.print_table("backends", ["name", "address", "state", "it has", "weight", "for run", "cause"], rows)


def _show_one(result: dict[str, Any]) -> None:
    serves = f", it has {safe(result['serves'])}" if "serves" in result else ""
    output.console.print(f"[bold]{safe(result['name'])}[/] at {safe(result['url'])}: {result['state']}{serves}")
