"""The consumer on the wire page, as somebody would run it: against a real Kafka, on every topic."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from infra.bus import Record
from infra.clock import SystemClock
from infra.dead_letter import Death, bury
from infra.kafka import KafkaBus
from infra.wire import Publisher
from schemas.control import Control
from schemas.topics import CONTROL, DEAD, DEFAULT_PREFIX, TABLE
from tests.golden.samples import SAMPLES
from tests.programs import block_of, printed

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"


async def publish_everything(bus: KafkaBus) -> Counter[str]:
    """Publish every sample wherever it may lie, and a dead letter; return topic -> records."""
    await bus.create_topics(TABLE)
    clock, sent = SystemClock(), Counter[str]()
    publisher = Publisher(bus, clock, "test")
    for topic in TABLE:
        for message in SAMPLES.values():
            if type(message) not in topic.carries or topic is DEAD:
                continue
            if isinstance(message, Control):
                await publisher.publish(CONTROL, message)
            else:
                await publisher.publish(topic, message)
            sent[topic.name] += 1
    poison = Record(topic="tasks", partition=3, offset=4, timestamp_ms=5, key=None, value=b"\xc1")
    await bury(bus, clock, poison, Death(stage="init", cause="not msgpack"))
    sent[DEAD.name] += 1
    return sent


async def test_the_pages_consumer_reads_every_topic(kafka, tmp_path):
    """It runs as it stands on the page, but for the prefix that keeps tests apart."""
    bus = KafkaBus(kafka, prefix="wire-page.")
    await bus.start()
    try:
        sent = await publish_everything(bus)
    finally:
        await bus.close()
    code = block_of(PAGE, "consumer.py")
    script = tmp_path / "consumer.py"
    script.write_text(code.replace(DEFAULT_PREFIX, "wire-page."), encoding="utf-8")
    lines = await printed([sys.executable, "-u", str(script), kafka], sent.total())
    assert Counter(line.split()[0].removeprefix("wire-page.") for line in lines) == sent
    assert all(line.split(maxsplit=3)[3].startswith("{") for line in lines)
