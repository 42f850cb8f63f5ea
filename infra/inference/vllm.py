"""The client of a vLLM server, and of our local server, which speaks the same.

vLLM must be started with `--enable-scale-out --logprobs-mode processed_logprobs` and, for weight updates,
VLLM_SERVER_DEV_MODE=1. One connection pool, no retry, no queue: who waits how long is the caller's business, except
that every call has a limit.

Prefix caches: `load` resets vLLM's; where running requests hold blocks vLLM refuses that, so each prompt is also
salted by the newest version this client has seen, and a prefix that older weights computed is never found. Our local
server needs no salt and ignores it. This file does not know balancing, episodes or torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, get_args

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from infra.inference import vllm_wire as wire
from infra.inference import weight_files
from infra.inference.base import (
    UNKNOWN,
    BadReply,
    ContextOverflow,
    FinishReason,
    Generation,
    ModelInfo,
    ModelPathMissing,
    PauseMode,
    PolicyError,
    PolicyOverloaded,
    PolicyRefused,
    PolicyTooSlow,
    PolicyUnreachable,
    VersionSpan,
    Weights,
    token_limit,
)
from infra.inference.ends import cut
from infra.inference.model_digest import TokenizerMissing, tokenizer_digest
from schemas.transcript import LogProbs, Sampling

Reply = TypeVar("Reply")

GENERATE_TIMEOUT_S: Final = 600.0
"""Longest wait for a generation, seconds; a frozen engine (`pause`) counts."""
CONTROL_TIMEOUT_S: Final = 120.0
"""Longest wait for a control call, seconds; loading weights is the slowest."""
CONNECT_TIMEOUT_S: Final = 10.0
"""Longest wait for a connection, seconds."""
SHOWN_BYTES: Final = 200
"""Most bytes of a reply that is no JSON shown in an error."""

_OVERFLOW_TEXTS: Final = ("maximum model length", "maximum context length")
"""Texts by which vLLM and our server say that a prompt is too long; it has no code of its own."""
_AWAY: Final = {HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT}
"""What a gateway answers when there is no engine behind it."""
_BUSY: Final = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


class VllmClient:
    """One engine behind one address; use as an asynchronous context manager, or `close` it."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        generate_timeout_s: float = GENERATE_TIMEOUT_S,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Remember the address; connections are made when needed.

        Args:
            url: such as `http://127.0.0.1:8000`.
            model: name under which the engine serves the policy; None lets the engine take its only one.
            generate_timeout_s: longest wait for a generation.
            control_timeout_s: longest wait for any other call.
        """
        self.url = url.rstrip("/")
        self._model = model
        self._generate_timeout = aiohttp.ClientTimeout(total=generate_timeout_s, connect=CONNECT_TIMEOUT_S)
        self._control_timeout = aiohttp.ClientTimeout(total=control_timeout_s, connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None
        self._newest = Weights()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer],
        sampling: Sampling,
        *,
        seed: int,
        request_id: str,
        stop_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> Generation:
        """Sample the continuation of a prompt; see `PolicyClient`."""
        request = wire.GenerateRequest(
            token_ids=np.asarray(token_ids, dtype=np.int64).tolist(),
            sampling_params=_params(sampling, seed, stop_token_ids, token_limit(sampling, max_tokens)),
            request_id=request_id,
            model=self._model,
            cache_salt=wire.salt(self._newest),
        )
        body = await self._call("POST", wire.GENERATE, body=request, timeout=self._generate_timeout)
        generation = _generation(_decode(body, wire.GenerateResponse, wire.GENERATE))
        if generation.versions:
            await self._note(generation.versions[-1].weights)
        return cut(generation, sampling, stop_token_ids)

    async def score(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> LogProbs:
        """Return what the weights in place say to ids; see `PolicyClient`."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        if len(ids) < 2:
            raise PolicyRefused(f"a prompt of {len(ids)} ids has nothing to score")
        request = wire.GenerateRequest(
            token_ids=ids,
            # The one sampled id is the price of an answer; greedy, it draws nothing.
            sampling_params=wire.SamplingParams(prompt_logprobs=0, temperature=0.0, max_tokens=1, detokenize=False),
            model=self._model,
        )
        body = await self._call("POST", wire.GENERATE, body=request)
        return _scores(_decode(body, wire.GenerateResponse, wire.GENERATE), ids)

    async def info(self) -> ModelInfo:
        """Say what is served now; see `PolicyClient`."""
        card = await self._card()
        weights = await self._weights()
        dtype, mode = card.dtype, card.logprobs_mode
        if not dtype:
            dtype, mode = await self._vllm_config()
        return ModelInfo(
            model=card.id,
            tokenizer_digest=card.tokenizer_digest or _local_digest(card.root),
            max_model_len=card.max_model_len or 0,
            version=weights.version,
            run=weights.run,
            dtype=dtype,
            logprobs_mode=mode,
            scores_paused=card.scores_paused,
        )

    async def health(self) -> None:
        """Return if the engine is able to sample.

        Raises:
            PolicyError: it is not, and why.
        """
        await self._call("GET", wire.HEALTH)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling until `resume`; see `PolicyClient`."""
        await self._call("POST", wire.PAUSE, query={"mode": mode})

    async def resume(self) -> None:
        """Sample on; see `PolicyClient`."""
        await self._call("POST", wire.RESUME)

    async def load(self, directory: Path, version: int, run: str = "") -> None:
        """Put weights in place under a version of a run; see `PolicyClient`.

        Meanwhile they are labelled as nobody's: should a call in between fail, no token of the new weights counts as
        one of the old ones.
        """
        await self._require_loadable(directory)
        before = await self._weights()
        await self.label(UNKNOWN)
        call = wire.CollectiveRpc(method="reload_weights", kwargs=wire.ReloadWeights(weights_path=str(directory)))
        try:
            await self._call("POST", wire.COLLECTIVE_RPC, body=call)
        except PolicyRefused:
            await self.label(before)  # nothing was changed
            raise
        await self._call("POST", wire.RESET_PREFIX_CACHE)
        given = Weights(version, run)
        await self.label(given)
        if (found := await self._weights()) != given:
            raise BadReply(
                f"{self.url} was given version {wire.label(given)} and reports {wire.label(found)}: another loader is "
                "at work"
            )
        self._newest = given

    async def _require_loadable(self, directory: Path) -> None:
        """Raise what vLLM would not answer: it loads while it samples, and shuts itself down where it cannot load."""
        paused = _decode(await self._call("GET", wire.IS_PAUSED), wire.Paused, wire.IS_PAUSED).is_paused
        if not paused:
            raise PolicyRefused("weights change only while the engine is paused: call pause first")
        card = await self._card()
        if card.dtype:
            return  # our own server looks for itself
        if not card.root:
            await asyncio.to_thread(weight_files.shapes, directory)
            return
        config, root = await self._server_config(), Path(card.root)
        if _told(config, "device_config", "device") == "cpu" and await asyncio.to_thread(_ties_its_ends, root):
            raise PolicyRefused(
                f"{root} ties its output layer to its embeddings, and vLLM on a processor keeps the old output layer "
                "when such weights are exchanged: serve a copy of the model that ties nothing (`tie_word_embeddings`)"
            )
        await asyncio.to_thread(_require_weights_of, directory, root)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End generations by name; each answers with what it has."""
        await self._call("POST", wire.ABORT_REQUESTS, body=wire.AbortRequests(request_ids=list(request_ids)))

    async def close(self) -> None:
        """Give up the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _card(self) -> wire.ModelCard:
        cards = _decode(await self._call("GET", wire.MODELS), wire.ModelList, wire.MODELS).data
        named = [card for card in cards if self._model in {None, card.id}]
        if not named:
            served = ", ".join(card.id for card in cards) or "nothing"
            raise PolicyRefused(f"{self.url} serves {served}, not {self._model!r}: check --served-model-name")
        return named[0]

    async def _weights(self) -> Weights:
        body = await self._call("GET", wire.WEIGHT_INFO)
        found = _labelled(_decode(body, wire.WeightInfo, wire.WEIGHT_INFO).weight_version)
        self._newest = found
        return found

    async def label(self, weights: Weights) -> None:
        """Say which weights are in place; see `PolicyClient`."""
        await self._call("POST", wire.UPDATE_WEIGHT_VERSION, body=wire.NewVersion(new_version=wire.label(weights)))

    async def _note(self, seen: Weights) -> None:
        """Salt by later weights of the run; an answer may be late, so which run is served, only the engine says."""
        if seen.run == self._newest.run:
            self._newest = max(self._newest, seen)
        else:
            await self._weights()

    async def _vllm_config(self) -> tuple[str, str]:
        """Return (dtype, log-prob mode) as vLLM's development endpoint tells them."""
        config = await self._server_config()
        dtype, mode = (_told(config, "model_config", name) for name in ("dtype", "logprobs_mode"))
        return dtype.removeprefix("torch."), mode

    async def _server_config(self) -> dict[str, Any]:
        body = await self._call("GET", wire.SERVER_INFO, query={"config_format": "json"})
        return _decode(body, dict[str, Any], wire.SERVER_INFO).get("vllm_config") or {}

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: dict[str, str] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,  # noqa: ASYNC109 - aiohttp's own, by phase of the request
    ) -> bytes:
        """Make one request; return the body of a 2xx reply, raise the error that fits any other end."""
        if self._session is None:
            # No limit on connections: the number of requests in flight is the caller's to bound.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
                params=query,
                timeout=timeout or self._control_timeout,
            ) as response:
                found = await response.read()
                if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                    raise _refusal(f"{self.url}{path}", response.status, found)
                return found
        except aiohttp.ClientError as error:  # a connection that takes too long is one of them
            raise PolicyUnreachable(
                f"{self.url}{path}: {type(error).__name__}: {error}; check that the engine runs at this address"
            ) from error
        except TimeoutError as error:
            limit_s = (timeout or self._control_timeout).total
            kind = PolicyTooSlow if path == wire.GENERATE else PolicyUnreachable
            raise kind(
                f"{self.url}{path} did not answer in {limit_s} s: the engine is paused, stuck or overloaded; see "
                "its log"
            ) from error


