"""A whole local system as processes, with a policy that follows a script, and what its log says at the end.

The services are those of `rollmill up` with a trainer and its feeder beside them, under the same supervisor; only the
policy is a stand-in, so that what is sampled is a function of task and seed and two runs can be compared token by
token. ClickHouse, sink and board are left out: the books are kept from the log itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from infra import broker
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import Config, StageConfig
from infra.connect import connected
from infra.envhost.local import LocalEnvHost
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.collect import outcomes
from producers.publish import publish_tasks
from rollmill.demo.processes import SESSION_TIMEOUT_S, training_services
from rollmill.ledger import find_trajectories, ledger
from rollmill.services import LocalPlan, local_services, make_plan, without
from rollmill.supervisor import Event, Service, Supervisor
from rollmill.supervisor.instance import race
from schemas.control import RunManifest
from schemas.dispositions import Ledger
from schemas.messages import Task, Trajectory
from schemas.topics import TABLE, TASKS, TRAJECTORIES
from schemas.transcript import Transcript
from stages.handlers.keydoor import WORDS
from stages.handlers.registry import environment
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests.chaos.kill_plan import Kill, carry_out
from tests.chaos.policy_server import wanderer
from tests.logs import read_all
from trainer.decision_log import read_decisions
from trainer.history import History
from trainer.models import Shape, create_wordlevel_model
from trainer.replay import ReplayReport, replay

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
RUN = "chaos"

STEPS, GROUPS, SAMPLES = 6, 4, 4
"""Trainer steps, groups of a step, siblings of a group: the source holds exactly as many tasks."""

IN_FLIGHT = 8
"""Episodes that one RUN worker drives at once: with few of them the run lasts as long as its tokens take."""

RUN_WORKERS = 2
ORACLE_LIMIT_S = 120.0

SHAPE = Shape(hidden=16, layers=1, heads=2, intermediate=32, context=512)
"""A few thousand parameters: what is trained here is nothing but the books."""

RUN_TOML = f"""
run = "{RUN}"
model = "model"
directory = "trained"
[algorithm]
groups = {GROUPS}
samples = {SAMPLES}
filter = "off"
max_lag = 99
epochs = 1
minibatches = 1
horizon = 14
[stop]
max_steps = {STEPS}
[tasks]
family = "keydoor"
payload = {{ size = 4 }}
count = {STEPS * GROUPS}
max_tokens = 8
max_sampled_tokens = 128
"""

Key = tuple[str, int]
"""(group, sample)."""


@dataclass(frozen=True, kw_only=True)
class Books:
    """What the log says about a run that has ended."""

    steps: list[list[Key]]
    """The members of each step."""
    dispatched: dict[Key, Task]
    """The first task of each sample, as it was published."""
    accepted: dict[Key, list[Trajectory]]
    """The outcomes that count; one each, if all is well."""
    terminal: Counter[Key]
    """How many terminal records each sample has, those that do not count included."""
    ledger: Ledger
    """Where everything went."""
    replayed: ReplayReport
    """The recorded steps, made again."""

    @property
    def trained(self) -> Counter[Key]:
        """How often each sample was trained on."""
        return Counter(key for members in self.steps for key in members)

    @property
    def tokens(self) -> dict[Key, bytes]:
        """The token record of each sample that counts."""
        return {key: _transcript(found[0]).tokens for key, found in self.accepted.items()}

    def lengths(self) -> Counter[int]:
        """Return the histogram of the trained transcripts' lengths."""
        return histogram([_transcript(self.accepted[key][0]) for key in self.trained.elements()])


