"""The feeder publishes as far ahead of the trainer as its credit allows, and no further."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from infra.clock import VirtualClock, settle
from infra.errors import BusError, ConfigError, WaitTimeout
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.feeder import MANIFEST_WAIT_S, RESUMED_S, SAY_EVERY_S, Feeder, FeederReplaced
from producers.generated import GeneratedSource
from schemas.control import Cancel, Credit, Cursor, RunManifest
from schemas.identity import group_id
from schemas.messages import Shaping
from schemas.topics import CONTROL, TABLE, TASKS
from tests.logs import read_all, wait_until

MANIFEST = RunManifest(run="r", seed=3, samples=2, paced=True)
SOURCE = GeneratedSource("toy", {})


async def say(bus, clock, message):
    await Publisher(bus, clock, "trainer").publish(CONTROL, message)


async def allow(bus, clock, groups, *, epoch=0, closed=False, **stamps):
    stamps = {"min_version": 0, "horizon": 14, "temperature": 1.0, **stamps}
    await say(bus, clock, Credit(run="r", epoch=epoch, admit_up_to=groups, closed=closed, **stamps))


async def tasks(bus):
    return [(await unpack(TASKS, record)).message for record in await read_all(bus, TASKS)]


async def cursors(bus):
    found = [(await unpack(CONTROL, record)).message for record in await read_all(bus, CONTROL)]
    return [message.admitted for message in found if isinstance(message, Cursor)]


async def admitted(bus):
    return max(await cursors(bus), default=0)


async def cancelled(running):
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_exactly_what_the_credit_covers_is_published(bus, clock):
    """Groups below `admit_up_to`, each with its dense number; more when the credit grows."""
    await say(bus, clock, MANIFEST)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await settle()
    without = len(await tasks(bus))
    await allow(bus, clock, 2)
    await wait_until(lambda: admitted(bus), 2)
    await settle()
    first = sorted(task.admission for task in await tasks(bus))
    await allow(bus, clock, 3)
    await wait_until(lambda: admitted(bus), 3)
    await settle()
    then = sorted(task.admission for task in await tasks(bus))
    await cancelled(running)

    assert (0, [0, 0, 1, 1], [0, 0, 1, 1, 2, 2]) == (without, first, then)
    assert [1, 2, 3] == await cursors(bus)


async def test_an_older_credit_is_ignored(bus, clock):
    """A trainer that was replaced, or a number that went back, admits nothing."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 1, epoch=5)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 1)
    await allow(bus, clock, 9, epoch=4)
    await allow(bus, clock, 0, epoch=5)
    await settle(200)
    await cancelled(running)

    assert await admitted(bus) == 1


async def test_groups_carry_the_stamps_of_the_credit_they_were_admitted_under(bus, clock):
    """Horizon, temperature and lowest version may change while the run goes on."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 1, horizon=10, temperature=1.0, min_version=0)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 1)
    await allow(bus, clock, 2, horizon=12, temperature=0.8, min_version=3)
    await wait_until(lambda: admitted(bus), 2)
    await cancelled(running)

    assert {(0, 10, 1.0, 0), (1, 12, 0.8, 3)} == {
        (task.admission, task.horizon, task.sampling.temperature, task.min_version) for task in await tasks(bus)
    }


async def test_groups_carry_the_phase_and_the_reward_weights_of_their_credit(bus, clock):
    """Siblings share them, and a group that was admitted before keeps its own."""
    await say(bus, clock, MANIFEST)
    early = Shaping(weights={"format": 1.0})
    await allow(bus, clock, 1, phase=0, shaping=early)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 1)
    await allow(bus, clock, 2, phase=1)
    await wait_until(lambda: admitted(bus), 2)
    await cancelled(running)

    found = [(task.admission, task.phase, task.shaping) for task in await tasks(bus)]
    assert sorted(found, key=lambda one: one[0]) == [(0, 0, early)] * 2 + [(1, 1, None)] * 2


async def test_a_closed_run_ends_the_feeder(bus, clock):
    """The trainer wants no more, whatever credit is left."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 2)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 2)
    await allow(bus, clock, 9, closed=True)

    assert await asyncio.wait_for(running, 5) == 2
    assert len(await tasks(bus)) == 4


async def test_a_feeder_that_starts_beside_a_resuming_trainer_does_not_take_the_old_end_for_the_run_s(bus, clock):
    """The trainer loads its model before it says that the run goes on."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 2, closed=True)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await settle(200)
    await allow(bus, clock, 3, epoch=1)
    await wait_until(lambda: admitted(bus), 3)

    await allow(bus, clock, 3, epoch=1, closed=True)
    assert await asyncio.wait_for(running, 5) == 3


async def test_a_feeder_of_a_run_that_had_ended_and_that_nobody_resumes_ends(bus):
    """It waits for a trainer, but not for ever."""
    clock = VirtualClock()
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 2, closed=True)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    for _ in range(2):
        await settle(200)
        assert not running.done()
        await clock.advance(RESUMED_S / 2)
    assert await asyncio.wait_for(running, 5) == 0


async def test_a_source_that_ends_ends_the_feeder(bus, clock):
    """There is nothing left to admit."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 9)

    assert await asyncio.wait_for(Feeder(bus, clock, "r", GeneratedSource("toy", {}, count=3)).run(), 5) == 3


