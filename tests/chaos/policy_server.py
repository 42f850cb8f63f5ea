"""A policy that follows a script, as a process: `python -m tests.chaos.policy_server --model DIR --port N`.

Speaks vLLM's protocol (`infra/inference/vllm_wire.py`) around `ScriptedPolicy`, without torch. What it answers is a
function of prompt and seed, so it may be killed at any time and says the same afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import click
import msgspec
from aiohttp import web

from infra.inference import vllm_wire as wire
from infra.inference.base import UNKNOWN, Generation, PolicyError
from infra.inference.scripted import ScriptedPolicy
from infra.service import set_up_logging, until_stopped
from schemas.transcript import Sampling, TokenIds
from stages.handlers.keydoor import MOVES
from stages.run.render import Renderer
from tests.pipeline.faulty import Expert

STRAYS = 0.25
"""Share of its turns in which a wanderer goes anywhere."""

Body = TypeVar("Body")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Wanderer(Expert):
    """An expert that strays now and then, as prompt and seed say: siblings take hunts of different lengths."""

    def __call__(self, prompt: TokenIds, seed: int) -> list[int]:
        """Answer the last message of the prompt."""
        dice = random.Random(hashlib.sha256(prompt.tobytes() + seed.to_bytes(16, "little")).digest())
        if dice.random() < STRAYS:
            return self._renderer.answer(f"go {dice.choice(sorted(MOVES))}").tolist()
        return super().__call__(prompt, seed)


def wanderer(model: Path, *, token_s: float = 0.0) -> ScriptedPolicy:
    """Return the policy that plays hunts with the words of a model directory."""
    renderer = Renderer(model)
    return ScriptedPolicy(
        Wanderer(renderer), max_model_len=renderer.context, tokenizer_digest=renderer.digest, token_s=token_s
    )


class ScriptedServer:
    """vLLM's routes over one scripted policy."""

    def __init__(self, policy: ScriptedPolicy, name: str = "policy") -> None:
        self._policy = policy
        self._name = name
        self._directory = Path()

    def application(self) -> web.Application:
        """Return the routes that our client calls."""
        app = web.Application(client_max_size=8 << 20, middlewares=[_errors])
        app.add_routes(
            [
                web.post(wire.GENERATE, self.generate),
                web.post(wire.PAUSE, self.pause),
                web.post(wire.RESUME, self.resume),
                web.get(wire.IS_PAUSED, self.is_paused),
                web.post(wire.COLLECTIVE_RPC, self.collective_rpc),
                web.post(wire.RESET_PREFIX_CACHE, self.nothing),
                web.post(wire.UPDATE_WEIGHT_VERSION, self.update_weight_version),
                web.get(wire.WEIGHT_INFO, self.weight_info),
                web.get(wire.MODELS, self.models),
                web.get(wire.HEALTH, self.nothing),
            ]
        )
        return app

    async def generate(self, http: web.Request) -> web.Response:
        """Answer by the script."""
        body = await _read(http, wire.GenerateRequest)
        asked = body.sampling_params
        answer = await self._policy.generate(
            body.token_ids,
            Sampling(temperature=asked.temperature, max_tokens=asked.max_tokens),
            seed=asked.seed or 0,
            request_id=body.request_id,
            stop_token_ids=asked.stop_token_ids,
        )
        return _json(_reply(body.request_id, answer))

    async def pause(self, http: web.Request) -> web.Response:
        """Stop sampling and keep what is under way."""
        assert http.query["mode"] == "keep", "the only pause that the hand-over of weights asks for"
        await self._policy.pause("keep")
        return _json({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        """Sample on."""
        await self._policy.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        """Tell whether sampling is stopped: whoever brings weights asks."""
        return _json(wire.Paused(is_paused=self._policy.paused))

    async def collective_rpc(self, http: web.Request) -> web.Response:
        """Note the directory; the version comes in a call of its own."""
        self._directory = Path((await _read(http, wire.CollectiveRpc)).kwargs.weights_path)
        return _json({"results": [None]})

    async def update_weight_version(self, http: web.Request) -> web.Response:
        """Take the version over."""
        body = await _read(http, wire.NewVersion)
        weights = wire.labelled(body.new_version)
        if weights != UNKNOWN:
            await self._policy.load(self._directory, *weights)
        return _json({"success": True, "new_version": body.new_version})

    async def weight_info(self, _: web.Request) -> web.Response:
        """Tell the version."""
        return _json(wire.WeightInfo(weight_version=wire.label((await self._policy.info()).weights)))

    async def models(self, _: web.Request) -> web.Response:
        """Tell what is served."""
        info = await self._policy.info()
        card = wire.ModelCard(
            id=self._name,
            max_model_len=info.max_model_len,
            tokenizer_digest=info.tokenizer_digest,
            dtype=info.dtype,
            logprobs_mode=info.logprobs_mode,
        )
        return _json(wire.ModelList(data=[card]))

    async def nothing(self, _: web.Request) -> web.Response:
        """Agree."""
        return _json({"success": True})


@asynccontextmanager
async def serving(policy: ScriptedPolicy, port: int = 0) -> AsyncIterator[str]:
    """Serve a policy on loopback while the block runs; gives the address."""
    # A closed connection ends its generation, as the real engine does it.
    runner = web.AppRunner(ScriptedServer(policy).application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PolicyError as error:
        info = wire.ErrorInfo(message=str(error), type=type(error).__name__)
        return _json(wire.ErrorReply(error=info), HTTPStatus.BAD_REQUEST)


async def _read(http: web.Request, kind: type[Body]) -> Body:
    return msgspec.json.decode(await http.read(), type=kind)


def _json(body: msgspec.Struct | dict[str, object], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)


def _reply(request_id: str, answer: Generation) -> wire.GenerateResponse:
    pairs = zip(answer.token_ids.tolist(), answer.logprobs.tolist(), strict=True)
    choice = wire.Choice(
        index=0,
        finish_reason=answer.finish_reason,
        token_ids=answer.token_ids.tolist(),
        logprobs=wire.LogProbs(content=[wire.LogProb(token_id=token, logprob=logprob) for token, logprob in pairs]),
        weight_versions=[
            wire.WeightVersion(version=wire.label(span.weights), start=span.start, end=span.stop)
            for span in answer.versions
        ],
    )
    return wire.GenerateResponse(request_id=request_id, choices=[choice])


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Directory with tokenizer and template.")
@click.option("--port", type=int, required=True, help="Port on loopback.")
@click.option("--token-s", type=float, default=0.0, help="Time that a token takes, seconds.")
def main(model: Path, port: int, token_s: float) -> None:
    """Serve until stopped."""
    set_up_logging()

    async def serve() -> None:
        async with serving(wanderer(model, token_s=token_s), port):
            await until_stopped(asyncio.Event().wait())

    asyncio.run(serve())


if __name__ == "__main__":
    main()
