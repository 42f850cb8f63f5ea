"""Stands before an engine, passes everything on, and keeps what the engine said, byte for byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from infra.inference import vllm_wire as wire


class Recorder:
    """What was asked of an engine, and what it answered."""

    def __init__(self, engine: str) -> None:
        self.url = ""
        self._engine = engine
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        self._answers: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}

    def generations(self, episode: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (request, choice) of each generation of an episode, in order."""
        return self._answers.get(episode, [])

    async def pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        async with self._session.request(
            request.method,
            self._engine + request.path_qs,
            data=body,
            headers={"Content-Type": "application/json"},
        ) as reply:
            said = await reply.read()
            if request.path == wire.GENERATE and reply.status == 200:
                asked = json.loads(body)
                episode, _, _ = asked["request_id"].rpartition("/")
                self._answers.setdefault(episode, []).append((asked, json.loads(said)["choices"][0]))
            return web.Response(body=said, status=reply.status, content_type=reply.content_type)

    async def close(self) -> None:
        await self._session.close()


@asynccontextmanager
async def recorded(engine: str) -> AsyncIterator[Recorder]:
    """Stand before an engine while the block runs."""
    recorder = Recorder(engine)
    app = web.Application(client_max_size=8 << 20)
    app.router.add_route("*", "/{path:.*}", recorder.pass_on)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield recorder
    finally:
        await runner.cleanup()
        await recorder.close()
