"""The HTTP face of the engine: vLLM's routes and words, our engine behind them.

A closed connection ends its generation: the handler is cancelled, and with it the engine's future. What the protocol
allows and this engine does not do (streams, several answers, penalties, stop texts) is refused, never ignored. The
routes know no model and no torch; `serving` puts model, engine and server together.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
import numpy as np
import torch
from aiohttp import web
from transformers.utils import logging as hf_logging

from infra.inference import vllm_wire as wire
from infra.inference.base import (
    PROCESSED_LOGPROBS,
    Generation,
    ModelPathMissing,
    PauseMode,
    PolicyError,
    PolicyOverloaded,
    PolicyRefused,
    PolicyUnreachable,
)
from infra.inference.local_server.engine import Engine, EngineLimits, Request
from infra.inference.local_server.weights import dtype_named, load_model
from infra.inference.model_digest import TokenizerMissing, tokenizer_digest
from schemas.transcript import Sampling, sampling_flaw

log = logging.getLogger(__name__)

Body = TypeVar("Body")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 8 << 20
"""Largest request body, bytes: a prompt of a million tokens."""
SWITCH_INTERVAL_S = 0.0005
"""How long other threads may keep the interpreter when the engine wants it back, seconds; Python's own 5 ms would be
a good part of a step."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the server says about its model."""

    name: str
    root: Path
    tokenizer_digest: str


