"""What `rollmill runs` says of a run."""

from __future__ import annotations

import pytest

from infra.clock import VirtualClock
from infra.control import control_now
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill.commands import runs
from schemas.control import PolicyVersion, Quarantine, RunManifest
from schemas.topics import CONTROL, TABLE


@pytest.mark.parametrize(("epoch", "cause"), [(3, "0.9 nats from the trainer's"), (4, None)])
async def test_a_version_in_quarantine_is_told_until_its_trainer_begins_anew(capsys, epoch, cause):
    """It is why samples wait for a version that no engine serves."""
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    publisher = Publisher(bus, clock, "trainer")
    bad = Quarantine(run="r", epoch=3, version=7, address="a", cause="0.9 nats from the trainer's", at_ms=1)
    version = PolicyVersion(run="r", epoch=epoch, version=7, directory="/w", digest="d")
    for record in (manifest := RunManifest(run="r", seed=1, samples=2), version, bad):
        await publisher.publish(CONTROL, record)

    said = runs._describe(await control_now(bus, clock), manifest)
    assert (7, cause) == (said["version"], said["quarantined"])
    runs._show({"runs": [said]})
    assert ("version 7 is in quarantine" in capsys.readouterr().out) == (cause is not None)