def _told(config: dict[str, Any], section: str, name: str) -> str:
    """Return what vLLM says of a setting of its own; empty if it does not."""
    return str((config.get(section) or {}).get(name, ""))


def _ties_its_ends(root: Path) -> bool:
    """Tell whether a model uses its embeddings as its output layer, as far as it can be seen from here."""
    try:
        config = msgspec.json.decode((root / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False
    return config.get("tie_word_embeddings") is True


def _require_weights_of(directory: Path, root: Path) -> None:
    given = weight_files.shapes(directory)
    try:
        served = weight_files.shapes(root)
    except ModelPathMissing:
        return  # the engine's own directory is not to be seen from here
    if differs := weight_files.difference(given, served):
        raise PolicyRefused(f"{directory} holds weights of another model than {root}: {differs}; nothing was changed")


def _params(sampling: Sampling, seed: int, stop_token_ids: Sequence[int], max_tokens: int) -> wire.SamplingParams:
    """Return what to ask for; a rule that the engine does not know is carried out by `cut`, some tokens later."""
    sequences = sampling.stop_sequences
    return wire.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=max_tokens,
        logprobs=0,
        # vLLM takes a signed 64-bit seed and reads -1 as none.
        seed=seed & 0x7FFFFFFFFFFFFFFF,
        stop_token_ids=[*stop_token_ids, *(ids[0] for ids in sequences if len(ids) == 1)],
        ignore_eos=True,
        detokenize=False,
        repetition_detection=sampling.repetition,
        extra_args=wire.ExtraArgs(stop_sequences=[list(ids) for ids in sequences]) if sequences else None,
    )


def _decode(body: bytes, kind: type[Reply], path: str) -> Reply:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        shown = body[:SHOWN_BYTES].decode(errors="replace")
        raise BadReply(f"{path} answered something else than vLLM's {kind.__name__}: {error}; got {shown!r}") from error


def _generation(reply: wire.GenerateResponse) -> Generation:
    """Check an answer and turn it into ours; nothing missing is made up."""
    if len(reply.choices) != 1:
        raise BadReply(f"request {reply.request_id} has {len(reply.choices)} answers, not one")
    choice = reply.choices[0]
    if choice.token_ids is None:
        raise BadReply("the engine sent no token ids: it needs /inference/v1/generate (vLLM: --enable-scale-out)")
    content = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if len(content) != len(choice.token_ids):
        raise BadReply(
            f"{len(choice.token_ids)} ids came with {len(content)} log-probs: the engine must honour logprobs=0"
        )
    for token, entry in zip(choice.token_ids, content, strict=True):
        if entry.id is not None and entry.id != token:
            raise BadReply(f"the log-prob of id {entry.id} stands at a place where id {token} was sampled")
    if choice.token_ids and choice.weight_versions is None:
        raise BadReply("the engine reports no weight_versions: tokens without a version cannot be trained on")
    return Generation(
        token_ids=np.array(choice.token_ids, dtype=np.int32),
        logprobs=np.array([entry.logprob for entry in content], dtype=np.float32),
        finish_reason=_finish(choice.finish_reason),
        versions=tuple(
            VersionSpan(start=span.start, stop=span.end, version=weights.version, run=weights.run)
            for span in choice.weight_versions or []
            # vLLM gives an empty span to an answer that was aborted before its first token.
            if span.end > span.start
            for weights in [_labelled(span.version)]
        ),
    )


def _scores(reply: wire.GenerateResponse, ids: Sequence[int]) -> LogProbs:
    """Return the log-probs of a prompt's ids behind the first one."""
    said = reply.prompt_logprobs or []
    if len(said) != len(ids):
        raise BadReply(
            f"a prompt of {len(ids)} ids came with {len(said)} log-probs: the engine must honour prompt_logprobs"
        )
    found = [entry.get(str(token)) if entry else None for token, entry in zip(ids[1:], said[1:], strict=True)]
    if any(entry is None for entry in found):
        raise BadReply("a log-prob of the prompt is that of another id")
    return np.array([entry.logprob for entry in found if entry is not None], dtype=np.float32)


def _finish(reason: str | None) -> FinishReason:
    for known in get_args(FinishReason):
        if reason == known:
            return known  # type: ignore[no-any-return]  # get_args gives the Literal's own strings
    raise BadReply(f"finish_reason {reason!r} is none of {get_args(FinishReason)}")


def _labelled(text: str) -> Weights:
    try:
        return wire.labelled(text)
    except ValueError as error:
        raise BadReply(
            f"the weights carry the label {text!r}, neither a number nor NUMBER@RUN: somebody else loads this engine"
        ) from error


def _refusal(address: str, status: int, body: bytes) -> PolicyError:
    """Return the error that a reply with this status stands for."""
    try:
        message, kind = _error(body)
    except msgspec.DecodeError:
        message, kind = body[:SHOWN_BYTES].decode(errors="replace"), ""
    said = f"{address} answered {status}: {message}"
    if status in _BUSY:
        return PolicyOverloaded(f"{said}; ask again later or elsewhere")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        away = PolicyUnreachable(f"{said}; a gateway answers, and no engine behind it")
        return away if status in _AWAY else PolicyError(f"{said}; the engine failed, see its log")
    if any(text in message for text in _OVERFLOW_TEXTS):
        return ContextOverflow(said)
    if kind == ModelPathMissing.__name__:
        return ModelPathMissing(said)
    if status == HTTPStatus.NOT_FOUND and not kind:
        return PolicyRefused(f"{said}; start vLLM with --enable-scale-out and VLLM_SERVER_DEV_MODE=1")
    return PolicyRefused(said)


def _error(body: bytes) -> tuple[str, str]:
    """Return message and type of an error reply: `{"error": {...}}`, or `{"error": text}` from `/pause`."""
    reply = msgspec.json.decode(body, type=dict[str, Any])
    error = reply.get("error", reply.get("detail", reply))
    if isinstance(error, dict):
        return str(error.get("message", error)), str(error.get("type", ""))
    return str(error), ""


def _local_digest(root: str | None) -> str:
    """Return the digest of the engine's tokenizer if its directory is readable from here, else nothing."""
    if root is None:
        return ""
    try:
        return tokenizer_digest(Path(root))
    except TokenizerMissing:
        return ""
