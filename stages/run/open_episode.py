"""One episode whose agent calls by itself, from the claim of its environment to the record of its outcome.

Calls are answered as they come, several at once. What the record does with them is decided in `branches.py`, one at a
time and never on the event loop, for tokenising takes a while; what is running there is always finished, since half of
a turn would be no record. An agent that hangs up ends its generation, and nothing of it is recorded: it never saw that
answer, and the tokens would be praised or blamed for what others did. An answer that was there counts, read or not.

An episode is over when its agent has ended, when somebody posted an outcome, when it may sample nothing more and its
agent has had `GRACE_S` to see that, or when the system failed it: an agent that goes on without its policy would be
graded for that. Then no call is answered any more, and what runs is cancelled. No HTTP here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec

from infra.clock import Clock
from infra.errors import Failure, boundary
from infra.inference.base import ModelInfo
from infra.inference.pool import PolicyPool
from schemas.messages import Episode
from schemas.outcome import Boundary, FailureKind, StopReason
from schemas.transcript import Transcript
from stages.run.api_error import ApiError, LimitReached, too_many, unavailable, unknown_token
from stages.run.branches import OF_EPISODE, Answer, Ask, Branches
from stages.run.chat import ChatCall
from stages.run.render import Renderer
from stages.run.turn_request import need_of, request_of

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 30.0
"""An agent that was told that it gets no more answers may end by itself within so many seconds."""

CALLS_AT_ONCE = 64
"""Most calls of one episode that are answered at the same time."""

SETTLED_S = 60.0
"""Who posted an outcome is told within so many seconds whether it is in the log."""


VERDICT_CHARS = 1_000
"""So many characters of a verdict's end are told in a failure: where a program said why it ended."""


