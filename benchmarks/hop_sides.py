"""The sides of `hop`, a process each: `python -m benchmarks.hop_sides NAME --set KEY=VALUE ...`.

Each reads Tasks from `tasks`, does nothing, and writes an Episode for each to `episodes`, with the codec of the
product. All that a process does once (imports, connections) is done before it says HELD; it begins at SIGUSR1 and ends
at SIGTERM.

- `ours`, `no_events`: the product's INIT worker with the handler of `simulated.py`, and nothing else changed;
- `bare`: a loop on aiokafka as its documentation shows it. It polls (500 records at most, Kafka's own default), sends,
  waits for every acknowledgement (acks=all, idempotent) and commits. It keeps what one can get from so much: no record
  is lost, one that cannot be read stops it, and so does one that takes long;
- `faust`: an agent of the real package, one at a time, with Faust's defaults. It commits what it has handed over to its
  producer, acknowledged or not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import click

from benchmarks.simulated import Simulated
from infra.config import BusConfig, load
from infra.service import set_up_logging, until_stopped
from infra.stage import Member
from schemas import codec
from schemas.messages import Episode, Task
from schemas.topics import EPISODES, TASKS
from stages.process import Surroundings, stage_command
from stages.wiring import init_stage

HELD = "held until SIGUSR1"
"""Said once a side could begin."""

POLL_RECORDS = 500
"""Most records of one poll of the bare loop: `max.poll.records` of Kafka's own client."""

POLL_MS = 200
"""Longest wait of one poll of the bare loop, milliseconds."""


async def released() -> None:
    """Say that this process could begin, and return when it shall."""
    go, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, go.set)
    print(HELD, file=sys.stderr, flush=True)
    await go.wait()


@asynccontextmanager
async def held_member(around: Surroundings) -> AsyncIterator[Member]:
    """Give one INIT member, once it shall begin."""
    await released()
    yield around.member(init_stage(Simulated(around.clock, around.worker).init), around.config.init, first=True)


def forwarded(value: bytes) -> bytes:
    """Return what follows from a record: what both rivals do with it."""
    task = codec.decode(value, Task)
    messages = ({"role": "user", "content": "go"},)
    return codec.encode(Episode(task=task, host="simulated", lease=f"{task.group}/{task.sample}", messages=messages))


async def bare(config: BusConfig, group: str) -> None:
    """Forward by a loop on aiokafka."""
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # noqa: PLC0415 - each side loads its own client alone

    producer = AIOKafkaProducer(bootstrap_servers=config.bootstrap, acks="all", enable_idempotence=True)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=config.bootstrap, group_id=group, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await producer.start()
    await consumer.start()
    await released()
    consumer.subscribe([config.prefix + TASKS.name])
    while True:
        found = await consumer.getmany(timeout_ms=POLL_MS, max_records=POLL_RECORDS)
        sent = [
            await producer.send(config.prefix + EPISODES.name, forwarded(record.value), key=record.key)
            for records in found.values()
            for record in records
        ]
        if sent:
            await asyncio.gather(*sent)
            await consumer.commit()


async def faust(config: BusConfig, group: str) -> None:
    """Forward by an agent of Faust."""
    import faust  # noqa: PLC0415 - an extra, and each side loads its own client alone

    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        app = faust.App(
            group,
            env={},
            autodiscover=False,
            broker=[f"kafka://{address.strip()}" for address in config.bootstrap.split(",")],
            datadir=folder,
            web_enabled=False,
            topic_allow_declare=False,  # the topics are there
            topic_disable_leader=True,  # else there is one for its election
            reply_create_topic=False,
        )
        raw: dict[str, Any] = {
            "key_serializer": "raw",
            "value_serializer": "raw",
            "key_type": bytes,
            "value_type": bytes,
        }
        sink = app.topic(config.prefix + EPISODES.name, **raw)

        @app.agent(app.topic(config.prefix + TASKS.name, **raw), concurrency=1)
        async def forward(stream: Any) -> None:
            async for event in stream.events():
                await sink.send(key=event.key, value=forwarded(event.value))

        await released()
        await app.start()
        await app.wait_until_stopped()


RIVALS: dict[str, Callable[[BusConfig, str], Awaitable[None]]] = {"bare": bare, "faust": faust}


def rival_command(name: str) -> click.Command:
    """Return the command line of a rival."""

    @click.command(name)
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting.")
    def command(overrides: tuple[str, ...]) -> None:
        set_up_logging()
        config = load(None, overrides).bus
        # A group of its own: each process begins at the first record.
        # Ended at once: nothing of what it holds is wanted any more, and Faust's threads take their time.
        asyncio.run(until_stopped(RIVALS[name](config, f"{config.prefix}{name}-{os.getpid()}"), partial(os._exit, 0)))

    return command


command = click.Group(
    commands={
        "ours": stage_command("init", held_member),
        "no_events": stage_command("init", held_member),
        **{name: rival_command(name) for name in RIVALS},
    }
)

if __name__ == "__main__":
    command()