class PolicyServer:
    """Routes over one engine; the engine is started and stopped by whoever made it."""

    def __init__(self, engine: Engine, served: Served) -> None:
        self._engine = engine
        self._served = served

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.add_routes(
            [
                web.post(wire.GENERATE, self.generate),
                web.post(wire.PAUSE, self.pause),
                web.post(wire.RESUME, self.resume),
                web.get(wire.IS_PAUSED, self.is_paused),
                web.post(wire.COLLECTIVE_RPC, self.collective_rpc),
                web.post(wire.UPDATE_WEIGHT_VERSION, self.update_weight_version),
                web.post(wire.RESET_PREFIX_CACHE, self.reset_prefix_cache),
                web.post(wire.ABORT_REQUESTS, self.abort_requests),
                web.get(wire.WEIGHT_INFO, self.weight_info),
                web.get(wire.MODELS, self.models),
                web.get(wire.HEALTH, self.health),
                web.get(wire.LOAD, self.load),
            ]
        )
        return app

    async def generate(self, http: web.Request) -> web.Response:
        """Sample; the answer has vLLM's shape."""
        body = await _read(http, wire.GenerateRequest)
        if body.model not in {None, self._served.name}:
            raise PolicyRefused(f"model {body.model!r} is not served here, {self._served.name!r} is")
        if body.sampling_params.prompt_logprobs is not None:
            return _json(await self._score(body))
        request = _request(body)
        generation = await asyncio.wrap_future(self._engine.submit(request))
        return _json(_response(request.request_id, generation))

    async def _score(self, body: wire.GenerateRequest) -> wire.GenerateResponse:
        """Score a prompt. What is sampled besides nobody wants, so nothing is; a pause does not matter."""
        if body.sampling_params.prompt_logprobs or body.sampling_params.max_tokens != 1:
            raise PolicyRefused("this engine scores prompts alone: ask with prompt_logprobs = 0 and max_tokens = 1")
        ids = body.token_ids
        found = await asyncio.wrap_future(self._engine.score(np.array(ids, dtype=np.int32)))
        said = [{str(token): wire.PromptLogProb(logprob=value)} for token, value in zip(ids[1:], found, strict=True)]
        return wire.GenerateResponse(request_id=body.request_id, choices=[], prompt_logprobs=[None, *said])

    async def pause(self, http: web.Request) -> web.Response:
        """Stop sampling; `mode` as in vLLM, whose default is `abort`."""
        mode = http.query.get("mode", "abort")
        for known in get_args(PauseMode):
            if mode == known:
                await asyncio.wrap_future(self._engine.pause(known))
                return _json({"status": "paused"})
        raise PolicyRefused(f"pause mode {mode!r} is none of {get_args(PauseMode)}")

    async def resume(self, _: web.Request) -> web.Response:
        """Sample on."""
        await asyncio.wrap_future(self._engine.resume())
        return _json({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        """Tell whether sampling is stopped."""
        return _json(wire.Paused(is_paused=self._engine.paused))

    async def collective_rpc(self, http: web.Request) -> web.Response:
        """`reload_weights`, the one method of vLLM's workers that this engine has."""
        call = await _read(http, wire.CollectiveRpc)
        if call.method != "reload_weights":
            raise PolicyRefused(f"method {call.method!r} is not known here; reload_weights is")
        await asyncio.wrap_future(self._engine.reload(Path(call.kwargs.weights_path)))
        return _json({"results": [None]})

    async def update_weight_version(self, http: web.Request) -> web.Response:
        """Label the weights in place; versions are numbers here, of a run or none."""
        body = await _read(http, wire.NewVersion)
        try:
            weights = wire.labelled(body.new_version)
        except ValueError as error:
            raise PolicyRefused(f"version {body.new_version!r} is neither a number nor NUMBER@RUN") from error
        await asyncio.wrap_future(self._engine.label(weights))
        return _json({"success": True, "new_version": body.new_version})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """Drop cached prefixes; `reset_running_requests=true` computes running requests anew."""
        recompute = http.query.get("reset_running_requests", "false").lower() == "true"
        await asyncio.wrap_future(self._engine.forget(recompute_running=recompute))
        return _json({"success": True})

    async def abort_requests(self, http: web.Request) -> web.Response:
        """End generations by name, or all."""
        body = await _read(http, wire.AbortRequests)
        names = frozenset(body.request_ids) if body.request_ids else None
        count = await asyncio.wrap_future(self._engine.abort(names))
        return _json({"status": "aborted", "aborted": count})

    async def weight_info(self, _: web.Request) -> web.Response:
        """Tell the version in place."""
        return _json(wire.WeightInfo(weight_version=wire.label(self._engine.weights)))

    async def models(self, _: web.Request) -> web.Response:
        """Tell what is served."""
        card = wire.ModelCard(
            id=self._served.name,
            max_model_len=self._engine.max_model_len,
            root=str(self._served.root),
            tokenizer_digest=self._served.tokenizer_digest,
            dtype=self._engine.dtype,
            logprobs_mode=PROCESSED_LOGPROBS,
            scores_paused=True,
        )
        return _json(wire.ModelList(data=[card]))

    async def health(self, _: web.Request) -> web.Response:
        """200 if the engine is able to sample, 503 with the reason if not."""
        if (fault := self._engine.fault) is not None:
            raise PolicyOverloaded(fault)
        return web.Response()

    async def load(self, _: web.Request) -> web.Response:
        """Counters of the engine; `server_load` is vLLM's."""
        stats = self._engine.stats
        return _json({"server_load": stats.running + stats.waiting, **vars(stats)})


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn our errors into replies that the client turns back."""
    try:
        return await handler(request)
    except (PolicyOverloaded, PolicyUnreachable) as error:
        return _refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
    except ModelPathMissing as error:
        return _refuse(HTTPStatus.NOT_FOUND, error)
    except PolicyError as error:
        return _refuse(HTTPStatus.BAD_REQUEST, error)


def _refuse(status: HTTPStatus, error: PolicyError) -> web.Response:
    info = wire.ErrorInfo(message=str(error), type=type(error).__name__, code=int(status))
    return _json(wire.ErrorReply(error=info), status=status)


def _json(body: msgspec.Struct | dict[str, object], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)


async def _read(http: web.Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await http.read(), type=kind)
    except msgspec.DecodeError as error:
        raise PolicyRefused(f"the body is not a {kind.__name__}: {error}") from error


def _request(body: wire.GenerateRequest) -> Request:
    asked = body.sampling_params
    unknown = {
        "stream": body.stream,
        "n": asked.n != 1,
        "stop": bool(asked.stop),
        "presence_penalty": asked.presence_penalty != 0,
        "frequency_penalty": asked.frequency_penalty != 0,
        "repetition_penalty": asked.repetition_penalty != 1,
        "logprobs": bool(asked.logprobs),
    }
    if named := [name for name, given in unknown.items() if given]:
        raise PolicyRefused(f"this engine does not do {', '.join(named)}; leave it out or serve the model with vLLM")
    sampling = Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        min_p=asked.min_p,
        max_tokens=asked.max_tokens,
        stop_sequences=tuple(map(tuple, asked.extra_args.stop_sequences)) if asked.extra_args is not None else (),
        repetition=asked.repetition_detection,
    )
    if (flaw := sampling_flaw(sampling)) is not None:
        raise PolicyRefused(flaw)
    return Request(
        request_id=body.request_id,
        prompt=np.array(body.token_ids, dtype=np.int32),
        sampling=sampling,
        seed=asked.seed or 0,
        stop_token_ids=frozenset(asked.stop_token_ids),
        max_tokens=asked.max_tokens,
    )


def _response(request_id: str, generation: Generation) -> wire.GenerateResponse:
    ids, logprobs = generation.token_ids.tolist(), generation.logprobs.tolist()
    choice = wire.Choice(
        index=0,
        finish_reason=generation.finish_reason,
        token_ids=ids,
        logprobs=wire.LogProbs(
            content=[
                wire.LogProb(token_id=token, logprob=logprob) for token, logprob in zip(ids, logprobs, strict=True)
            ]
        ),
        weight_versions=[
            wire.WeightVersion(version=wire.label(span.weights), start=span.start, end=span.stop)
            for span in generation.versions
        ],
    )
    return wire.GenerateResponse(request_id=request_id, choices=[choice])


async def start_site(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Listen; port 0 takes a free one. Return the runner, to clean up, and the address."""
    # Without handler_cancellation a closed connection would leave its generation running to the end.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port}: {error.strerror}; give another --port, or 0 for a free one"
        ) from error
    address = runner.addresses[0]
    return runner, f"http://{address[0]}:{address[1]}"


def describe(directory: Path, name: str) -> Served:
    """Return what the server says about a model directory; no tokenizer is an empty digest and a warning."""
    try:
        digest = tokenizer_digest(directory)
    except TokenizerMissing as error:
        log.warning("%s; nobody can check that prompts come from the right tokenizer", error)
        digest = ""
    return Served(name=name, root=directory.resolve(), tokenizer_digest=digest)


@asynccontextmanager
async def serving(
    model_dir: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    name: str = "policy",
    version: int = 0,
    dtype: str = "float32",
    threads: int = 1,
    limits: EngineLimits | None = None,
) -> AsyncIterator[str]:
    """Serve a model while the block runs; gives the address.

    Args:
        model_dir: what `save_pretrained` wrote.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        name: model name that requests carry.
        version: version of the weights in the directory.
        dtype: number format of the weights (`base.NumberFormat`): float32, bfloat16, float16 or int8.
        threads: threads of torch.
        limits: how much to take on.
    """
    number_format = dtype_named(dtype)
    torch.set_num_threads(threads)
    # The bar belongs on a terminal, and a service writes to a log.
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it without types
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engine = Engine(load_model(model_dir, number_format), limits=limits, version=version, threads=threads)
    runner, url = await start_site(PolicyServer(engine, describe(model_dir, name)).application(), host, port)
    engine.start()
    try:
        yield url
    finally:
        # The engine first: it answers everyone who waits, so that cleaning up has no handler to wait for.
        await asyncio.to_thread(engine.stop)
        await runner.cleanup()


def serve(
    model_dir: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    name: str = "policy",
    version: int = 0,
    dtype: str = "float32",
    threads: int = 1,
    limits: EngineLimits | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM; `ready` is called with the address once requests are taken.

    The other arguments are those of `serving`.
    """

    async def until_signal() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        served = serving(model_dir, host, port, name=name, version=version, dtype=dtype, threads=threads, limits=limits)
        async with served as url:
            (ready or _announce)(url)
            await stop.wait()

    asyncio.run(until_signal())


def _announce(url: str) -> None:
    log.info("the policy is served at %s", url)
