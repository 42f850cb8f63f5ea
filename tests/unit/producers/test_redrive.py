"""Dead letters become groups that do the work again."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import example, given

from infra.bus import Record, TopicPartition
from infra.dead_letter import NOT_STORED, DeadLetter, Death, bury
from infra.wire import Publisher, pack, unpack
from producers import redrive
from producers.publish import publish_tasks
from producers.redrive import MAX_REFUSALS, MAX_SIBLINGS, NotRedrivable, Redrive, siblings, work_of
from schemas import codec
from schemas.control import Cancel, RunManifest
from schemas.identity import group_id
from schemas.limits import RECORD_BYTES
from schemas.messages import MAX_TIME_MS, Episode, Task, Trajectory
from schemas.outcome import Expired
from schemas.topics import CONTROL, DEAD, EPISODES, STAGE_MS, TASKS, TRAJECTORIES
from tests.golden.samples import SAMPLES
from tests.logs import make_task, read_all
from tests.strategies import structs

DEATH = Death(stage="run", cause="policy: gone", kind="engine", attempts=3)


async def buried(bus, value, *, topic="tasks", offset=0, at_ms=None, death=DEATH, headers=()):
    record = Record(topic, offset % 4, offset, bus.clock.now_ms() if at_ms is None else at_ms, None, value, headers)
    await bury(bus, bus.clock, record, death)


async def letters(bus):
    for record in await read_all(bus, DEAD):
        yield DeadLetter(record)


async def redriven(bus, *, again=False):
    return await Redrive(bus, bus.clock).run(letters(bus), again=again)


async def tasks(bus):
    return [(await unpack(TASKS, record)).message for record in await read_all(bus, TASKS)]


async def test_the_task_of_a_dead_letter_becomes_a_complete_group(bus):
    """All its siblings, one visit later, at the first attempt, without the feeder's number; it names the old group."""
    task = make_task(sample=2, samples=4, visit=1, attempt=2, admission=7)
    await buried(bus, codec.encode(task))
    report = await redriven(bus)
    found = await tasks(bus)
    (group,) = report.groups.values()

    assert [0, 1, 2, 3] == sorted(one.sample for one in found)
    assert {group.group} == {one.group for one in found} != {task.group}
    assert {(2, 0, None, "g0", 4)} == {
        (one.visit, one.attempt, one.admission, one.redrive_of, one.samples) for one in found
    }
    assert {(task.payload_digest, task.seed, task.row, task.source)} == {
        (one.payload_digest, one.seed, one.row, one.source) for one in found
    }
    assert (1, 0, "0:0") == (report.letters, report.refused, group.letter)


@pytest.mark.parametrize("name", ["rollmill.episode", "rollmill.rollout"])
async def test_whatever_stage_gave_up_its_task_is_found(bus, name):
    """Episodes and rollouts embed their task, and large ones are compressed in the log."""
    large = msgspec.structs.replace(SAMPLES["rollmill.task"], payload=(payload := {"text": "x" * 40_000}))
    large = msgspec.structs.replace(large, payload_digest=make_task(payload=payload).payload_digest)
    packed = await pack(msgspec.structs.replace(SAMPLES[name], task=large))
    topic = "eval.retry.30s" if name == "rollmill.rollout" else "episodes"
    await buried(bus, packed.value, topic=topic, headers=(("content-encoding", b"zstd"),))

    assert (8, {large.group}) == (
        (await redriven(bus)).letters * len(await tasks(bus)),
        {task.redrive_of for task in await tasks(bus)},
    )


async def test_dead_siblings_are_redriven_as_one_group_and_only_once(bus):
    """However many of them died, in whatever stage."""
    for sample in range(3):
        await buried(bus, codec.encode(make_task(sample=sample, samples=4)), offset=sample)
    report = await redriven(bus)

    assert (3, 1, 4) == (report.letters, len(report.groups), len(await tasks(bus)))