@dataclass
class System:
    """One system in a folder of its own."""

    folder: Path
    token_s: float
    """Time that a sampled token takes, seconds: decides how long the run lasts at least."""
    on_event: Callable[[Event], None] = lambda _: None
    """Told what happens to its services."""

    async def train(self, kills: list[Kill], *, limit_s: float) -> Books:
        """Start everything, train to the end while things are killed, and return what the log says then.

        Args:
            kills: what is killed when, from the moment on at which everything runs.
            limit_s: longest wait for the end of the run after that moment, seconds.
        """
        create_wordlevel_model(self.folder / "model", seed=0, words=WORDS, shape=SHAPE)
        toml = self.folder / "RUN.toml"
        toml.write_text(RUN_TOML)
        await asyncio.to_thread(broker.prepare)
        plan = self._plan()
        local = self._local(plan)
        services = (*local, *training_services(plan, toml, RUN))
        supervisor = Supervisor(
            services, run_dir=plan.run_dir, addresses=plan.addresses, on_event=self.on_event, cwd=ROOT
        )
        async with supervisor:
            plan.write()
            await supervisor.start(*(service.name for service in local))
            await supervisor.start()
            await self._to_the_end(supervisor, kills, limit_s)
            async with connected(plan.config.bus, client="test") as bus:
                return await read_books(bus)

    def _plan(self) -> LocalPlan:
        few = StageConfig(max_in_flight=IN_FLIGHT)
        bus = Config().bus.model_copy(update={"session_timeout_s": SESSION_TIMEOUT_S})
        # A script says nothing to a canary that a trainer would.
        unasked = Config().policy.model_copy(update={"canary_nats": 0})
        base = Config().model_copy(update={"bus": bus, "run": few, "policy": unasked})
        return make_plan(self.folder / "data", base=base, model=self.folder / "model", run_workers=RUN_WORKERS)

    def _local(self, plan: LocalPlan) -> tuple[Service, ...]:
        port, model = str(plan.ports["policy"]), str(self.folder / "model")
        program = ("-m", "tests.chaos.policy_server", "--model", model, "--port", port, "--token-s", str(self.token_s))
        scripted = (sys.executable, *program)
        local = without(local_services(plan), {"clickhouse", "sink", "board"})
        return tuple(replace(one, argv=scripted) if one.name == "policy" else one for one in local)

    async def _to_the_end(self, supervisor: Supervisor, kills: list[Kill], limit_s: float) -> None:
        killing = asyncio.create_task(carry_out(kills, supervisor))
        try:
            won = await race(
                {
                    "trained": supervisor.ended("trainer"),
                    "broken": supervisor.wait(),
                    "late": asyncio.sleep(limit_s),
                }
            )
            assert won == "trained", f"the run has not ended in {limit_s:.0f} s; the logs are in {self.folder}"
            assert killing.done(), "the run ended before all was killed: give it more to do"
            await killing
        finally:
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing


async def read_books(bus: Bus) -> Books:
    """Return what the log says about the run."""
    history = History.of(await read_decisions(bus, CLOCK, RUN))
    dispatched: dict[Key, Task] = {}
    for record in await read_all(bus, TASKS):
        task = (await unpack(TASKS, record, bus)).message
        dispatched.setdefault((task.group, task.sample), task)
    accepted: dict[Key, list[Trajectory]] = {}
    async for one in find_trajectories(bus, CLOCK, RUN):
        accepted.setdefault((one.task.group, one.task.sample), []).append(one)
    terminal: Counter[Key] = Counter()
    for record in await read_all(bus, TRAJECTORIES):
        task = (await unpack(TRAJECTORIES, record, bus)).message.task
        terminal[task.group, task.sample] += 1
    return Books(
        steps=[[(m.group, m.sample) for m in step.members] for step in history.steps.values()],
        dispatched=dispatched,
        accepted=accepted,
        terminal=terminal,
        ledger=await ledger(bus, CLOCK, RUN),
        replayed=await replay(bus, CLOCK, RUN),
    )


async def played(tasks: list[Task], model: Path) -> Counter[int]:
    """Return the lengths of the transcripts that one undisturbed process makes of these tasks, on a log in memory."""
    bus = MemoryBus(CLOCK)
    await bus.create_topics(TABLE)
    async with LocalEnvHost(environment, clock=CLOCK) as host:
        outside = Outside(host=host, policy=wanderer(model), renderer=Renderer(model))
        pipeline = Pipeline(bus, CLOCK, Config(), outside)
        working = asyncio.create_task(pipeline.run())
        try:
            # Nobody brings this policy any weights.
            unpaced = [msgspec.structs.replace(task, min_version=0, weights_of=None) for task in tasks]
            await publish_tasks(Publisher(bus, CLOCK, "test"), unpaced)
            manifest = RunManifest(run=RUN, seed=0, samples=SAMPLES)
            found = await outcomes(bus, CLOCK, manifest, len(tasks), limit_s=ORACLE_LIMIT_S)
        finally:
            pipeline.stop()
            await working
    return histogram([_transcript(one) for one in found])


def histogram(transcripts: list[Transcript]) -> Counter[int]:
    """Return how many transcripts have which length, in tokens."""
    return Counter(len(one.mask) for one in transcripts)


def _transcript(trajectory: Trajectory) -> Transcript:
    assert trajectory.transcript is not None, f"{trajectory.task.id} ended without one: {trajectory.outcome}"
    return trajectory.transcript
