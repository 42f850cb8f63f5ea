"""What `rollmill status` says about services that are away."""

from __future__ import annotations

import msgspec

from infra.clock import VirtualClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill.breakers import STALE_S, standstills, summed_up
from schemas.control import Breaker
from schemas.topics import CONTROL, TABLE

NOW_MS = 1_767_225_600_000
OPEN = Breaker(
    service="policy",
    address="http://127.0.0.1:8000",
    stage="run",
    worker="run-1",
    open=True,
    since_ms=NOW_MS - 42_000,
    open_ms=42_000,
    cause="connection refused",
    at_ms=NOW_MS,
)


def said(**changes):
    """Return what a worker wrote."""
    return msgspec.structs.replace(OPEN, **changes)


def test_a_service_that_is_away_is_named_with_the_time_and_the_cause():
    """For a person; one line per stage and address, from the first worker that noticed."""
    later = said(worker="run-2", since_ms=NOW_MS - 40_000, at_ms=NOW_MS - 1)
    (policy,) = summed_up([later, OPEN], NOW_MS)

    assert str(policy) == (
        "RUN paused: policy at http://127.0.0.1:8000 away for 42 s "
        "(breaker open since 2025-12-31 23:59:18 UTC, 2 workers): connection refused"
    )


def test_what_is_there_again_or_was_not_said_for_a_while_is_left_out():
    """A worker that was killed during an outage writes no end of it."""
    silent = said(at_ms=NOW_MS - int(STALE_S * 1000) - 1)

    assert [] == summed_up([said(open=False), silent], NOW_MS)


def test_each_stage_and_each_address_is_its_own():
    """INIT and RUN may miss the same host."""
    host = said(service="envhost", address="unix:/h", stage="init")
    found = summed_up([said(stage="run", service="envhost", address="unix:/h"), host, OPEN], NOW_MS)

    assert [("init", "envhost"), ("run", "envhost"), ("run", "policy")] == [(one.stage, one.service) for one in found]


async def test_it_is_read_from_control():
    """No other service is needed for it."""
    clock = VirtualClock(NOW_MS)
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    publisher = Publisher(bus, clock, "run-1")
    await publisher.publish(CONTROL, said(open_ms=1))
    await publisher.publish(CONTROL, OPEN)
    (policy,) = await standstills(bus, clock)

    assert ("policy", 42.0, 1) == (policy.service, policy.away_s, policy.as_dict()["workers"])
