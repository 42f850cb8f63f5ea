"""An OpenAI-compatible server in front of the policy, for agents that only know a `base_url`.

    POST /v1/chat/completions    answered by the policy, and recorded; `stream` too
    GET  /v1/models              the one model there is
    POST /outcome                closes the episode (`outcome_post.py`); answered once that is in the log

Who calls is told by the key alone: each claim of an episode has one, 256 random bits, and it opens that episode until
it is over. It stands in no record and in no log. Errors are in OpenAI's words (`api_error.py`).

The server is a part of the RUN worker and listens once it is needed: a worker that never sees such an episode opens no
port. It knows nothing of environments, and of episodes only what `open_episode.py` offers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Self

from aiohttp import web

from infra.clock import Clock
from infra.config import ProxyConfig
from infra.errors import Failure
from infra.inference.base import ModelInfo
from infra.inference.pool import PolicyPool
from schemas.messages import Episode
from schemas.outcome import Boundary, FailureKind
from stages.run import chat_wire
from stages.run.api_error import ApiError, malformed, too_large, unknown_token
from stages.run.chat import read_call
from stages.run.harness import Address
from stages.run.open_episode import OpenEpisode
from stages.run.outcome_post import OUTCOME_BYTES, read_outcome
from stages.run.render import Renderer

log = logging.getLogger(__name__)

MODEL = "policy"
"""What the model is called unless it has another name; calls may name any."""

SHUTDOWN_S = 2.0
"""Calls in flight at a stop may end within this many seconds."""

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """The server of one worker; enter it to have it stopped at the end."""

    def __init__(
        self,
        *,
        policy: PolicyPool,
        renderer: Renderer,
        clock: Clock,
        config: ProxyConfig | None = None,
        model: str = MODEL,
    ) -> None:
        """Build the server; it does not listen yet.

        Args:
            policy: the engines.
            renderer: tokenizer and template of the engines' model.
            clock: time.
            config: where to listen.
            model: name of the model.
        """
        self._policy = policy
        self._renderer = renderer
        self._clock = clock
        self._config = config or ProxyConfig()
        self._model = model
        self._open: dict[bytes, OpenEpisode] = {}
        """Digest of a key -> its episode: no comparison takes longer for a key that is nearly right."""
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        """Nothing listens yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @asynccontextmanager
    async def opened(self, episode: Episode, engine: ModelInfo) -> AsyncIterator[tuple[OpenEpisode, Address]]:
        """Give an episode a key while the block runs.

        Raises:
            Failure: nothing can listen at the address that is configured.
        """
        port = await self._listen_once()
        opened = OpenEpisode(episode, engine, policy=self._policy, renderer=self._renderer, clock=self._clock)
        key = secrets.token_urlsafe(32)
        self._open[_digest(key)] = opened
        try:
            url = self._url(port)
            yield opened, Address(base_url=f"{url}/v1", api_key=key, model=self._model, outcome_url=f"{url}/outcome")
        finally:
            del self._open[_digest(key)]
            await opened.end()

    # Listening.

    @property
    def port(self) -> int | None:
        """The port, once somebody listens on it."""
        return None if self._runner is None else int(self._runner.addresses[0][1])

    async def _listen_once(self) -> int:
        async with self._starting:
            if self._runner is None:
                self._runner = await self._listen()
        port = self.port
        assert port is not None, "just now"
        return port

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=self._config.body_bytes, middlewares=[_in_openais_words])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._complete),
                web.get("/v1/models", self._models),
                web.post("/outcome", self._take_outcome),
            ]
        )
        # Without handler_cancellation an agent that hangs up would leave its generation running to the end.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            cause = f"cannot listen on {host}:{port} for agents (`proxy.host`, `proxy.port`): {error.strerror}"
            raise Failure(FailureKind.INFRASTRUCTURE, Boundary.STAGE, cause) from error
        log.info("agents are answered at %s", self._url(int(runner.addresses[0][1])))
        return runner

    def _url(self, port: int) -> str:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return (self._config.url or f"http://{host}:{{port}}").replace("{port}", str(port)).rstrip("/")

    # Routes.

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        call = await asyncio.to_thread(read_call, await _body(request, self._config.body_bytes))
        answer = await episode.complete(call)
        now_s = self._clock.now_ms() // 1000
        if not call.stream:
            return web.json_response(chat_wire.completion(answer, model=self._model, now_s=now_s))
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for event in chat_wire.events(answer, model=self._model, now_s=now_s, with_usage=call.usage):
            await response.write(event)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rollmill"}
        return web.json_response({"object": "list", "data": [model]})

    async def _take_outcome(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        outcome = read_outcome(await _body(request, OUTCOME_BYTES))
        if await episode.close_with(outcome):
            return web.json_response({"recorded": True})
        message = "the episode was closed, and its rollout is not known to be in the log: it may be made once more"
        raise ApiError(503, message, kind="server_error", code="not_recorded")

    def _episode(self, request: web.Request) -> OpenEpisode:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self._open.get(_digest(key.strip()))
        if scheme.lower() != "bearer" or found is None:
            raise unknown_token()
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def _body(request: web.Request, most: int) -> bytes:
    """Return a body of at most so many bytes. Raises ApiError."""
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large(most) from error
    if len(body) > most:
        raise too_large(most)
    return body


@web.middleware
async def _in_openais_words(request: web.Request, handler: Handle) -> web.StreamResponse:
    """Answer with errors that any client of the API can read."""
    try:
        return await handler(request)
    except ApiError as error:
        if error.status != HTTPStatus.UNAUTHORIZED:
            # An agent rarely says why it gave up; nothing of what was asked stands in here.
            log.info("%s %s: %d %s", request.method, request.raw_path, error.status, error.body["error"]["code"])
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        refused = malformed(None, f"{request.method} {request.path}: {error.reason}")
        return web.json_response(refused.body, status=error.status)
