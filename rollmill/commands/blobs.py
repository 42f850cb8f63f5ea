"""`rollmill blobs status | collect`: the store of values that are too large for the log."""

from __future__ import annotations

from typing import Any

import click

from infra.blobs import KEEP_MS, BlobStore, collectable
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import blob_store
from infra.errors import ConfigError
from rollmill import output
from schemas.topics import HOUR_MS

DAY_MS = 24 * HOUR_MS
"""Milliseconds in a day."""


def store_of(config: Config) -> BlobStore:
    """Return the store of the log that the configuration names. Raises ConfigError if it names none."""
    store = blob_store(config.bus)
    if store is None:
        raise ConfigError("there is no blob store: set bus.blobs to the directory that the services use")
    return store


@click.group("blobs")
def command() -> None:
    """Look after the values that are too large for the log."""


@command.command("status")
@output.json_option
@output.config_options
def status(as_json: bool, config: Config) -> None:
    """Say what the store holds, what keeps it, and what a collection would delete."""
    output.print_result(output.run(_status(config)), as_json, _show)


async def _status(config: Config) -> dict[str, Any]:
    store = store_of(config)
    stock, pins = await store.stock(), await store.pins()
    now = SystemClock().now_ms()
    old = collectable(stock, pins, now)
    return {
        "directory": config.bus.blobs,
        "blobs": len(stock),
        "bytes": sum(blob.size for blob in stock),
        "oldest_days": max((now - blob.time_ms for blob in stock), default=0) // DAY_MS,
        "kept": {run: len(digests) for run, digests in sorted(pins.items())},
        "collectable": {"blobs": len(old), "bytes": sum(blob.size for blob in old)},
    }


def _show(result: dict[str, Any]) -> None:
    old = result["collectable"]
    output.console.print(
        f"{result['directory']}: {result['blobs']} blobs, {_mib(result['bytes'])}, the oldest {result['oldest_days']} "
        f"days old; `rollmill blobs collect` would delete {old['blobs']} of over {KEEP_MS // DAY_MS} days, "
        f"{_mib(old['bytes'])}",
        highlight=False,
    )
    if result["kept"]:
        output.print_table("kept by `rollmill keep`", ("run", "blobs"), list(result["kept"].items()))


@command.command("collect")
@output.json_option
@output.config_options
def collect(as_json: bool, config: Config) -> None:
    """Delete blobs that are older than any record can be, unless `rollmill keep` keeps them."""
    found = output.run(store_of(config).collect())
    result = {"deleted": found.blobs, "bytes": found.size}
    text = f"deleted {found.blobs} blobs, {_mib(found.size)}"
    output.print_result(result, as_json, lambda _: output.console.print(text, highlight=False))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