async def test_a_second_redrive_finds_the_first_one_and_leaves_it_alone(bus):
    """It says so, and does what is new."""
    await buried(bus, codec.encode(make_task(samples=2)))
    await buried(bus, codec.encode(make_task(sample=1, samples=2)), offset=1)
    first = await redriven(bus)
    await buried(bus, codec.encode(make_task(group="g1")), offset=2)
    second = await redriven(bus)

    assert (first.groups, 2, 1) == (second.before, second.letters_before, second.letters)
    assert ({}, 0, 3) == (first.before, first.letters_before, len(await tasks(bus)))
    assert ["g1"] == [group.redrive_of for group in second.groups.values()]


async def test_what_is_asked_for_again_is_the_same_group_again(bus):
    """Its samples have one outcome each, whatever the second time costs."""
    await buried(bus, codec.encode(make_task(samples=2)))
    first, second = await redriven(bus), await redriven(bus, again=True)

    assert (list(first.groups), {}) == (list(second.groups), second.before)
    assert (2, 4) == (len({task.id for task in await tasks(bus)}), len(await tasks(bus)))


async def test_what_a_killed_redrive_left_half_published_is_completed(bus):
    """A group counts once all of its siblings are there."""
    task = make_task(samples=3)
    await buried(bus, codec.encode(task))
    await publish_tasks(Publisher(bus, bus.clock, "redrive"), siblings(task, start_by_ms=1)[:2])
    report = await redriven(bus)

    assert (1, {}) == (report.letters, report.before)
    assert {0, 1, 2} == {one.sample for one in await tasks(bus)}


async def test_a_redrive_whose_tasks_have_left_the_log_is_known_by_its_outcomes(bus):
    """They are kept as long as letters are; of two siblings that ended one is not enough."""
    for number in range(2):
        await buried(bus, codec.encode(make_task(group=f"g{number}", samples=2)), offset=number)
    await redriven(bus)
    published = [task for task in await tasks(bus) if (task.redrive_of, task.sample) != ("g1", 1)]
    for task in published:
        outcome = Trajectory(task=task, outcome=Expired(cause="late"), stage="reaper")
        await Publisher(bus, bus.clock, "reaper").publish(TRAJECTORIES, outcome)
    await bus.clock.advance(STAGE_MS / 1000 + 1)
    for part, end in (await bus.end_offsets(TASKS.name)).items():
        bus.log.trim(TopicPartition(TASKS.name, part), end)
    report = await redriven(bus)

    assert [["g0"], ["g1"]] == [[one.redrive_of for one in those.values()] for those in (report.before, report.groups)]


async def test_many_letters_are_looked_for_in_parts(bus, monkeypatch):
    """Memory follows a part, not the flood; a group of a part before is known to the next one."""
    monkeypatch.setattr(redrive, "BATCH_BYTES", 2_500)
    for sample in (0, 1):
        for number in range(7):
            task = make_task(group=f"g{number}", sample=sample, samples=2)
            await buried(bus, codec.encode(task), offset=7 * sample + number)
    first, second = await redriven(bus), await redriven(bus)

    assert (14, 7, 14) == (first.letters, len(first.groups), len(await tasks(bus)))
    assert (0, 7, 14) == (second.letters, len(second.before), second.letters_before)


async def test_a_redriven_group_that_dies_can_be_redriven(bus):
    """It is another group again, and names the one before."""
    await buried(bus, codec.encode(make_task()))
    await redriven(bus)
    (second,) = await tasks(bus)
    (third,) = siblings(second, start_by_ms=1)

    assert (2, second.group) == (third.visit, third.redrive_of)
    assert 3 == len({"g0", second.group, third.group})


def test_a_source_that_is_passed_again_has_another_group_there():
    """Its next visit is a group of its own, which must not meet its end in somebody's redrive."""
    task = make_task(visit=0, row=3)
    (again,) = siblings(task, start_by_ms=1)

    assert group_id(task.run, task.source, again.visit, task.row, task.payload) != again.group