class Dying(MemoryBus):
    """A log that takes so many records of a topic, and refuses the ones after until it is mended."""

    def __init__(self, clock, topic, most):
        super().__init__(clock)
        self.topic, self.left = topic, most

    async def publish(self, topic, value, **where):
        if topic == self.topic.name:
            if not self.left:
                raise BusError("the feeder was killed here")
            self.left -= 1
        return await super().publish(topic, value, **where)


@pytest.mark.parametrize("killed_after", range(3, 7))
async def test_a_feeder_that_starts_again_repeats_one_group_at_most(clock, killed_after):
    """Killed before a cursor was written: the group is published again under the same ids, and no number is left out.

    Three control records, manifest, credit and its own start, come before the first cursor.
    """
    bus = Dying(clock, CONTROL, killed_after)
    await bus.create_topics(TABLE)
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 4)
    with pytest.raises(BusError, match="killed here"):
        await Feeder(bus, clock, "r", SOURCE).run()
    bus.left = 99
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 4)
    await cancelled(running)
    found = await tasks(bus)

    assert (10, 8) == (len(found), len({task.id for task in found}))
    assert {0, 1, 2, 3} == {task.admission for task in found}
    assert [1, 2, 3, 4] == await cursors(bus)


async def test_the_cursor_follows_the_tasks(clock):
    """A group whose tasks are not all durable is not counted as admitted."""
    bus = Dying(clock, TASKS, 3)
    await bus.create_topics(TABLE)
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 4)
    with pytest.raises(BusError, match="killed here"):
        await Feeder(bus, clock, "r", SOURCE).run()

    assert [1] == await cursors(bus)


async def test_the_start_limit_counts_from_admission(bus, clock):
    """A group that waited for its credit has its whole time."""
    await say(bus, clock, MANIFEST)
    await clock.advance(1000)
    await allow(bus, clock, 1)
    await asyncio.wait_for(Feeder(bus, clock, "r", GeneratedSource("toy", {}, count=1)).run(), 5)

    expected = clock.now_ms() + int(MANIFEST.start_within_s * 1000)
    assert {expected} == {task.start_by_ms for task in await tasks(bus)}


async def test_a_run_without_a_manifest_is_waited_for_with_a_limit(bus, clock):
    """The error says what was waited for and what to do."""
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await settle()
    await clock.advance(MANIFEST_WAIT_S + 2 * SAY_EVERY_S)

    with pytest.raises(WaitTimeout, match="manifest of run 'r'; start its trainer"):
        await asyncio.wait_for(running, 5)


async def test_a_feeder_that_waits_says_what_for(bus, clock, caplog):
    """The trainer may be busy for long: that is no error, but a person may wonder."""
    await say(bus, clock, MANIFEST)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await settle()
    with caplog.at_level(logging.INFO):
        await clock.advance(SAY_EVERY_S + 1)
    await cancelled(running)

    assert "group 0 waits 30 s for credit (its trainer has given none yet)" in caplog.text


async def test_a_feeder_that_waits_long_says_so_now_and_then(bus, clock, caplog):
    """Others write to `control` all the while: it is no louder for that."""
    await say(bus, clock, MANIFEST)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await settle()
    with caplog.at_level(logging.INFO):
        for seconds in range(int(2.5 * SAY_EVERY_S)):
            await say(bus, clock, Cursor(run="other", admitted=seconds))
            await clock.advance(1)
    await cancelled(running)

    said = [line for line in caplog.messages if "for credit" in line]
    assert [
        "run r: group 0 waits 30 s for credit (its trainer has given none yet)",
        "run r: group 0 waits 60 s for credit (its trainer has given none yet)",
    ] == said


async def test_a_control_topic_that_cannot_be_read_ends_the_feeder():
    """It would wait for ever for a credit that it does not see."""
    clock = VirtualClock()

    class Broken(MemoryBus):
        async def read(self, start):
            reader = await super().read(start)
            reads = reader.poll

            async def poll(max_records, timeout_s):
                if self.gone:
                    raise BusError("the broker is away")
                return await reads(max_records, timeout_s)

            reader.poll = poll
            return reader

    bus = Broken(clock)
    bus.gone = False
    await bus.create_topics(TABLE)
    await say(bus, clock, MANIFEST)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await settle()
    bus.gone = True
    await clock.advance(1.0)

    with pytest.raises(BusError, match="broker is away"):
        await asyncio.wait_for(running, 5)


