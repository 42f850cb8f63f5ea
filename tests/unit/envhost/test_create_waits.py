"""A create that has to wait says what for: seen on the board, beside the sample."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from infra.clock import VirtualClock, settle
from infra.envhost.client import HttpEnvHost
from infra.envhost.protocol import Create, HostFull, pack, refusal
from infra.errors import Failure
from infra.loopback import HOST, find_free
from infra.waiting import SAY_AFTER_S, heard_by
from tests.logs import make_task, wait_until


@pytest.fixture
def clock():
    return VirtualClock()


async def create(client, heard, wait_s):
    with heard_by(heard.append):
        return await client.create(Create.of(make_task(), reap_at_ms=9, wait_s=wait_s))


async def test_a_host_that_does_not_answer_at_once_and_then_is_full(clock):
    """Building, or waiting for a place: from outside it looks the same until the host says so."""
    asked, answer, heard = asyncio.Semaphore(0), asyncio.Semaphore(0), []

    async def full(_):
        asked.release()
        await answer.acquire()
        return web.Response(status=503, body=pack(refusal(HostFull("one of 2 places"))))

    app = web.Application()
    app.router.add_post("/create", full)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = find_free()
    await web.TCPSite(runner, HOST, port).start()
    client = HttpEnvHost(f"http://{HOST}:{port}", clock=clock)
    creating = asyncio.create_task(create(client, heard, 100.0))
    try:
        await asyncio.wait_for(asked.acquire(), 30)
        await clock.advance(SAY_AFTER_S)
        assert [f"an environment on http://{HOST}:{port}"] == heard
        answer.release()
        await asyncio.wait_for(asked.acquire(), 30)
        await clock.advance(SAY_AFTER_S)
        assert f"a place on the environment host at http://{HOST}:{port}" == heard[-1]
    finally:
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        await client.disconnect()
        await runner.cleanup()
    assert heard[-1] == ""


async def test_a_host_that_is_away(clock):
    """It is asked again until the caller's limit."""
    heard, address = [], f"http://{HOST}:{find_free()}"
    client = HttpEnvHost(address, clock=clock)
    creating = asyncio.create_task(create(client, heard, 5.0))

    async def said():
        await clock.advance(0.1)
        await settle()
        return len(heard)

    await wait_until(said, 1, limit_s=30)
    assert [f"the answer of the environment host at {address}"] == heard[:1]

    async def over():
        await clock.advance(0.1)
        await asyncio.sleep(0)
        return creating.done()

    await wait_until(over, True, limit_s=30)
    with pytest.raises(Failure, match="no environment within 5 s"):
        await creating
    await client.disconnect()
    assert heard[-1] == ""
