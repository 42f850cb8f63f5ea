"""A log of suites that were played, and of the trainers that had them played, without any pipeline."""

from __future__ import annotations

import msgspec

from infra.clock import SystemClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.control import RunManifest
from schemas.decisions import Evaluated, TrainerStarted, VersionPublished
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Completed, Failed, FailureKind
from schemas.scores import Purpose
from schemas.topics import CONTROL, DECISIONS, TABLE, TRAJECTORIES
from tests.golden.samples import TRANSCRIPT
from tests.logs import make_task
from trainer.evaluation import Played, scores

CLOCK = SystemClock()
FAILED = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="made up")


def graded(success, *, version=5):
    """Return outcome and token record of a sample of one version."""
    spans = tuple(msgspec.structs.replace(span, version=version) for span in TRANSCRIPT.spans)
    done = Completed(components={}, reward=success, success=success, truncated=False)
    return done, msgspec.structs.replace(TRANSCRIPT, spans=spans)


class SuiteLog:
    """A log into which a test plays suites, and writes them down as a trainer does."""

    def __init__(self):
        self.bus = MemoryBus()
        self.publisher = Publisher(self.bus, CLOCK, "test")

    async def begin(self):
        """Create the topics."""
        await self.bus.create_topics(TABLE)

    async def play(self, run, ends, *, samples=1, seed=3, version=5, **manifest):
        """End samples: (row, sample) -> success, or outcome and token record, or a failure."""
        await self.publisher.publish(CONTROL, RunManifest(run=run, seed=seed, samples=samples, **manifest))
        for (row, sample), end in ends.items():
            ended = graded(end, version=version) if isinstance(end, float) else end
            await self.end(run, row, sample, ended, samples=samples, seed=seed)

    async def end(self, run, row, sample, end, *, samples=1, seed=3, visit=0):
        """End one sample."""
        task = make_task(
            run=run, group=f"{run}-{row}-{visit}", sample=sample, samples=samples, row=row, seed=seed * 100 + row
        )
        task = msgspec.structs.replace(task, visit=visit, payload_digest=f"d{row}")
        outcome, transcript = end if isinstance(end, tuple) else (end, None)
        made = Trajectory(task=task, outcome=outcome, transcript=transcript, stage="eval")
        await self.publisher.publish(TRAJECTORIES, made)

    async def announce(self, run, step, version):
        """Announce a version of a run as its trainer does; return the trainer's epoch."""
        epoch = (await self.publisher.publish(DECISIONS, TrainerStarted(run=run, config={}, start=0, step=0))).offset
        made = VersionPublished(run=run, epoch=epoch, step=step, version=version, digest="d")
        await self.publisher.publish(DECISIONS, made)
        return epoch

    async def write_down(self, run, step, version, suite, *, tasks, solved=0):
        """Announce a version and write its evaluation down."""
        epoch = await self.announce(run, step, version)
        found = scores(suite, [Played(task=f"t{n}", success=float(n < solved)) for n in range(tasks)])
        made = Evaluated(run=run, epoch=epoch, step=step, version=version, purpose=Purpose.EVALUATION, scores=found)
        await self.publisher.publish(DECISIONS, made)
