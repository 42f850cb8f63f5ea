"""Continuous batching on one thread: every step computes all running requests at once and samples one token each.

A request waits, runs in a slot of the cache, and ends; new ones join between two steps. A long prompt is computed in
pieces of at most `max_step_tokens`, so that it does not hold up the others.

Invariants:

- torch is touched by the engine's thread only; `submit` and the controls may be called from any thread and hand back
  futures; cancelling a request's future ends the request before the next step;
- every token is recorded with the version that was in place when it was sampled;
- weights change only while the engine is paused, and until the new ones have a version nothing is sampled: no token
  can carry a wrong label;
- a pause is a lease: if nobody resumes, the engine does so itself and says so;
- a change of weights makes every cached prefix unfindable; running requests keep theirs, or compute it anew
  (`recompute_running`).

It does not know HTTP, JSON, text or turns.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from infra.inference.base import (
    ContextOverflow,
    FinishReason,
    Generation,
    PauseMode,
    PolicyOverloaded,
    PolicyRefused,
    PolicyUnreachable,
    VersionSpan,
    Weights,
)
from infra.inference.ends import ending
from infra.inference.local_server.attention import SlotCache, plan
from infra.inference.local_server.sampler import Draws, draw
from infra.inference.local_server.slots import SlotTable
from infra.inference.local_server.weights import cache_shape, model_dtype, read_weights, swap_weights
from schemas.transcript import Sampling, TokenIds

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How much the engine takes on; each limit has a name and a unit."""

    max_model_len: int = 0
    """Prompt and answer together, tokens; 0 takes the model's own limit."""
    max_running: int = 128
    """Requests computed at once, each in a slot."""
    spare_slots: int = 32
    """Slots beyond the running ones, so that episodes that wait for their environment keep their prefix."""
    cache_bytes: int = 2 << 30
    """Memory of the key-value cache, bytes; fewer slots are made if they would not fit."""
    max_waiting: int = 1024
    """Requests that wait for a slot; one more is refused."""
    max_step_tokens: int = 1024
    """Tokens computed in one step, over all requests."""
    pause_lease_s: float = 60.0
    """A pause ends by itself after this, seconds."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to sample."""

    request_id: str
    prompt: TokenIds
    """The whole prompt, int32."""
    sampling: Sampling
    seed: int
    stop_token_ids: frozenset[int]
    max_tokens: int
    """Most tokens of the answer."""


@dataclass(kw_only=True)
class Stats:
    """Counters since the start; written by the engine's thread only."""

    steps: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model."""
    reused_tokens: int = 0
    """Prompt tokens found in the cache."""
    sampled_tokens: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(kw_only=True, eq=False)
class _Running:
    """A request in its slot, or on the way to one."""

    request: Request
    future: Future[Generation]
    slot: int = -1
    length: int = 0
    """Ids known: the prompt and what was sampled."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, Weights]] = field(default_factory=list)
    """(first token, weights) of each span."""

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.has_rules = bool(sampling.stop_sequences) or sampling.repetition is not None

    def generation(self, reason: FinishReason) -> Generation:
        ends = [start for start, _ in self.spans[1:]] + [len(self.tokens)]
        return Generation(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            versions=tuple(
                VersionSpan(start=start, stop=stop, version=weights.version, run=weights.run)
                for (start, weights), stop in zip(self.spans, ends, strict=True)
            ),
        )


