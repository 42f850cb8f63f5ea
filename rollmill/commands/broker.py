"""`rollmill broker start | run | stop | status | topics`: a local one-node Apache Kafka on a named directory."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from infra import broker
from infra.arguments import PORT, FilePath
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.service import set_up_logging, until_stopped
from rollmill import output
from rollmill.paths import DATA_DIR
from schemas.topics import TABLE

WATCH_S = 1.0
"""The broker's process is looked at this often by `broker run`, seconds."""

data_option = click.option(
    "--data",
    "data_dir",
    type=FilePath(directory=True),
    default=DATA_DIR / "broker",
    show_default=True,
    help="Directory of the broker's data.",
)
port_option = click.option(
    "--port", type=PORT, default=0, help="Port on loopback; 0: that of the last start, else a free one."
)


@click.group("broker")
def command() -> None:
    """Manage a local one-node Apache Kafka."""


@command.command("start")
@data_option
@port_option
@output.json_option
def start(data_dir: Path, port: int, as_json: bool) -> None:
    """Start a broker that outlives this command, and wait until it answers."""
    started = broker.start(data_dir, port=port, insist=port != 0)
    output.print_result(_plain(started.status()), as_json, _show)


@command.command("run")
@data_option
@port_option
def run(data_dir: Path, port: int) -> None:
    """Run a broker until this command is stopped: for supervisors."""
    set_up_logging()
    started = broker.start(data_dir, port=port, insist=port != 0, detached=False)
    _show(_plain(started.status()))
    output.run(_watch(started))


async def _watch(started: broker.LocalBroker) -> None:
    clock = SystemClock()

    async def alive() -> None:
        while (await asyncio.to_thread(started.status)).running:
            await clock.sleep(WATCH_S)
        raise started.ended_by_itself()

    try:
        await until_stopped(alive())
    finally:
        await asyncio.to_thread(started.stop)


@command.command("stop")
@data_option
@output.json_option
def stop(data_dir: Path, as_json: bool) -> None:
    """Stop the broker of a data directory."""
    stopped = broker.stop(data_dir)
    text = "stopped" if stopped else f"no broker runs on {data_dir}"
    output.print_result({"stopped": stopped}, as_json, lambda _: output.console.print(text))


@command.command("status")
@data_option
@output.json_option
def status(data_dir: Path, as_json: bool) -> None:
    """Say whether a broker runs on a data directory, and where. Exits with 1 when none answers."""
    found = broker.status(data_dir)
    output.print_result(_plain(found), as_json, _show)
    if not found.answers:
        raise SystemExit(1)


@command.command("topics")
@click.option("--create", is_flag=True, help="Create the topics that are missing.")
@output.json_option
@output.config_options
def topics(create: bool, as_json: bool, config: Config) -> None:
    """Compare the topics with the table and look for the blob store; with --create, make what is missing first."""
    created = output.run(_topics(config, create=create))
    result = {"topics": [topic.name for topic in TABLE], "created": created}
    output.print_result(result, as_json, _show_topics)


async def _topics(config: Config, *, create: bool) -> list[str]:
    async with connected(config.bus, client="broker", check=False) as bus:
        created = await bus.create_topics(TABLE) if create else []
        await bus.check_topics(TABLE)
        if bus.blobs is not None:
            await (bus.blobs.create() if create else bus.blobs.check())
        return created


def _plain(found: broker.BrokerStatus) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(found).items()}


def _show(result: dict[str, Any]) -> None:
    if result["answers"]:
        output.console.print(f"broker answers at [bold]{result['bootstrap']}[/] (pid {result['pid']})")
    elif result["running"]:
        output.console.print(f"broker runs (pid {result['pid']}) but does not answer; its log: {result['log']}")
    else:
        output.console.print(f"no broker runs on {result['data_dir']}; start one: rollmill broker start")


def _show_topics(result: dict[str, Any]) -> None:
    rows = [
        (topic.name, topic.partitions, topic.spread, "new" if topic.name in result["created"] else "as it should be")
        for topic in TABLE
    ]
    output.print_table("topics", ("topic", "partitions", "spread", ""), rows)