@given(task=structs(Task))
@example(task=make_task(visit=2**31 - 1))
def test_a_redriven_task_is_a_task(task):
    """Whatever the old one held: every reader takes it, and its group is complete."""
    few = msgspec.structs.replace(task, samples=3, sample=task.sample % 3)
    again = siblings(few, start_by_ms=5)
    for one in again:
        one.check()

    assert [0, 1, 2] == [one.sample for one in again]
    assert 1 == len({one.group for one in again} - {few.group})


@pytest.mark.parametrize(
    ("manifest_s", "span_ms", "starts_within_ms"),
    [(60.0, 5_000, 60_000), (None, 5_000, 5_000), (None, -5_000, 86_400_000)],
    ids=["as its run gives", "as it had itself", "its time had run out"],
)
async def test_it_may_start_from_now_on_as_long_as_it_could_at_first(bus, manifest_s, span_ms, starts_within_ms):
    """The old limit has passed or will soon; the letter may have lain for weeks."""
    if manifest_s is not None:
        manifest = RunManifest(run="test", seed=1, samples=1, start_within_s=manifest_s)
        await Publisher(bus, bus.clock, "test").publish(CONTROL, manifest)
    died_ms = bus.clock.now_ms()
    await buried(bus, codec.encode(make_task(start_by_ms=died_ms + span_ms)), at_ms=died_ms)
    await bus.clock.advance(100_000)
    await redriven(bus)
    (task,) = await tasks(bus)

    assert starts_within_ms == task.start_by_ms - bus.clock.now_ms()


async def test_no_time_is_later_than_a_task_can_say(bus):
    """A foreign task may have asked for the end of time."""
    await buried(bus, codec.encode(make_task(start_by_ms=MAX_TIME_MS)), at_ms=0)
    await redriven(bus)

    assert [MAX_TIME_MS] == [task.start_by_ms for task in await tasks(bus)]


REFUSED = {
    "bytes that still are no message": ("tasks", b"\xc1", DEATH, "no task can be read from it: not msgpack"),
    "a topic that nobody knows": ("elsewhere", b"", DEATH, "'elsewhere', which is no topic"),
    "a sibling that its group does not have": (
        "tasks",
        codec.encode(msgspec.structs.replace(make_task(), sample=9)),
        DEATH,
        "with samples = 1 it is 0 to 0",
    ),
    "a message without a task": ("control", codec.encode(SAMPLES["rollmill.cursor"]), DEATH, "is no work"),
    "an outcome": ("trajectories", codec.encode(SAMPLES["rollmill.trajectory"]), DEATH, "is no work"),
    "a task that is as invalid now": (
        "tasks",
        codec.encode(make_task(payload_digest="ab")),
        DEATH,
        "as invalid now: payload_digest is 'ab'",
    ),
    "a group of millions": ("tasks", codec.encode(make_task(samples=2**31 - 1)), DEATH, "claims 2147483647 siblings"),
    "what only the sink refused": (
        "tasks",
        codec.encode(make_task()),
        Death(stage="sink", cause="too large a number", kind=NOT_STORED),
        "the stages dealt with it",
    ),
    "a value that was cut": ("tasks", b"\xc0" * RECORD_BYTES, DEATH, f"of its {RECORD_BYTES} bytes are kept"),
}
"""What cannot be done again -> its topic, its bytes, its death, and what is said."""


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_done_again_is_refused_with_its_reason(bus, name):
    """And the rest goes on."""
    topic, value, death, says = REFUSED[name]
    await buried(bus, value, topic=topic, death=death)
    await buried(bus, codec.encode(make_task()), offset=1)
    report = await redriven(bus)

    assert (1, 1, ["0:0"]) == (report.letters, report.refused, [letter for letter, _ in report.refusals])
    assert says in report.refusals[0][1]
    assert 1 == len(await tasks(bus))


