"""What fails is tried again by its kind, what is given up is kept, and bad input has one outcome and stops nobody."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from infra.dead_letter import DeadLetter
from infra.errors import Failure
from infra.inference.base import BadReply
from infra.memory import MemoryBus
from infra.stage import Member
from infra.wire import Publisher, unpack
from infra.worker import Limits
from producers.redrive import Redrive
from rollmill.graveyard import Wanted, letters
from schemas import codec
from schemas.control import Cursor
from schemas.messages import Episode, Rollout
from schemas.outcome import Boundary, Completed, Failed, FailureKind, StopReason
from schemas.retries import RETRIES
from schemas.topics import (
    DEAD,
    EPISODES,
    EVAL_RETRY_5S,
    EVAL_RETRY_30S,
    INIT_RETRY_5S,
    ROLLOUTS,
    TABLE,
    TASKS,
    TRAJECTORIES,
)
from schemas.transcript import Sampling
from stages.eval.stage import grade
from stages.handlers.keydoor import WORDS
from stages.run.render import Renderer
from stages.wiring import eval_stage
from tests import toys
from tests.fast_clock import FastClock
from tests.golden.samples import SAMPLES
from tests.logs import make_task, read_all, wait_until
from tests.model_directory import word_model
from tests.pipeline.test_pipeline import failures, hunted, rulings, working, world_of

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(word_model(tmp_path_factory.mktemp("model"), (*WORDS, *toys.WORDS)))


class SkewedClock:
    """A worker's clock whose wall clock is wrong."""

    def __init__(self, clock, off_ms):
        self._clock, self._off_ms = clock, off_ms
        self.monotonic, self.sleep = clock.monotonic, clock.sleep

    def now_ms(self):
        """Return the wrong time."""
        return self._clock.now_ms() + self._off_ms


async def messages(bus, topic):
    return [(await unpack(topic, record)).message for record in await read_all(bus, topic)]


async def dead(bus):
    return [DeadLetter(record) for record in await read_all(bus, DEAD)]


async def test_one_crash_in_64_costs_one_attempt_of_one_sample(renderer):
    """63 results are kept as they are, and one sample is made again."""

    def crash():
        raise BadReply("3 ids came with 2 log-probs")

    # Slow enough that no lease runs out on a busy machine, which would cost an attempt too.
    async with world_of(renderer, clock=FastClock(factor=5)) as world:
        world.policy.at = {100: crash}
        await world.publish(32)
        async with working(world.pipeline()):
            found = await world.ended()

        assert {0: 63, 1: 1} == Counter(one.task.attempt for one in hunted(found))
        assert [1] == [task.attempt for task in await messages(world.bus, INIT_RETRY_5S)]
        assert [] == await dead(world.bus)


async def test_a_sample_whose_attempts_are_used_up_has_one_outcome_and_one_dead_letter(renderer):
    """With the cause, and never a reward; the letter holds the work as it was given up."""
    async with world_of(renderer, garbage=1.0) as world:
        await world.publish(1)
        async with working(world.pipeline()):
            found = await world.ended()
            await wait_until(lambda: ends(world.bus, DEAD), 2)
        found_dead = await dead(world.bus)
        given_up = [await letter.message() for letter in found_dead]

        assert {FailureKind.ENGINE: 2} == failures(found)
        assert [2, 2] == [len(RETRIES[FailureKind.ENGINE])] * 2 == [one.task.attempt for one in found]
        assert {"accepted": 2} == await rulings(world.bus)
        assert {("run", "engine", 3, "episodes")} == {
            (one.death.stage, one.death.kind, one.death.attempts, one.original.topic) for one in found_dead
        }
        assert {one.task.id for one in found} == {episode.task.id for episode in given_up}


async def ends(bus, topic):
    return sum((await bus.end_offsets(topic.name)).values())


def rollout(**changes):
    return Rollout(
        task=make_task(attempt=1, **changes),
        transcript=SAMPLES["rollmill.rollout"].transcript,
        verdict={"opened": True, "steps": 3, "turns": 3, "optimum": 3},
        stop=StopReason.DONE,
        backend="local-0",
        worker="run-3",
        tokenizer_digest="",
    )