async def test_of_two_feeders_the_one_that_started_last_goes_on(bus, clock):
    """Started twice by mistake: the first one stops and says why; no group is left out, and each keeps its number."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 2)
    older = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 2)
    newer = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await settle()
    await allow(bus, clock, 5)
    with pytest.raises(
        FeederReplaced, match=r"another feeder \(feeder-.*\) has started on run 'r'.*this one began at 2"
    ):
        await asyncio.wait_for(older, 20)
    await wait_until(lambda: admitted(bus), 5)
    await cancelled(newer)
    found = await tasks(bus)

    assert {0, 1, 2, 3, 4} == {task.admission for task in found}
    assert 10 == len({task.id for task in found})
    assert sorted(await cursors(bus)) == await cursors(bus)


@pytest.mark.parametrize("count", [2, 3])
async def test_of_feeders_that_start_at_once_exactly_one_goes_on(bus, clock, count):
    """The order of the log decides between them, so they cannot all stop."""
    await say(bus, clock, MANIFEST)
    feeders = [asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run()) for _ in range(count)]
    await settle()
    await allow(bus, clock, 3)
    await wait_until(lambda: admitted(bus), 3)
    await wait_until(lambda: sum(feeder.done() for feeder in feeders), count - 1)
    await allow(bus, clock, 6)
    await wait_until(lambda: admitted(bus), 6)
    ended = [feeder for feeder in feeders if feeder.done()]
    for feeder in feeders:
        await cancelled(feeder)
    found = await tasks(bus)

    assert [FeederReplaced] * (count - 1) == [type(feeder.exception()) for feeder in ended]
    assert ({0, 1, 2, 3, 4, 5}, 12) == ({task.admission for task in found}, len({task.id for task in found}))


async def test_a_feeder_that_stood_still_admits_at_most_one_group_more(bus, clock):
    """It was in the middle of a group when another took over: the same group, under the same ids."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 1)
    still = asyncio.Event()

    class Halting(MemoryBus):
        """Another connection to the same log, which halts before its cursor."""

        def __getattribute__(self, name):
            own = {"publish"}
            return object.__getattribute__(self, name) if name in own else getattr(bus, name)

        async def publish(self, topic, value, **where):
            if topic == CONTROL.name and (where["key"] or b"").startswith(b"cursor"):
                await still.wait()
            return await bus.publish(topic, value, **where)

    older = asyncio.create_task(Feeder(Halting(clock), clock, "r", SOURCE).run())
    await settle()
    newer = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await allow(bus, clock, 3)
    await wait_until(lambda: admitted(bus), 3)
    still.set()
    with pytest.raises(FeederReplaced):
        await asyncio.wait_for(older, 20)
    await cancelled(newer)
    found = await tasks(bus)

    assert (8, 6) == (len(found), len({task.id for task in found}))
    assert (3, [1, 2, 3, 1]) == (await admitted(bus), await cursors(bus))


async def test_a_feeder_with_another_source_is_refused(bus, clock):
    """Its numbers would go on in the middle of that source; the run stays as it is."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 1)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 1)
    other = Feeder(bus, clock, "r", GeneratedSource("toy", {}, name="other"))
    with pytest.raises(ConfigError, match="run 'r' is fed from source 'toy', this feeder reads 'other'"):
        await asyncio.wait_for(other.run(), 20)
    await allow(bus, clock, 2)
    await wait_until(lambda: admitted(bus), 2)
    await cancelled(running)


async def test_a_feeder_that_was_told_of_another_run_is_refused(bus, clock):
    """The same name in another RUN.toml: what differs is named, and nothing is published."""
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 1)
    told = msgspec.structs.replace(MANIFEST, samples=8)
    with pytest.raises(ConfigError, match="samples is 2, here 8"):
        await asyncio.wait_for(Feeder(bus, clock, "r", SOURCE, expected=told).run(), 20)

    assert [] == await tasks(bus)


async def test_a_cancelled_run_is_fed_no_more(bus, clock, caplog):
    """Also while it waits for credit; the log names the cause."""
    caplog.set_level(logging.INFO)
    await say(bus, clock, MANIFEST)
    await allow(bus, clock, 2)
    running = asyncio.create_task(Feeder(bus, clock, "r", SOURCE).run())
    await wait_until(lambda: admitted(bus), 2)
    await say(bus, clock, Cancel(target="r", cause="wrong reward"))

    assert await asyncio.wait_for(running, 5) == 2
    assert "run r is cancelled (wrong reward): it is fed no more, 2 groups admitted" in caplog.text
    await allow(bus, clock, 9)
    assert await asyncio.wait_for(Feeder(bus, clock, "r", SOURCE).run(), 5) == 2
    assert len(await tasks(bus)) == 4


async def test_a_cancelled_group_is_fed_like_any_other(bus, clock):
    """It ends as cancelled at once, and only so the trainer learns that its number is done with."""
    await say(bus, clock, MANIFEST)
    source = GeneratedSource("toy", {}, count=2)
    first = next(iter(source.instances(0)))
    group = group_id("r", source.name, first.visit, first.row, first.payload)
    await say(bus, clock, Cancel(target=f"r/{group}", cause="by request"))
    await allow(bus, clock, 9)

    assert await asyncio.wait_for(Feeder(bus, clock, "r", source).run(), 5) == 2
    assert {0, 1} == {task.admission for task in await tasks(bus)}
    assert group in {task.group for task in await tasks(bus)}
