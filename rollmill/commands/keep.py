"""`rollmill keep RUN`: the run's large values stay in the blob store, however old they get."""

from __future__ import annotations

from typing import Any

import click

from infra.arguments import RUN
from infra.blobs import DIGEST, BlobStore
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.errors import ConfigError
from rollmill import output
from rollmill.claims import run_claims
from rollmill.commands.blobs import store_of


@click.command("keep")
@click.argument("run", type=RUN)
@click.option("--release", is_flag=True, help="Let go of them instead: they may be collected when they are old.")
@output.json_option
@output.config_options
def command(run: str, release: bool, as_json: bool, config: Config) -> None:
    """Keep the large values that the records of RUN speak of from collection.

    The records themselves are kept by their topics. Called again, it adds what the run has written since.
    """
    if release:
        released = output.run(store_of(config).unpin(run))
        text = f"the large values of {run} may be collected" if released else f"nothing was kept for {run}"
        output.print_result({"run": run, "released": released}, as_json, lambda _: output.console.print(text))
    else:
        output.print_result(output.run(_keep(run, config)), as_json, _show)


async def _keep(run: str, config: Config) -> dict[str, Any]:
    store = store_of(config)
    async with connected(config.bus, client="keep") as bus:
        found = await run_claims(bus, SystemClock(), run)
    if not found.records:
        raise ConfigError(f"no record of run {run!r} is in the log: `rollmill runs` lists the runs")
    there = await pinned(store, run, found.digests)
    sizes = {blob.digest: blob.size for blob in await store.stock()}
    return {
        "run": run,
        "records": found.records,
        "kept": len(there),
        "bytes": sum(sizes.get(digest, 0) for digest in there),
        "lost": sorted(found.digests - there),
    }


async def pinned(store: BlobStore, run: str, digests: set[str]) -> set[str]:
    """Keep blobs for a run, and return those that are there and stay.

    First they are kept, then looked for: the other way round a collection in between would take what was just counted.
    One that began before and has not seen the pins looks at a blob's time once more, so each is refreshed too.
    """
    # Anyone may have written what a record names; what is no digest is no blob.
    named = {digest for digest in digests if DIGEST.fullmatch(digest)}
    await store.pin(run, named)
    return {digest for digest in sorted(named) if await store.refresh(digest)}


def _show(result: dict[str, Any]) -> None:
    output.console.print(
        f"{result['run']}: {result['records']} records speak of {result['kept']} large values, "
        f"{result['bytes'] / 2**20:.1f} MiB; they are kept until `rollmill keep --release {result['run']}`"
    )
    for digest in result["lost"]:
        output.console.print(f"lost already: {digest}", style="red", highlight=False)
