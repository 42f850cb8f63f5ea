"""How many bytes one sample leaves in each topic: made-up messages, published by the real codec to a log in memory.

Ids follow Zipf's law, log-probs are exponential, observations have none, as in a transcript; what zstd makes of them
is what it makes of a run's records, within some per cent. A value that no record holds is counted with its blob. Keys
and headers are counted, the broker's own framing and its copies are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from infra.bus import Record, TopicPartition
from infra.claims import carried_bytes, claimed
from infra.clock import SystemClock
from infra.inference.base import PROCESSED_LOGPROBS
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas import transcript
from schemas.decisions import Decision, DropReason, GroupDropped, Member, SampleRef, StepDecided, VersionPublished
from schemas.identity import group_id, payload_digest
from schemas.message import Message
from schemas.messages import Episode, Rollout, Task, Trajectory
from schemas.outcome import Completed, StopReason
from schemas.telemetry import EventKind, StageEvent, StageEvents
from schemas.topics import DECISIONS, EPISODES, EVENTS, ROLLOUTS, TABLE, TASKS, TRAJECTORIES, Topic
from schemas.transcript import SampledSpan, Transcript, Turn, pack_logprobs, pack_tokens

M = TypeVar("M", bound=Message)

NOW_MS = 1_767_225_600_000
"""A time like any other."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSize:
    """What a sample's records hold."""

    turns: int
    """Turns."""
    prompt: int
    """Tokens before the first turn."""
    sampled: int
    """Sampled tokens of a turn."""
    observed: int
    """Tokens of an observation."""
    vocabulary: int
    """Token ids."""
    payload: int
    """Bytes of the payload."""


async def sample_bytes(size: EpisodeSize) -> dict[str, int]:
    """Return topic -> bytes of one completed sample."""
    task = _task(size)
    record = make_transcript(size)
    verdict = {"success": True, "steps": size.turns}
    text = " ".join(f"{token:x}" for token in _ids(size.prompt, size.vocabulary))
    episode = Episode(
        task=task, host="http://host:8010", lease=f"{task.group}-0-0", messages=({"role": "user", "content": text},)
    )
    shared: dict[str, Any] = {"task": task, "transcript": record, "verdict": verdict, "stop": StopReason.DONE}
    digest = "0" * 64
    rollout = Rollout(**shared, backend="http://host:8000", worker="run-0@host", tokenizer_digest=digest)
    done = Completed(components={"outcome": 1.0, "format": 0.1}, reward=1.1, success=1.0, truncated=False)
    trajectory = Trajectory(**shared, outcome=done, backend="http://host:8000", tokenizer_digest=digest, stage="eval")
    scale = await _Scale.ready()
    await scale.publish(TASKS, task)
    await scale.publish(EPISODES, episode)
    await scale.publish(ROLLOUTS, rollout)
    await scale.publish(TRAJECTORIES, trajectory)
    await scale.publish(EVENTS, _events(task))
    return scale.bytes


async def step_bytes(groups: int, samples: int, *, dropped: int, buffered: int) -> int:
    """Return the bytes in `decisions` of one trainer step.

    Args:
        groups: groups of the step.
        samples: siblings of a group.
        dropped: groups that are dropped on the way to it.
        buffered: complete groups that wait meanwhile.
    """

    def refs(first: int, count: int) -> tuple[SampleRef, ...]:
        return tuple(
            SampleRef(group=_group(group), sample=sample, offset=1_000_000 + group * samples + sample)
            for group in range(first, first + count)
            for sample in range(samples)
        )

    members = tuple(
        Member(group=ref.group, sample=ref.sample, offset=ref.offset, content=_hex(ref.offset), reward=0.5)
        for ref in refs(0, groups)
    )
    step = StepDecided(
        run="run",
        epoch=1,
        step=100,
        position=2_000_000,
        members=members,
        digest=_hex(1),
        advantage_digest=_hex(2),
        buffered=refs(groups, buffered),
    )
    drops = [
        GroupDropped(
            run="run",
            epoch=1,
            position=2_000_000,
            group=_group(group),
            reason=DropReason.NO_VARIANCE,
            members=refs(group, 1),
        )
        for group in range(dropped)
    ]
    version = VersionPublished(run="run", epoch=1, step=100, version=100, digest=_hex(3))
    decisions: list[Decision] = [step, *drops, version]
    scale = await _Scale.ready()
    for decision in decisions:
        await scale.publish(DECISIONS, decision)
    return sum(scale.bytes.values())


