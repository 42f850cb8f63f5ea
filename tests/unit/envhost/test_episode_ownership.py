"""What decides that the right thing is trained: an outcome is graded from the episode that earned it.

A model of INIT and RUN works against a real host while everything that can happen happens: crashes before and after
each publication, redeliveries, several workers on one Episode, zombies that go on after a takeover, leases that run
out, a host that restarts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from infra.clock import VirtualClock
from infra.envhost.host import EnvHost, HostLimits
from infra.envhost.lease import Fenced
from infra.envhost.protocol import Claimed, Closed, Create
from infra.envhost.scripted import FastScriptedEnvironment, ScriptedEnvironment, ScriptedFactory
from infra.errors import Failure
from schemas.outcome import FailureKind

SAMPLES = 3
LIFE_S = 3600.0

CALM_CLAIMS = 6
"""A host lives for more claims than this, or nothing would ever get far."""


@dataclass
class Worker:
    """A RUN worker between claim and close, or a zombie of one."""

    lease: str
    token: int
    number: int
    actions: list[str] = field(default_factory=list)
    verdict: dict | None = None


@dataclass(frozen=True)
class Output:
    """A Rollout in the log."""

    lease: str
    worker: int
    actions: tuple[str, ...]
    verdict: dict = field(hash=False)


class Ownership(RuleBasedStateMachine):
    """Hypothesis chooses who does what next; a worker that is never chosen again has crashed."""

    kind: type[ScriptedEnvironment] = FastScriptedEnvironment
    episodes = Bundle("episodes")
    workers = Bundle("workers")

    @initialize(target=episodes)
    def start(self):
        self.runner = asyncio.Runner()
        self.clock = VirtualClock()
        self.factory = ScriptedFactory(self.kind)
        self.reap_at_ms = self.clock.now_ms() + int(LIFE_S * 1000)
        self.hosts = 0
        self.numbers = 0
        self.outputs: list[Output] = []
        self.closed: set[str] = set()
        """Leases of the running host that answered a close, each after an output."""
        self.latest: dict[str, int] = {}
        """Lease -> number of the worker whose claim is the valid one."""
        self._start_host()
        # The log holds an Episode of each sample already, so that few rules are spent on the way to where it matters.
        return multiple(*(self.create(sample, 0).lease for sample in range(SAMPLES)))

    def _start_host(self) -> None:
        self.calm = 0
        self.hosts += 1
        limits = HostLimits(capacity=50, threads=2)
        self.host = EnvHost(self.factory, clock=self.clock, limits=limits, instance=f"host{self.hosts}")

    def run(self, work):
        """Run a call; return its result, or the error if it is one that the stages know."""

        async def attempt():
            try:
                return await work
            except (Failure, Fenced) as error:
                return error

        return self.runner.run(attempt())

    def create(self, sample: int, attempt: int):
        """Ask for a sample's environment; its seed is the sample, its payload carries nothing."""
        request = Create(
            run="run",
            group="group",
            sample=sample,
            attempt=attempt,
            family="scripted",
            payload={},
            seed=sample,
            reap_at_ms=self.reap_at_ms,
        )
        return self.run(self.host.create(request))

    # -- INIT -------------------------------------------------------------------------------------------------------

    @rule(
        target=episodes,
        sample=st.integers(0, SAMPLES - 1),
        attempt=st.integers(0, 1),
        lives=st.sampled_from(["to the end", "to the publication", "to the creation"]),
    )
    def init_handles_a_task(self, sample, attempt, lives):
        """A task is delivered, for the first time or again; the worker may crash before or after its publication."""
        answer = self.create(sample, attempt)
        if isinstance(answer, Closed):
            assert answer.lease in self.closed
            return multiple()
        assert answer.observation == f"start {sample}"
        assert answer.lease not in self.closed
        if lives == "to the creation":
            return multiple()
        if lives == "to the end":
            self.run(self.host.ready(answer.lease))
        return answer.lease

    # -- RUN --------------------------------------------------------------------------------------------------------

    @rule(target=workers, lease=episodes, turns=st.integers(0, 3))
    def run_claims(self, lease, turns):
        """An Episode is delivered: the first time, again after a crash, or to a second worker, who takes some turns."""
        self.calm += 1
        answer = self.run(self.host.claim(lease))
        if isinstance(answer, Closed):
            assert any(output.lease == lease for output in self.outputs)
            return multiple()
        if isinstance(answer, Failure):
            assert answer.kind is FailureKind.ENVIRONMENT_LOST
            return multiple()
        assert isinstance(answer, Claimed)
        assert lease not in self.closed
        self.numbers += 1
        self.latest[lease] = self.numbers
        worker = Worker(lease, answer.token, self.numbers)
        for _ in range(turns):
            self._step(worker)
        return worker

    @rule(worker=workers)
    def run_steps(self, worker):
        """One turn; a zombie's is refused, and only the sequence of one claim is counted."""
        self._step(worker)

    def _step(self, worker):
        action = f"{worker.number}.{len(worker.actions)}"
        answer = self.run(self.host.step(worker.lease, worker.token, {"text": action}))
        if self._refused(worker, answer):
            return
        worker.actions.append(action)
        assert answer.observation == f"{len(worker.actions)}"

    @rule(worker=workers)
    def run_takes_the_verdict(self, worker):
        """The last call before the publication, which a zombie may make much later."""
        self._judge(worker)

    def _judge(self, worker):
        answer = self.run(self.host.verdict(worker.lease, worker.token))
        if not self._refused(worker, answer):
            worker.verdict = answer
            assert answer["actions"] == worker.actions

    def _refused(self, worker, answer) -> bool:
        if isinstance(answer, Failure):
            assert answer.kind is FailureKind.ENVIRONMENT_LOST
            return True
        if isinstance(answer, Fenced):
            assert self.latest[worker.lease] != worker.number or worker.lease in self.closed
            return True
        assert self.latest[worker.lease] == worker.number, "a zombie was let in"
        assert worker.lease not in self.closed, "a closed lease was used"
        return False

    @rule(worker=workers)
    def run_sends_a_heartbeat(self, worker):
        """Nobody else's claim is kept alive by it."""
        self._refused(worker, self.run(self.host.renew(worker.lease, worker.token)))

    @rule(worker=workers)
    def run_publishes_and_crashes(self, worker):
        """The Rollout is in the log, the lease stays open, the Episode comes again."""
        self._publish(worker)

    @rule(worker=workers)
    def run_publishes_and_closes(self, worker):
        """The regular end, or a zombie's idea of it."""
        if self._publish(worker) and self.run(self.host.close(worker.lease, worker.token)) is None:
            assert self.latest[worker.lease] == worker.number
            self.closed.add(worker.lease)

    def _publish(self, worker) -> bool:
        """Publish what the worker has, also a zombie's verdict: nobody prevents it."""
        if worker.verdict is None:
            self._judge(worker)
        if worker.verdict is None:
            return False
        actions = tuple(worker.verdict["actions"])
        self.outputs.append(Output(worker.lease, worker.number, actions, worker.verdict))
        return True

    # -- the world --------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 10.0, 30.0]), reap=st.booleans())
    def time_passes(self, seconds, reap):
        """Leases run out whether or not the host has looked."""
        self.runner.run(self.clock.advance(seconds))
        if reap:
            self.runner.run(self._reap())

    async def _reap(self) -> None:
        self.host.reap()

    @precondition(lambda self: self.calm > CALM_CLAIMS)
    @rule()
    def host_restarts(self):
        """Every lease is lost, those closed included."""
        self.runner.run(self.host.stop())
        self.closed.clear()
        self._start_host()

    @invariant()
    def every_output_is_graded_from_the_episode_that_earned_it(self):
        """The verdict's actions are those of the worker that carries it, all of one claim and in order."""
        for output in getattr(self, "outputs", ()):
            expected = [f"{output.worker}.{number}" for number in range(len(output.actions))]
            assert list(output.actions) == expected

    def teardown(self):
        """Whatever happened, a redelivery of each task still leads to an output; then nothing stays open."""
        for sample in range(SAMPLES):
            self._finish(sample)
        self.runner.run(self.host.stop())
        assert self.host.counts().environments == 0
        assert all(environment.closes == 1 for environment in self.factory.built)
        self.runner.close()

    def _finish(self, sample: int) -> None:
        for attempt in (0, 1):
            answer = self.create(sample, attempt)
            if isinstance(answer, Closed):
                continue
            claim = self.run(self.host.claim(answer.lease))
            assert isinstance(claim, Claimed)
            self.run(self.host.step(answer.lease, claim.token, {"text": "last"}))
            assert self.run(self.host.verdict(answer.lease, claim.token))["actions"] == ["last"]
            assert self.run(self.host.close(answer.lease, claim.token)) is None
            assert self.create(sample, attempt) == Closed(lease=answer.lease)


class OwnershipInThreads(Ownership):
    """The same for environments that run in threads."""

    kind = ScriptedEnvironment


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestOwnershipInThreads = OwnershipInThreads.TestCase
TestOwnershipInThreads.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
