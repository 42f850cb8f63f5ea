"""An engine on which every generation lasts until its caller leaves, and a model directory to call it with.

It speaks the protocol of our policy server and of vLLM. An episode on it is running for as long as wanted, as one on a
busy engine is for minutes; what is measured is the stage around it. It samples nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from infra.inference import vllm_wire as wire
from infra.inference.base import PROCESSED_LOGPROBS
from infra.loopback import HOST

END = "<|end|>"
"""Ends an answer."""

CONTEXT = 4096
"""Longest sequence of the model, in tokens."""

TEMPLATE = (
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""Of the conversation."""


def write_model(directory: Path) -> Path:
    """Write tokenizer, template and context of a model whose tokens are bytes; there are no weights."""
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate([END, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT}))
    return directory


class HoldingEngine:
    """The engine; `url` is where it listens."""

    def __init__(self) -> None:
        self.url = ""
        self.held = 0
        """Generations under way."""
        self.aborted = 0
        """Generations whose caller left."""
        self._for_ever = asyncio.Event()

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application()
        app.router.add_get(wire.HEALTH, self._health)
        app.router.add_get(wire.MODELS, self._models)
        app.router.add_get(wire.WEIGHT_INFO, self._version)
        app.router.add_post(wire.GENERATE, self._generate)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        card = wire.ModelCard(id="policy", max_model_len=CONTEXT, dtype="float32", logprobs_mode=PROCESSED_LOGPROBS)
        return _json(wire.ModelList(data=[card]))

    async def _version(self, _: web.Request) -> web.Response:
        return _json(wire.WeightInfo(weight_version="0"))

    async def _generate(self, request: web.Request) -> web.Response:
        await request.read()
        self.held += 1
        try:
            await self._for_ever.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.held -= 1
        return web.Response(status=503)  # the engine is closing


@asynccontextmanager
async def holding_engine() -> AsyncIterator[HoldingEngine]:
    """Serve such an engine on this machine."""
    engine = HoldingEngine()
    # A caller who leaves ends its generation: that is how an engine aborts one.
    runner = web.AppRunner(engine.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        engine.url = f"http://{HOST}:{runner.addresses[0][1]}"
        yield engine
    finally:
        await runner.cleanup()


def _json(reply: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")