class OpenEpisode:
    """One episode, as its agent and its worker see it.

    Attributes:
        backends: addresses of the engines that answered, in order.
    """

    def __init__(
        self, episode: Episode, engine: ModelInfo, *, policy: PolicyPool, renderer: Renderer, clock: Clock
    ) -> None:
        """Open an episode.

        Args:
            episode: what is rolled out.
            engine: what an engine for it serves.
            policy: the engines.
            renderer: tokenizer and template.
            clock: time.
        """
        self.backends: dict[str, None] = {}
        self._episode = episode
        self._policy = policy
        self._renderer = renderer
        self._clock = clock
        self._branches = Branches(episode.task, renderer, engine)
        self._alone = asyncio.Lock()
        self._calls: set[asyncio.Task[Answer]] = set()
        self._inside: set[asyncio.Task[Any]] = set()
        self._grace: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._outcome: dict[str, Any] | None = None
        self._failure: Failure | None = None
        self._settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # What a call waits for is said on the episode's behalf, not on that of the connection it came by.
        self._context = copy_context()

    # For the agent.

    async def complete(self, call: ChatCall) -> Answer:
        """Answer a call.

        Raises:
            ApiError: why there is no answer.
        """
        if self._over.is_set():
            raise unknown_token()
        if len(self._calls) >= CALLS_AT_ONCE:
            raise too_many(CALLS_AT_ONCE)
        task = asyncio.get_running_loop().create_task(self._complete(call), context=self._context.copy())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._over.is_set() and not _cancelled_from_outside():
                raise unknown_token() from None
            raise

    async def close_with(self, outcome: dict[str, Any]) -> bool:
        """Close the episode with an outcome; return whether it is known to be in the log. Raises ApiError."""
        if self._over.is_set():
            raise unknown_token()
        self._outcome = outcome
        self._over.set()
        limit = asyncio.create_task(self._clock.sleep(SETTLED_S))
        waits: set[asyncio.Future[Any]] = {limit, self._settled}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            limit.cancel()
        return self._settled.done() and self._settled.result()

    # For the worker.

    async def until_over(self, within_s: float) -> bool:
        """Wait at most so many seconds until the episode is over, whatever its environment says; tell whether it is."""
        pause, over = asyncio.create_task(self._clock.sleep(within_s)), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({pause, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            over.cancel()
        return self._over.is_set()

    async def end(self) -> None:
        """Answer nothing more, and wait until nothing is running."""
        self._over.set()
        if self._grace is not None:
            self._grace.cancel()
        for call in self._calls:
            call.cancel()
        while left := [*self._calls, *self._inside]:
            await asyncio.wait(left)

    def transcript(self, verdict: Mapping[str, Any] | None = None) -> Transcript:
        """Return the token record of an episode that has ended.

        Args:
            verdict: what its environment says, told where there is nothing else to tell.

        Raises:
            Failure: the system failed it, or its agent never had an answer, so there is nothing to grade.
        """
        if self._failure is not None:
            raise self._failure
        if not self._branches.empty:
            return self._branches.transcript()
        if self._branches.limit is StopReason.CONTEXT:
            cause = "the agent's first call does not fit into the model's context: no turn fits"
            raise Failure(FailureKind.INVALID_TASK, Boundary.TASK, cause)
        said = msgspec.json.encode(verdict or {}, enc_hook=str).decode()
        cause = (
            "the agent ended without an answer of the policy: look whether it started, and called its base_url; its "
            f"environment says {said if len(said) <= VERDICT_CHARS else '...' + said[-VERDICT_CHARS:]}"
        )
        raise Failure(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, cause)

    @property
    def stop(self) -> StopReason:
        """Why it took no further turn: the limit that its last calls met, if they met one."""
        return self._branches.limit or StopReason.DONE

    @property
    def outcome(self) -> dict[str, Any] | None:
        """What was posted; none if nothing was."""
        return self._outcome

    def settle(self, *, recorded: bool) -> None:
        """Say whether the rollout is in the log, once that is known; only the first word counts."""
        if not self._settled.done():
            self._settled.set_result(recorded)

    # One call.

    async def _complete(self, call: ChatCall) -> Answer:
        asked = self._by_itself(partial(self._branches.ask, call, self._clock.now_ms()))
        try:
            return await self._answer(await _result_of(asked))
        except Failure as failure:
            self._fail(failure)
            raise unavailable(failure) from failure
        except LimitReached as reached:
            if reached.limit in OF_EPISODE and self._grace is None:
                self._grace = asyncio.create_task(self._end_soon())
            raise
        finally:
            self._spawn(self._let_go(asked))

    async def _let_go(self, asked: asyncio.Task[Ask | ApiError]) -> None:
        """Forget a call that was asked for, unless it is recorded: in its turn, for its answer may just be taken."""
        await asyncio.wait({asked})
        if asked.cancelled() or asked.exception() is not None or isinstance(ask := asked.result(), ApiError):
            return
        async with self._alone:
            self._branches.give_up(ask.number)

    async def _answer(self, ask: Ask) -> Answer:
        task = self._episode.task
        request = request_of(task, self._renderer, turn=ask.number, seed=ask.seed, max_tokens=ask.max_tokens)
        with boundary(Boundary.POLICY, FailureKind.ENGINE):
            sampled = await self._policy.generate(ask.prompt, request, need_of(task))
        self.backends[sampled.address] = None
        take = partial(self._branches.take, ask, sampled.generation, sampled.engine, self._clock.now_ms())
        return await _result_of(self._by_itself(take))

    def _by_itself(self, work: Callable[[], T]) -> asyncio.Task[T | ApiError]:
        """Do something with the branches while nobody else does, to its end whatever becomes of the caller."""

        def guarded() -> T | ApiError:
            with boundary(Boundary.TRANSCRIPT, FailureKind.HANDLER):
                try:
                    return work()
                except ApiError as error:
                    return error

        async def alone() -> T | ApiError:
            async with self._alone:
                return await asyncio.to_thread(guarded)

        return self._spawn(alone())

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._inside.add(task)
        task.add_done_callback(self._came_out)
        return task

    def _came_out(self, task: asyncio.Task[Any]) -> None:
        self._inside.discard(task)
        # If the caller has gone nobody else hears of it, and a record that broke is of no use all the same.
        if not task.cancelled() and isinstance(error := task.exception(), Failure):
            self._fail(error)

    def _fail(self, failure: Failure) -> None:
        if self._over.is_set():
            return  # nobody waits for that call, and what is recorded is whole without it
        log.info("%s: failed by a call of its agent: %s", self._episode.task.id, failure)
        self._failure = failure
        self._over.set()

    async def _end_soon(self) -> None:
        await self._clock.sleep(GRACE_S)
        self._grace = None
        if self._branches.exhausted:  # a call that was given up may have made room for another one
            self._over.set()


async def _result_of(work: asyncio.Task[T | ApiError]) -> T:
    """Wait for what was begun, and leave it going on if the caller is cancelled. Raises what it raised."""
    done = await asyncio.shield(work)
    if isinstance(done, ApiError):
        raise done
    return done


def _cancelled_from_outside() -> bool:
    """Tell whether the present task itself is being cancelled, and not only what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