@pytest.mark.parametrize(("failing", "ended"), [(2, "completed"), (9, "failed")])
async def test_a_rollout_whose_grading_breaks_is_graded_again_as_it_is(failing, ended):
    """Nothing that was sampled is thrown away, its task keeps its attempt, and gradings are bounded too."""
    clock, graded = FastClock(factor=1000), []
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)

    async def flaky(message):
        graded.append(message)
        if len(graded) <= failing:
            raise Failure(FailureKind.INFRASTRUCTURE, Boundary.HANDLER_GRADE, "no sandbox")
        return await grade(message)

    limits = Limits(poll_s=0.02, commit_every_s=0.02)
    member = Member(eval_stage(flaky), bus, clock, worker="eval-test", limits=limits)
    await Publisher(bus, clock, "test").publish(ROLLOUTS, rollout())
    async with working(member):
        await wait_until(lambda: ends(bus, TRAJECTORIES), 1)
    (trajectory,) = await messages(bus, TRAJECTORIES)
    tries = range(min(failing, len(RETRIES[FailureKind.INFRASTRUCTURE])) + 1)

    assert [msgspec.structs.replace(rollout(), gradings=tried) for tried in tries] == graded
    assert (1, ended) == (trajectory.task.attempt, type(trajectory.outcome).__name__.lower())
    assert [1, 1, 0] == [await ends(bus, topic) for topic in (EVAL_RETRY_5S, EVAL_RETRY_30S, INIT_RETRY_5S)]
    assert (ended == "failed") == (await ends(bus, DEAD) == 1)


async def test_a_redriven_group_is_done_again_beside_the_one_that_was_decided(renderer, tmp_path, monkeypatch):
    """The cause is mended, the letters are redriven, and the old outcomes stay what they were."""
    toys.install(tmp_path, monkeypatch)
    async with world_of(renderer) as world:
        sound = toys.Toy.init
        monkeypatch.setattr(toys.Toy, "init", None)
        await world.publish_toys({})
        async with working(world.pipeline()):
            await world.ended()
            await wait_until(lambda: ends(world.bus, DEAD), 2)
            monkeypatch.setattr(toys.Toy, "init", sound)
            report = await Redrive(world.bus, world.clock).run(letters(world.bus, world.clock, Wanted(run="r")))
            world.samples += 2
            found = await world.ended()
        (group,) = report.groups.values()
        (old,) = {one.task.group for one in found if isinstance(one.outcome, Failed)}
        again = [one.task for one in found if isinstance(one.outcome, Completed)]

        assert ([(old, 2)], 2, 0) == ([(group.redrive_of, group.samples)], report.letters, report.refused)
        assert [(group.group, 0), (group.group, 1)] == sorted((task.group, task.sample) for task in again)
        assert {(1, old, None, 0)} == {(task.visit, task.redrive_of, task.admission, task.attempt) for task in again}
        assert {"failed": 2, "unread": 2} == await world.books()


def raw(**changes):
    return codec.encode(make_task(run="r", group="bad", **changes))


CURSOR = codec.encode(Cursor(run="r", admitted=1))
EPISODE = codec.encode(Episode(task=make_task(run="r", group="bad"), host="", lease="", messages=()))

BAD_INPUT = {
    "bytes that are no msgpack": (b"\xc1", "poison", "not msgpack"),
    "no bytes at all": (b"", "poison", "not msgpack"),
    "msgpack without an envelope": (b"\x93\x01\x02\x03", "poison", "no envelope"),
    "a message of another topic": (CURSOR, "poison", "expected rollmill.task, found 'rollmill.cursor'"),
    "the message of the next stage": (EPISODE, "poison", "expected rollmill.task, found 'rollmill.episode'"),
    "a negative sibling": (raw(sample=-1, samples=4), "poison", "sample is -1"),
    "a sibling too many": (raw(sample=4, samples=4), "poison", "with samples = 4 it is 0 to 3"),
    "an unknown family": (raw(family="chess"), "invalid_task", "unknown family 'chess'"),
    "a temperature below zero": (
        raw(sampling=Sampling(temperature=-1.0)),
        "invalid_task",
        "sampling.temperature is -1.0",
    ),
    "a turn without tokens": (raw(sampling=Sampling(max_tokens=0)), "invalid_task", "sampling.max_tokens is 0"),
    "a digest of another payload": (raw(payload_digest="ab"), "invalid_task", "payload_digest is 'ab'"),
    "a payload that the family refuses": (raw(payload={"size": "large"}), "invalid_task", "size must be an integer"),
    "a start limit in the past": (raw(start_by_ms=1), "expired", "not started by its deadline"),
}
"""What may be written to `tasks` -> the record, how it ends, and what is said about it."""