class Engine:
    """One model, one thread, one cache."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        limits: EngineLimits | None = None,
        version: int = 0,
        threads: int = 1,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the cache; nothing runs until `start`.

        Args:
            model: a causal language model loaded with slot attention (`weights.load_model`).
            limits: how much to take on.
            version: version of the weights that the model holds.
            threads: threads of torch inside a step.
            monotonic: clock of the pause lease.
        """
        self.limits = limits or EngineLimits()
        self.stats = Stats()
        self._model = model
        config: Any = model.config
        self._vocabulary = int(config.vocab_size)
        self._threads = threads
        self._monotonic = monotonic
        self._cache = _make_cache(model, self.limits)
        self._max_len = self._cache.shape.max_len
        self._format = model_dtype(model)
        # That of what layers give and the cache holds: float beside int8 weights as well.
        self._dtype = next(model.parameters()).dtype
        self._table = SlotTable(self._cache.shape.slots, self._max_len)
        self._weights = Weights(version)
        self._labelled = True
        self._paused: PauseMode | None = None
        self._lease_ends = 0.0
        self._drained: list[Future[None]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._pending = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)

    # What other threads call.

    @property
    def max_model_len(self) -> int:
        """Prompt and answer together, tokens."""
        return self._max_len

    @property
    def weights(self) -> Weights:
        """Those in place."""
        return self._weights

    @property
    def dtype(self) -> str:
        """Number format of the weights; with int8 that of the linear layers."""
        return str(self._format).removeprefix("torch.")

    @property
    def paused(self) -> bool:
        """Nothing new is sampled until `resume`."""
        return self._paused is not None

    @property
    def fault(self) -> str | None:
        """Why the engine cannot sample, if it cannot; a pause is no fault."""
        if not self._thread.is_alive():
            return "the engine's thread is not running; restart the server and see its log"
        if not self._labelled and self._paused is None:
            return "weights were loaded and never given a version; call /update_weight_version"
        return None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Fail what is in flight, end the thread and let go of the weights; waits for the step in progress."""
        self._inbox.put(self._stop)
        self._thread.join()

    def submit(self, request: Request) -> Future[Generation]:
        """Take a request; cancel the future to withdraw it.

        Raises:
            ContextOverflow: the prompt leaves no room for an answer.
            PolicyRefused: the prompt is empty or asks for ids the model does not have.
            PolicyOverloaded: too many requests wait.
        """
        self._check_prompt(request.prompt)
        with self._lock:
            if self._pending >= self.limits.max_waiting:
                raise PolicyOverloaded(
                    f"{self._pending} requests wait and {len(self._running)} run: ask again later, or raise max_waiting"
                )
            self._pending += 1
        entry = _Running(request=request, future=Future())
        self._inbox.put(lambda: self._waiting.append(entry))
        return entry.future

    def score(self, prompt: TokenIds) -> Future[list[float]]:
        """Return the log-prob of each id behind the first one, between two steps; a pause does not matter.

        Raises:
            ContextOverflow, PolicyRefused: as `submit`; more than `max_step_tokens` overflow, too.
        """
        self._check_prompt(prompt)
        if len(prompt) > self.limits.max_step_tokens:  # it is computed at once, while nobody else is
            raise ContextOverflow(
                f"{len(prompt)} tokens are more than are scored at once, {self.limits.max_step_tokens}"
            )
        return self._call(lambda: self._score(prompt))

    def abort(self, request_ids: frozenset[str] | None) -> Future[int]:
        """End requests by name, or all; each gets what it has with reason `abort`. Gives the number ended."""
        return self._call(lambda: self._abort(request_ids))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling; the future is done when nothing more is sampled."""
        done: Future[None] = Future()
        self._inbox.put(lambda: self._pause(mode, done))
        return done

    def resume(self) -> Future[None]:
        """Sample on.

        Raises (from the future):
            PolicyRefused: the weights in place have no version yet.
        """
        return self._call(self._resume)

    def reload(self, directory: Path) -> Future[None]:
        """Put weights in place; they need `label` before anything is sampled.

        Raises (from the future):
            PolicyRefused: not paused, or not this model's weights.
            ModelPathMissing: no weights there.
        """
        return self._call(lambda: self._reload(directory))

    def label(self, weights: Weights) -> Future[None]:
        """Say which weights are in place."""
        return self._call(lambda: self._label(weights))

    def forget(self, *, recompute_running: bool) -> Future[None]:
        """Drop all cached prefixes; running requests keep theirs or compute it anew."""
        return self._call(lambda: self._forget(recompute_running=recompute_running))

    def _call(self, action: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def act() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - handed to the caller, who awaits this future
                future.set_exception(error)

        self._inbox.put(act)
        return future

    def _check_prompt(self, prompt: TokenIds) -> None:
        length = len(prompt)
        if length == 0:
            raise PolicyRefused("the prompt is empty; a policy needs at least one token")
        if length >= self.max_model_len:
            raise ContextOverflow(
                f"a prompt of {length} tokens leaves no room in a context with a maximum model length of "
                f"{self.max_model_len}; end the episode as truncated, or raise max_model_len"
            )
        vocabulary = self._vocabulary
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocabulary:
            raise PolicyRefused(f"the prompt has ids outside 0 .. {vocabulary - 1}: it comes from another tokenizer")

    # What runs on the engine's thread.

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._stopping:
                self._receive()
                if self._can_step():
                    try:
                        self._step()
                    except Exception as error:
                        # A step is one computation for all: nobody can tell whose request broke it.
                        log.exception("a step failed; its %d requests fail", len(self._running))
                        self._fail_running(error)
        self._fail_all()
        # aiohttp keeps the handlers of its last 1,024 applications, and with them this engine: it must weigh nothing.
        del self._model, self._cache, self._table

    def _receive(self) -> None:
        """Take in all that arrived; sleep when there is nothing to compute."""
        if not self._can_step():
            timeout = None if self._paused is None else max(0.0, self._lease_ends - self._monotonic())
            try:
                self._inbox.get(timeout=timeout)()
            except queue.Empty:
                self._end_lease()
        while not self._inbox.empty():
            self._inbox.get()()
        # Counters that other threads read; a request has left the inbox only here.
        self.stats.running, self.stats.waiting = len(self._running), len(self._waiting)

    def _can_step(self) -> bool:
        if self._stopping or not self._labelled:
            return False
        if self._paused == "wait":
            return bool(self._running)
        return self._paused is None and bool(self._running or self._waiting)

    def _step(self) -> None:
        self._drop_cancelled()
        if self._paused is None:
            self._admit()
        if not self._running:
            return
        lengths = np.array([entry.length for entry in self._running])
        slots = np.array([entry.slot for entry in self._running])
        starts = self._table.computed[slots]
        counts = _share(lengths - starts, self.limits.max_step_tokens)
        taken = np.flatnonzero(counts)
        slots, starts, counts = slots[taken], starts[taken], counts[taken]
        ready = np.flatnonzero(starts + counts == lengths[taken])
        logits = self._forward(slots, starts, counts, ready)
        self._table.computed[slots] += counts
        self.stats.steps += 1
        self.stats.computed_tokens += int(counts.sum())
        self._sample([self._running[index] for index in taken[ready]], logits)
        self._finish_drain()

    def _forward(
        self,
        slots: np.ndarray[tuple[int], np.dtype[np.int64]],
        starts: np.ndarray[tuple[int], np.dtype[np.int64]],
        counts: np.ndarray[tuple[int], np.dtype[np.int64]],
        ready: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> torch.Tensor:
        """Compute the new tokens of each slot; return the logits after the last one of each ready request."""
        step = plan(self._cache, slots, starts, counts)
        ids = torch.from_numpy(self._table.tokens.reshape(-1)[step.rows.numpy()].astype(np.int64))
        output = self._model(
            input_ids=ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            step=step,
            logits_to_keep=torch.from_numpy(np.cumsum(counts)[ready] - 1),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _sample(self, entries: list[_Running], logits: torch.Tensor) -> None:
        if not entries:
            return
        requests = [entry.request for entry in entries]
        ids, logprobs = draw(
            logits,
            Draws(
                sampling=[request.sampling for request in requests],
                seeds=[request.seed for request in requests],
                indices=[len(entry.tokens) for entry in entries],
            ),
        )
        self.stats.sampled_tokens += len(entries)
        ended = [
            entry
            for entry, token, logprob in zip(entries, ids.tolist(), logprobs.tolist(), strict=True)
            if self._append(entry, token, logprob)
        ]
        if ended:
            gone = set(map(id, ended))
            self._running = [entry for entry in self._running if id(entry) not in gone]

    def _append(self, entry: _Running, token: int, logprob: float) -> bool:
        """Record a sampled token; end the request if it was the last, and tell whether it was."""
        if not entry.spans or entry.spans[-1][1] != self._weights:
            entry.spans.append((len(entry.tokens), self._weights))
        entry.tokens.append(token)
        entry.logprobs.append(logprob)
        self._table.tokens[entry.slot, entry.length] = token
        entry.length += 1
        if token in entry.request.stop_token_ids:
            self._end(entry, "stop")
        elif entry.has_rules and (end := ending(entry.tokens, entry.request.sampling)) is not None:
            self._end(entry, end)
        elif len(entry.tokens) >= entry.request.max_tokens or entry.length >= self.max_model_len:
            self._end(entry, "length")
        else:
            return False
        return True

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.max_running and self._table.free:
            entry = self._waiting.popleft()
            with self._lock:
                self._pending -= 1
            assignment = self._table.assign(entry.request.prompt)
            if assignment.copy_from is not None:
                self._cache.copy_prefix(assignment.copy_from, assignment.slot, assignment.reused)
            entry.slot, entry.length = assignment.slot, len(entry.request.prompt)
            self.stats.reused_tokens += assignment.reused
            self._running.append(entry)

    def _drop_cancelled(self) -> None:
        for entry in self._running:
            if entry.future.cancelled():
                self._table.release(entry.slot)
        self._running = [entry for entry in self._running if not entry.future.cancelled()]
        kept = deque(entry for entry in self._waiting if not entry.future.cancelled())
        with self._lock:
            self._pending -= len(self._waiting) - len(kept)
        self._waiting = kept

    def _end(self, entry: _Running, reason: FinishReason) -> None:
        self._table.release(entry.slot)
        # False: the asker withdrew in this very moment and wants no answer.
        if entry.future.set_running_or_notify_cancel():
            entry.future.set_result(entry.generation(reason))

    def _score(self, prompt: TokenIds) -> list[float]:
        # A cache of its own: nothing that is cached has a part in it, and nothing of it is found later.
        length = len(prompt)
        cache = SlotCache(replace(self._cache.shape, slots=1, max_len=length), self._dtype)
        none, all_of_it = np.array([0]), np.array([length])
        step = plan(cache, none, none, all_of_it)
        ids = torch.from_numpy(prompt.astype(np.int64))
        output = self._model(
            input_ids=ids.unsqueeze(0), position_ids=step.positions.unsqueeze(0), use_cache=False, step=step
        )
        said = output.logits[0, :-1].float().log_softmax(dim=-1).gather(1, ids[1:].unsqueeze(1))
        found: list[float] = said.squeeze(1).tolist()
        return found

    def _abort(self, request_ids: frozenset[str] | None) -> int:
        def named(entry: _Running) -> bool:
            return request_ids is None or entry.request.request_id in request_ids

        ended = [entry for entry in (*self._running, *self._waiting) if named(entry)]
        waiting = deque(entry for entry in self._waiting if not named(entry))
        with self._lock:
            self._pending -= len(self._waiting) - len(waiting)
        self._running = [entry for entry in self._running if not named(entry)]
        self._waiting = waiting
        for entry in ended:
            if entry.slot >= 0:
                self._end(entry, "abort")
            elif entry.future.set_running_or_notify_cancel():
                entry.future.set_result(entry.generation("abort"))
        return len(ended)

    def _pause(self, mode: PauseMode, done: Future[None]) -> None:
        if mode == "abort":
            self._abort(None)
        self._paused = mode
        self._lease_ends = self._monotonic() + self.limits.pause_lease_s
        self._drained.append(done)
        self._finish_drain()

    def _finish_drain(self) -> None:
        """Answer the pauses that were waited for, once nothing more is sampled."""
        if self._paused is None or (self._paused == "wait" and self._running):
            return
        for done in self._drained:
            if done.set_running_or_notify_cancel():
                done.set_result(None)
        self._drained.clear()

    def _resume(self) -> None:
        if not self._labelled:
            raise PolicyRefused("weights were loaded and have no version yet: call /update_weight_version first")
        self._paused = None

    def _end_lease(self) -> None:
        if self._paused is None or self._monotonic() < self._lease_ends:
            return
        log.warning("nobody resumed within %.0f s: the pause ends by itself", self.limits.pause_lease_s)
        self._paused = None

    def _reload(self, directory: Path) -> None:
        if self._paused is None or self._drained:
            raise PolicyRefused("weights change only while the engine is paused: call /pause?mode=keep first")
        swap_weights(self._model, read_weights(directory))
        self._labelled = False
        self._forget(recompute_running=False)

    def _label(self, weights: Weights) -> None:
        self._weights = weights
        self._labelled = True

    def _forget(self, *, recompute_running: bool) -> None:
        self._table.forget()
        if recompute_running:
            self._table.computed[[entry.slot for entry in self._running]] = 0

    def _fail_running(self, error: Exception) -> None:
        for entry in self._running:
            # Nobody knows how far the cache was written: nothing of it may be found again.
            self._table.computed[entry.slot] = 0
            self._table.release(entry.slot)
            if entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(error)
        self._running = []

    def _stop(self) -> None:
        self._stopping = True

    def _fail_all(self) -> None:
        """Answer everyone who still waits, so that nobody waits for a thread that is gone."""
        gone = PolicyUnreachable("the engine was stopped before it answered; send the request to another engine")
        self._fail_running(gone)
        for entry in self._waiting:
            if entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(gone)
        for done in self._drained:
            if done.set_running_or_notify_cancel():
                done.set_exception(gone)


def _make_cache(model: torch.nn.Module, limits: EngineLimits) -> SlotCache:
    config: Any = model.config
    max_len = limits.max_model_len or int(config.max_position_embeddings)
    # That of the embeddings: with int8 layers as well, what they give is float.
    dtype = next(model.parameters()).dtype
    shape = cache_shape(config, slots=1, max_len=max_len)
    slots = min(limits.max_running + limits.spare_slots, limits.cache_bytes // shape.slot_bytes(dtype))
    if slots < 1:
        raise PolicyRefused(
            f"one request of {max_len} tokens needs {shape.slot_bytes(dtype)} bytes of cache and cache_bytes allows "
            f"{limits.cache_bytes}: raise it or lower max_model_len"
        )
    return SlotCache(cache_shape(config, slots=slots, max_len=max_len), dtype)


def _share(
    wanted: np.ndarray[tuple[int], np.dtype[np.int64]], budget: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Split a step's tokens: short demands first, so that decoding never waits for someone's long prompt."""
    if wanted.sum() <= budget:
        return wanted
    order = np.argsort(wanted, kind="stable")
    sorted_wanted = wanted[order]
    left = budget - (np.cumsum(sorted_wanted) - sorted_wanted)
    shares = np.empty_like(wanted)
    shares[order] = np.clip(left, 0, sorted_wanted)
    return shares