async def test_poison_that_can_be_read_now_is_work_like_any_other(bus):
    """A newer version may know what an older one did not."""
    await buried(bus, codec.encode(make_task()), death=Death(stage="init", cause="major version 2"))

    assert make_task() == await work_of(await anext(letters(bus)))
    assert 1 == (await redriven(bus)).letters


async def test_a_flood_of_poison_is_counted_and_not_kept(bus):
    """The first ones are named."""
    for offset in range(MAX_REFUSALS + 5):
        await buried(bus, b"\xc1", offset=offset)
    report = await redriven(bus)

    assert (MAX_REFUSALS + 5, MAX_REFUSALS) == (report.refused, len(report.refusals))


def test_the_largest_group_is_redriven():
    """What `rollmill publish` makes, redrive makes again."""
    assert MAX_SIBLINGS == len(siblings(make_task(samples=MAX_SIBLINGS), start_by_ms=1))
    with pytest.raises(NotRedrivable):
        siblings(make_task(samples=MAX_SIBLINGS + 1), start_by_ms=1)


async def test_an_episode_of_the_same_group_is_no_second_group(bus):
    """INIT gave one sibling up, RUN another."""
    task = make_task(samples=2)
    await buried(bus, codec.encode(task))
    episode = Episode(task=msgspec.structs.replace(task, sample=1), host="", lease="", messages=())
    await buried(bus, codec.encode(episode), topic=EPISODES.name, offset=1)
    report = await redriven(bus)

    assert (2, 1) == (report.letters, len(report.groups))


async def test_work_of_a_cancelled_run_is_refused_and_that_of_others_is_done(bus):
    """Every stage would skip it, and nobody would be told."""
    publisher = Publisher(bus, bus.clock, "test")
    await publisher.publish(CONTROL, Cancel(target="gone", cause="a typo"))
    await buried(bus, codec.encode(make_task(run="gone")))
    await buried(bus, codec.encode(make_task(run="kept")), offset=1)
    report = await redriven(bus)

    assert (1, 1, {"kept"}) == (report.letters, report.refused, {task.run for task in await tasks(bus)})
    assert "gone is cancelled (a typo)" in report.refusals[0][1]


async def test_a_cancel_of_the_old_group_or_of_another_run_does_not_stop_its_work(bus):
    """The new group has an id of its own; only one that is withdrawn itself is refused."""
    (first,) = siblings(make_task(), start_by_ms=1)
    publisher = Publisher(bus, bus.clock, "test")
    for target in ("other", "test/g0"):
        await publisher.publish(CONTROL, Cancel(target=target, cause="by request"))
    await buried(bus, codec.encode(make_task()))
    assert 1 == (await redriven(bus)).letters

    await publisher.publish(CONTROL, Cancel(target=f"test/{first.group}", cause="by request"))
    assert f"test/{first.group} is cancelled" in (await redriven(bus, again=True)).refusals[0][1]


async def test_two_redrives_at_once_make_one_group_and_the_letters_of_both_copies_one_more(bus):
    """Each sample may be rolled out twice and die twice; there is still one outcome each, and one group to do again."""
    await buried(bus, codec.encode(make_task(samples=2)))
    one, other = await asyncio.gather(redriven(bus), redriven(bus))
    copies = await tasks(bus)
    assert (4, 2, list(one.groups)) == (len(copies), len({task.id for task in copies}), list(other.groups))

    for number, task in enumerate(copies, start=1):
        await buried(bus, codec.encode(task), offset=number)
    report = await redriven(bus)
    (again,) = report.groups.values()

    assert (4, 1, 1) == (report.letters, report.letters_before, len(report.before))
    assert again.redrive_of == copies[0].group
    assert 2 == len([task for task in await tasks(bus) if task.redrive_of == again.redrive_of])
