"""Episode -> Rollout: claims the environment and drives the turns between it and the policy.

Order at the end: the verdict is taken into the Rollout, the Rollout is published and acknowledged, the lease is
closed, the input is committed. A claim of a closed lease means that a Rollout of this attempt is in the log already, or
that the sample was cancelled (its terminal record is the cancel middleware's or the reaper's): there is nothing to do.
A claim of an environment that was stepped before resets it, so a rollout never mixes the actions of two workers. For
the same reason an episode whose host did not answer a step can be driven again from its start: that is done here, in
the same attempt, while the claim is still this worker's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

from infra.clock import Clock
from infra.envhost.client import EnvHostClient, EnvHosts, HostAway
from infra.envhost.heartbeat import heartbeat
from infra.envhost.lease import Fenced
from infra.envhost.protocol import Claimed, Closed
from infra.errors import ConfigError, Failure, boundary
from infra.inference.base import ModelInfo
from infra.inference.pool import PolicyPool, Sampled
from infra.stage import Done
from schemas import transcript
from schemas.messages import Episode, Rollout
from schemas.outcome import Boundary, FailureKind, StopReason
from schemas.transcript import Transcript
from stages.handlers.base import Action, Handler, Invalid, is_harness
from stages.handlers.registry import handler
from stages.run.episode import Act, Ask, EpisodeMachine, Stop
from stages.run.harness import play, with_outcome
from stages.run.proxy import Proxy
from stages.run.render import Renderer
from stages.run.turn_request import need_of, request_of

log = logging.getLogger(__name__)

MAX_CLAIMS = 3
"""An episode whose host does not answer is begun this often in one attempt."""

FENCED_S = 60.0
"""A worker whose claim was replaced waits so long to be told that the record is another's, seconds: longer than any
group takes to notice that a member is gone."""


class RunStage:
    """Drives episodes with one policy."""

    def __init__(
        self,
        *,
        hosts: EnvHosts,
        policy: PolicyPool,
        renderer: Renderer,
        clock: Clock,
        worker: str,
        proxy: Proxy | None = None,
    ) -> None:
        """Build the stage.

        Args:
            hosts: the environment hosts.
            policy: the engines.
            renderer: tokenizer and template of the engines' model.
            clock: time.
            worker: this worker's name.
            proxy: answers agents that drive themselves; without it episodes of theirs fail.
        """
        self._proxy = proxy
        self._hosts = hosts
        self._policy = policy
        self._renderer = renderer
        self._clock = clock
        self._worker = worker

    async def handle(self, episode: Episode) -> Done[Rollout] | None:
        """Run an episode to its end. Raises Failure."""
        family = handler(episode.task.family)
        host = self._hosts.at(episode.host)
        try:
            engine = await self._policy.info(need_of(episode.task))
        except Failure:
            await self._let_go(episode, host)
            raise
        try:
            return await self._claim_and_run(episode, family, engine, host)
        except Fenced as fenced:
            await self._give_up(episode, fenced)

    async def _let_go(self, episode: Episode, host: EnvHostClient) -> None:
        """Let an environment end that this attempt will not use: the next one has its own.

        It is claimed, and the claim runs out within a minute; unclaimed it would keep its place until the sample's last
        deadline. To close it at once would be too early: should the record come again before the next attempt is in the
        log, its environment must still be there.
        """
        try:
            await host.claim(episode.lease)
        except Failure as failure:
            log.info("%s: its environment ends by its deadline: %s", episode.task.id, failure)

    async def _give_up(self, episode: Episode, fenced: Fenced) -> NoReturn:
        """Leave an episode to the worker that claimed it; raises Failure if that one had no right to."""
        # Mostly the record is that worker's by now: this job is cancelled as soon as the group says so. If it never
        # is, the claim came from a worker that had been stopped and woke up without the record. It may die before it
        # publishes anything, and then nobody would be given the record again: so it is tried anew.
        log.info("%s: given up unless it stays ours for %g s: %s", episode.task.id, FENCED_S, fenced)
        await self._clock.sleep(FENCED_S)
        raise Failure(
            FailureKind.ENVIRONMENT_LOST,
            Boundary.ENVIRONMENT,
            f"{fenced}; {FENCED_S:g} s later the record is still this worker's, so another one claimed it out of turn",
        ) from fenced

    async def _claim_and_run(
        self, episode: Episode, family: Handler, engine: ModelInfo, host: EnvHostClient
    ) -> Done[Rollout] | None:
        for claims in itertools.count(1):
            claim = await host.claim(episode.lease)
            if isinstance(claim, Closed):
                return None
            try:
                return await self._run(episode, family, engine, host, claim)
            except HostAway as away:
                if claims == MAX_CLAIMS:
                    raise
                log.info("%s: begun again once its host is back: %s", episode.task.id, away)
                # A claim fences whoever holds the lease. That must not be the worker that was given this record after
                # we had lost it: as long as the old claim is valid there is none.
                await host.renew(claim.lease, claim.token)
        raise AssertionError("the loop ends by itself")

    async def withdraw(self, episode: Episode) -> None:
        """Close the environment of a sample that was cancelled, stepped or not."""
        try:
            host = self._hosts.at(episode.host)
        except ConfigError as error:
            log.warning("%s: nothing to close for it: %s", episode.task.id, error)
            return
        await host.withdraw(episode.lease)

    async def _run(
        self, episode: Episode, family: Handler, engine: ModelInfo, host: EnvHostClient, claim: Claimed
    ) -> Done[Rollout]:
        if is_harness(family):
            return await self._let_play(episode, engine, host, claim)
        async with heartbeat(host, claim.lease, claim.token, clock=self._clock):
            machine = EpisodeMachine(
                episode, self._renderer, engine, _guarded(family), invalid_ends=family.invalid_ends
            )
            backends: dict[str, None] = {}
            stop = await self._drive(episode, machine, host, claim, backends)
            verdict = await host.verdict(claim.lease, claim.token)
        rollout = self._rollout(episode, machine.transcript(), stop, verdict, backends)

        async def close() -> None:
            await host.close(claim.lease, claim.token)

        return Done(rollout, close)

    async def _let_play(
        self, episode: Episode, engine: ModelInfo, host: EnvHostClient, claim: Claimed
    ) -> Done[Rollout]:
        """Run an episode whose agent drives itself."""
        if self._proxy is None:
            cause = f"family {episode.task.family!r} is a harness, and this worker has no proxy for its agents"
            raise Failure(FailureKind.INVALID_TASK, Boundary.TASK, cause)
        with ExitStack() as unrecorded:
            async with heartbeat(host, claim.lease, claim.token, clock=self._clock):
                async with self._proxy.opened(episode, engine) as (opened, address):
                    unrecorded.callback(opened.settle, recorded=False)
                    await play(opened, address, host, claim)
                verdict = with_outcome(await host.verdict(claim.lease, claim.token), opened.outcome)
                record = opened.transcript(verdict)
            rollout = self._rollout(episode, record, opened.stop, verdict, opened.backends)
            unrecorded.pop_all()

        async def close() -> None:
            opened.settle(recorded=True)
            await host.close(claim.lease, claim.token)

        return Done(rollout, close)

    async def _drive(
        self,
        episode: Episode,
        machine: EpisodeMachine,
        host: EnvHostClient,
        claim: Claimed,
        backends: dict[str, None],
    ) -> StopReason:
        """Carry out the machine's moves until it stops; its horizon bounds the loop.

        The addresses of the engines that answered go into `backends`, in order. The machine tokenises and calls the
        family's code, which may be anybody's: never on the event loop.
        """
        move = await asyncio.to_thread(machine.start, self._clock.now_ms())
        while True:
            match move:
                case Ask():
                    answer = await self._generate(episode, machine, move)
                    backends[answer.address] = None
                    taken = partial(machine.generated, answer.generation, answer.engine)
                    move = await asyncio.to_thread(taken, self._clock.now_ms())
                case Act(action):
                    result = await host.step(claim.lease, claim.token, _wire(action))
                    observed = partial(machine.observed, action, result.observation, done=result.done)
                    move = await asyncio.to_thread(observed, self._clock.now_ms())
                case Stop(reason):
                    return reason

    async def _generate(self, episode: Episode, machine: EpisodeMachine, ask: Ask) -> Sampled:
        request = request_of(episode.task, self._renderer, turn=machine.turn, seed=ask.seed, max_tokens=ask.max_tokens)
        return await self._policy.generate(machine.prompt, request, need_of(episode.task))

    def _rollout(
        self,
        episode: Episode,
        record: Transcript,
        stop: StopReason,
        verdict: dict[str, object],
        backends: Iterable[str],
    ) -> Rollout:
        with boundary(Boundary.TRANSCRIPT, FailureKind.ENGINE):
            transcript.check(record)
        return Rollout(
            task=episode.task,
            transcript=record,
            verdict=verdict,
            stop=stop,
            backend=" ".join(backends),
            worker=self._worker,
            tokenizer_digest=self._renderer.digest,
        )


def _guarded(family: Handler) -> Callable[[str], Action | Invalid]:
    def act(text: str) -> Action | Invalid:
        with boundary(Boundary.HANDLER_ACT, FailureKind.HANDLER):
            return family.act(text)

    return act


def _wire(action: Action) -> dict[str, object]:
    return {"name": action.name, "arguments": action.arguments, "text": action.text}