@pytest.mark.parametrize("name", BAD_INPUT)
async def test_bad_input_has_one_outcome_and_the_stream_goes_on(renderer, name):
    """Poison goes to `dead` alone, an invalid task also ends as failed, a late one as expired; nobody waits for it."""
    value, kind, says = BAD_INPUT[name]
    async with world_of(renderer) as world:
        await world.publish(1)
        await world.bus.publish(TASKS.name, value, partition=0)
        await world.publish(2)
        world.samples = 4 + (kind != "poison")  # the second call published the first group again
        async with working(world.pipeline()):
            found = await world.ended()
            await wait_until(lambda: ends(world.bus, DEAD), int(kind != "expired"))
        told = [one.outcome for one in found if one.task.group == "bad"]
        buried = await dead(world.bus)

        assert 4 == len(hunted(found))
        assert {"poison": [], "expired": ["Expired"]}.get(kind, ["Failed"]) == [type(one).__name__ for one in told]
        kept = [] if kind == "expired" else [(kind, value)]
        assert kept == [(one.death.kind, one.original.value) for one in buried]
        assert all(says in cause for cause in (*(one.cause for one in told), *(one.death.cause for one in buried)))


@pytest.mark.parametrize("topic", [EPISODES, ROLLOUTS, EVAL_RETRY_5S], ids=str)
async def test_poison_in_the_middle_of_any_stream_stops_nobody(renderer, topic):
    """Each stage buries what it cannot read, and says which stage it was."""
    async with world_of(renderer) as world:
        for partition in range(topic.partitions):
            await world.bus.publish(topic.name, b"\xc1", partition=partition)
        await world.publish(4)
        async with working(world.pipeline()):
            found = await world.ended()
            await wait_until(lambda: ends(world.bus, DEAD), topic.partitions)

        assert 8 == len(hunted(found))
        assert {(topic.consumers[0], "poison", topic.name)} == {
            (one.death.stage, one.death.kind, one.original.topic) for one in await dead(world.bus)
        }


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_worker_whose_clock_is_an_hour_off_does_no_harm(renderer, hours):
    """Work that has time is done as ever, since stages measure time inside them without the wall clock."""
    async with world_of(renderer) as world:
        clock, world.clock = world.clock, SkewedClock(world.clock, hours * HOUR_MS)
        pipeline, world.clock = world.pipeline(), clock
        await world.publish(4)
        async with working(pipeline):
            found = await world.ended()

        assert 8 == len(hunted(found))


@pytest.mark.parametrize(("hours", "ends_as"), [(1, "expired"), (-1, "completed")])
async def test_at_worst_a_wrong_clock_moves_a_start_limit(renderer, hours, ends_as):
    """Tasks that may start within half an hour: an hour ahead they expire, unrewarded; an hour behind they run."""
    async with world_of(renderer) as world:
        clock, world.clock = world.clock, SkewedClock(world.clock, hours * HOUR_MS)
        pipeline, world.clock = world.pipeline(), clock
        world.manifest = msgspec.structs.replace(world.manifest, start_within_s=1800.0)
        await world.publish(2)
        async with working(pipeline):
            found = await world.ended()

        assert {ends_as: 4} == Counter(type(one.outcome).__name__.lower() for one in found)
        assert {ends_as == "completed"} == {one.transcript is not None for one in found}


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_wrong_clock_tries_again_at_worst_earlier_and_no_more_often(renderer, hours):
    """Ahead, the delay is lost; behind, it runs from when the record was seen. The limit is counted in the task."""
    async with world_of(renderer, garbage=1.0) as world:
        clock, world.clock = world.clock, SkewedClock(world.clock, hours * HOUR_MS)
        pipeline, world.clock = world.pipeline(), clock
        await world.publish(1)
        async with working(pipeline):
            found = await world.ended()

        assert {FailureKind.ENGINE: 2} == failures(found)
        assert {2} == {one.task.attempt for one in found}