def make_transcript(size: EpisodeSize) -> Transcript:
    """Return a valid transcript of that size."""
    random = np.random.default_rng(0)
    turn = [True] * size.sampled + [False] * size.observed
    mask = np.array([False] * size.prompt + turn * size.turns, dtype=bool)
    starts = [size.prompt + number * len(turn) for number in range(size.turns)]
    spans = tuple(
        SampledSpan(
            start=start,
            stop=start + size.sampled,
            version=1,
            sampling=transcript.Sampling(),
            dtype="bfloat16",
            logprobs_mode=PROCESSED_LOGPROBS,
        )
        for start in starts
    )
    made = Transcript(
        tokens=pack_tokens(_ids(len(mask), size.vocabulary)),
        mask=mask.astype(np.uint8).tobytes(),
        logprobs=pack_logprobs(np.where(mask, -random.exponential(0.5, len(mask)), 0.0)),
        spans=spans,
        turns=tuple(_turn(number, start, size) for number, start in enumerate(starts)),
    )
    transcript.check(made)
    return made


def _turn(number: int, sampled: int, size: EpisodeSize) -> Turn:
    began_ms = NOW_MS + 2000 * number
    return Turn(
        start=0 if number == 0 else sampled - size.observed,
        sampled=sampled,
        stop=sampled + size.sampled,
        valid=True,
        action=" ".join(f"{token:x}" for token in _ids(8, size.vocabulary, seed=number)),
        finish="stop",
        began_ms=began_ms,
        generated_ms=began_ms + 1234,
        ended_ms=began_ms + 1777,
    )


def _ids(count: int, vocabulary: int, *, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return token ids whose frequency is inverse to their rank."""
    ranks = np.exp(np.random.default_rng(seed).uniform(0, np.log(vocabulary), count)).astype(np.int64) - 1
    # A tokenizer's ids are not sorted by frequency.
    return np.random.default_rng(1).permutation(vocabulary)[np.clip(ranks, 0, vocabulary - 1)]


def _task(size: EpisodeSize) -> Task:
    payload = {"index": 1, "text": np.random.default_rng(2).bytes(size.payload // 2).hex()}
    return Task(
        run="run",
        group=_group(0),
        sample=0,
        samples=8,
        source="tasks.jsonl",
        payload=payload,
        payload_digest=payload_digest(payload),
        family="family",
        seed=1 << 62,
        admission=100,
        start_by_ms=NOW_MS,
    )


def _events(task: Task) -> StageEvents:
    """Return what the three stages say of a sample that nothing happens to."""
    events = [
        StageEvent(
            run=task.run,
            group=task.group,
            sample=task.sample,
            attempt=0,
            stage=stage,
            kind=kind,
            at_ms=NOW_MS,
            took_ms=1000,
            waited_ms=1000,
        )
        for stage in ("init", "run", "eval")
        for kind in (EventKind.STARTED, EventKind.FINISHED)
    ]
    return StageEvents(worker="run-0@host", events=tuple(events))


def _group(number: int) -> str:
    return group_id("run", "tasks.jsonl", 0, number, {})


def _hex(number: int) -> str:
    return np.random.default_rng(number).bytes(32).hex()


class _Scale:
    """A log in memory that weighs what is published to it."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self._publisher = Publisher(bus, SystemClock(), "run-0@host")
        self.bytes: dict[str, int] = {}
        """Topic -> bytes of its records."""

    @classmethod
    async def ready(cls) -> _Scale:
        """Return an empty one."""
        bus = MemoryBus()
        await bus.create_topics(TABLE)
        return cls(bus)

    async def publish(self, topic: Topic[M], message: M) -> None:
        """Publish a message and add its record's bytes."""
        # Batched events have no key of their own: their sender names the partition.
        place = await self._publisher.publish(topic, message, partition=0)
        reader = await self._bus.read({TopicPartition(topic.name, 0): place.offset})
        try:
            (record,) = await reader.poll(1, 1.0)
        finally:
            await reader.close()
        self.bytes[topic.name] = self.bytes.get(topic.name, 0) + _bytes_of(record)


def _bytes_of(record: Record) -> int:
    beside = len(record.key or b"") + sum(len(name) + len(value) for name, value in record.headers)
    ticket = len(record.value or b"") if claimed(record) is not None else 0
    return carried_bytes(record) + ticket + beside
