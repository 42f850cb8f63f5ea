"""A create that has to wait says what for: seen on the board, beside the sample."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from infra.clock import VirtualClock
from infra.envhost.client import HttpEnvHost
from infra.envhost.protocol import Create, HostFull, pack, refusal
from infra.loopback import HOST, find_free
from infra.waiting import SAY_AFTER_S, heard_by
from tests.logs import make_task


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
