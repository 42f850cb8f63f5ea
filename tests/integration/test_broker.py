"""A local Kafka as a user meets it: start, stop, kill, ports; and the bus when the broker goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.consumer.fetcher import FetchError
from aiokafka.errors import OffsetOutOfRangeError, OutOfOrderSequenceNumber

from infra import broker
from infra.broker import pidfile
from infra.broker.errors import AlreadyRunning, JavaNotFound, MavenNotFound, NotStarted, PortTaken, WrongData
from infra.broker.local import LocalBroker
from infra.bus import Record, TopicPartition
from infra.errors import BusError
from infra.kafka import KafkaBus, KafkaLimits
from schemas.topics import CONTROL, TABLE, TASKS

pytestmark = pytest.mark.integration

WAIT_S = 30.0
ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {WAIT_S} s until {what}"
        time.sleep(0.02)


@pytest.fixture
def data(tmp_path) -> Iterator[Path]:
    """A data directory whose broker, if any is left, is stopped at the end."""
    yield tmp_path / "data"
    broker.stop(tmp_path / "data")


@pytest.fixture(scope="session", autouse=True)
def java_or_skip() -> None:
    """Without Java or Maven: a skip, in CI an error."""
    try:
        broker.prepare()
    except (JavaNotFound, MavenNotFound) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


class TestLife:
    def test_start_status_stop_and_start_again(self, data):
        """A broker answers when `start` returns, says so, stops in order, and comes back on the same port."""
        nothing = broker.status(data)
        first = broker.start(data, detached=False).status()
        stopped = broker.stop(data)
        between = broker.status(data)
        again = broker.stop(data)
        second = broker.start(data, detached=False).status()

        assert (nothing.running, nothing.port) == (False, None)
        assert (first.running, first.answers, first.bootstrap) == (True, True, f"127.0.0.1:{first.port}")
        assert (stopped, again) == (True, False)
        assert (between.running, between.answers, between.pid, between.port) == (False, False, None, first.port)
        assert (second.port, second.pid == first.pid) == (first.port, False)

    def test_a_second_start_says_that_the_first_is_running(self, data):
        """The error names process and address."""
        first = broker.start(data, detached=False).status()
        with pytest.raises(AlreadyRunning, match=rf"already runs on .*pid {first.pid}, address {first.bootstrap}"):
            broker.start(data)

        assert broker.status(data) == first

    def test_a_port_in_use_is_replaced_unless_insisted_on(self, data):
        """The wish gives way to a free port; insisting gives an error instead."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(PortTaken, match=rf"port {port} on 127.0.0.1 is in use"):
                broker.start(data, port=port, insist=True)
            chosen = broker.start(data, port=port, detached=False).status()

        assert chosen.answers
        assert chosen.port != port

    def test_a_stranger_with_the_recorded_pid_is_left_alone(self, data):
        """A stale file neither blocks a start nor gets a stranger killed."""
        data.mkdir()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
            entry = pidfile.write(data / "broker.json", pid=stranger.pid, port=29999)
            stale = (data / "broker.json").read_text().replace(entry.identity, "long ago")
            (data / "broker.json").write_text(stale)
            stopped = broker.stop(data)
            running = broker.start(data, detached=False).status()

            assert (stopped, stranger.poll()) == (False, None)
            assert running.answers
            assert stranger.stdin is not None
            stranger.communicate(b"\n")

    def test_a_failed_start_shows_the_end_of_the_log(self, data):
        """What the broker said is in the error, and no process is left."""
        broker.start(data, detached=False)
        broker.stop(data)
        (data / "log" / "meta.properties").write_text("version=1\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\nnode.id=2\n")
        with pytest.raises(
            WrongData, match=r"ended with 1 while starting \(.*node id 2 doesn't match .*\); the end of .*broker.log:\n"
        ):
            broker.start(data)

        assert not broker.status(data).running

    def test_a_failed_format_shows_what_was_said(self, data):
        """A Java that does not take our flags is quoted."""
        with pytest.raises(NotStarted, match=r"formatting .* ended with 1; it said:\n  Unrecognized VM option"):
            LocalBroker(data).launch(jars_of_this_machine(), java_flags=["-XX:+NoSuchFlag"], detached=False)

    def test_a_start_that_takes_too_long_is_given_up(self, data):
        """The limit holds, the error names it, and the process is gone."""
        broker.start(data, detached=False)
        broker.stop(data)
        with pytest.raises(NotStarted, match=r"did not answer at 127.0.0.1:\d+ in 0 s"):
            LocalBroker(data, start_limit_s=0.0).launch(jars_of_this_machine(), detached=False)

        assert not broker.status(data).running

    @pytest.mark.parametrize("detached", [True, False])
    def test_a_child_ends_with_its_parent_and_a_detached_broker_does_not(self, data, detached):
        """kill -9 of the starter leaves no orphan, unless the broker was meant to stay."""
        code = (
            "import sys, pathlib; from infra import broker\n"
            f"broker.start(pathlib.Path(sys.argv[1]), detached={detached}); print('up', flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        ) as starter:
            assert starter.stdout is not None
            assert starter.stdout.readline() == b"up\n"
            starter.kill()
        if not detached:
            until(lambda: not broker.status(data).running, "the child had ended")

        assert broker.status(data).answers is detached


def jars_of_this_machine():
    return broker.prepare()


async def found_by(source, count: int) -> list[Record]:
    """Return so many records of a member or a reader."""
    found: list[Record] = []
    give_up = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {count} records, got {found}"
        found += await source.poll(10, 0.2)
    return found


LIMITS = KafkaLimits(heartbeat_s=0.2, session_s=6.0, topic_s=0.5, request_s=5.0)


class TestBusMeetsBroker:
    async def test_the_table_can_be_created_and_checked(self, kafka):
        """All topics of the table are made as it says."""
        bus = KafkaBus(kafka, prefix="table.", limits=LIMITS)
        await bus.start()
        created = await bus.create_topics(TABLE)
        await bus.check_topics(TABLE)
        await bus.close()

        assert created == [topic.name for topic in TABLE]

    async def test_an_address_that_does_not_answer_is_named(self):
        """The error comes in time and says where it tried."""
        bus = KafkaBus("127.0.0.1:1", limits=KafkaLimits(connect_s=0.5))
        with pytest.raises(BusError, match=r"connecting to Kafka: no answer from 127.0.0.1:1 in 0.5 s"):
            await bus.start()
        await bus.close()

    async def test_acknowledged_records_survive_kill_9_and_publishing_waits_for_the_restart(self, data):
        """A killed broker costs time: what was acknowledged is there, what was under way is published once."""
        running = broker.start(data, detached=False)
        status = running.status()
        bus = KafkaBus(str(status.bootstrap), limits=LIMITS)
        await bus.start()
        await bus.create_topics([CONTROL])
        before = await bus.publish("control", b"before", key=b"k")
        member = await bus.join(["control"], "g")
        os.kill(status.pid or 0, signal.SIGKILL)
        publishing = asyncio.create_task(bus.publish("control", b"during", key=b"k"))
        await asyncio.to_thread(until, lambda: not running.status().running, "the broker was dead")
        running = await asyncio.to_thread(broker.start, data)
        during = await publishing
        found = []
        give_up = time.monotonic() + WAIT_S
        while len(found) < 2:
            assert time.monotonic() < give_up, f"waited {WAIT_S} s for both records, got {found}"
            found += await member.poll(10, 0.2)
        await member.close()
        await bus.close()

        assert running.status().port == status.port
        assert (before.offset, during.offset) == (0, 1)
        assert [record.value for record in found] == [b"before", b"during"]

    async def test_a_publish_that_nobody_acknowledges_ends_with_an_error(self, data):
        """The client would retry for ever; our limit holds, also when the bus is closed."""
        status = broker.start(data, detached=False).status()
        bus = KafkaBus(str(status.bootstrap), limits=KafkaLimits(outage_s=0.5, close_s=0.5))
        await bus.start()
        await bus.create_topics([CONTROL])
        await bus.publish("control", b"v", key=b"k")
        await asyncio.to_thread(broker.stop, data)
        with pytest.raises(BusError, match=r"publishing to rollmill.control: no answer .* in 0.5 s"):
            await bus.publish("control", b"v", key=b"k")
        await asyncio.wait_for(bus.close(), 5.0)

    async def test_a_hole_in_the_sequence_costs_a_producer_not_a_record(self, kafka):
        """After OutOfOrderSequence the producer is replaced, and the record that met it is published."""
        bus = KafkaBus(kafka, prefix="hole.", limits=LIMITS)
        await bus.start()
        await bus.create_topics([CONTROL])
        await bus.publish("control", b"first", key=b"k")
        broken = bus._producer
        assert isinstance(broken, AIOKafkaProducer)
        # As after a lost batch: the client believes to be further than the broker knows.
        broken._txn_manager.increment_sequence_number(bus._link.outer(TopicPartition("control", 0)), 5)
        with pytest.raises(OutOfOrderSequenceNumber):
            await broken.send_and_wait("hole.control", b"direct", key=b"k")
        position = await bus.publish("control", b"second", key=b"k")
        replaced = bus._producer is not broken
        await bus.close()

        assert replaced
        assert position.offset == 1

    async def test_a_reader_passes_over_markers_of_transactions(self, kafka):
        """Offsets without a record count as passed: a reader at the end is at the end."""
        bus = KafkaBus(kafka, prefix="gap.", limits=LIMITS)
        await bus.start()
        await bus.create_topics([CONTROL])
        async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id="gap") as foreign:
            for value in (b"a", b"b"):
                async with foreign.transaction():
                    await foreign.send_and_wait("gap.control", value, key=b"k")
        part = TopicPartition("control", 0)
        reader = await bus.read({part: 0})
        found = []
        end = (await bus.end_offsets("control"))[0]
        give_up = time.monotonic() + WAIT_S
        while reader.position(part) < end:
            assert time.monotonic() < give_up, f"the reader stays at {reader.position(part)}, the end is {end}"
            found += await reader.poll(10, 0.2)
        await reader.close()
        await bus.close()

        assert [(record.offset, record.value) for record in found] == [(0, b"a"), (2, b"b")]
        assert end == 4

    async def test_a_header_without_a_value_is_read_as_an_empty_one(self, kafka):
        """A foreign client may leave it out; whoever copies or shows headers need not know of that."""
        bus = KafkaBus(kafka, prefix="null.", limits=LIMITS)
        await bus.start()
        await bus.create_topics([CONTROL])
        async with AIOKafkaProducer(bootstrap_servers=kafka) as foreign:
            await foreign.send_and_wait("null.control", b"v", key=b"k", headers=[("a", None), ("b", b"1")])
        reader = await bus.read({TopicPartition("control", 0): 0})
        (record,) = await found_by(reader, 1)
        await reader.close()
        await bus.close()

        assert (("a", b""), ("b", b"1")) == record.headers

    async def test_an_offset_that_a_new_leader_does_not_know_yet_is_not_lost(self, kafka):
        """A broker that has just taken over refuses it for a moment: reading goes on where it was."""
        bus = KafkaBus(kafka, prefix="behind.", limits=LIMITS)
        await bus.start()
        await bus.create_topics([CONTROL])
        await bus.publish("control", b"first", key=b"k")
        part = TopicPartition("control", 0)
        sources = [await bus.join(["control"], "g"), await bus.read({part: 0})]
        for source in sources:
            assert [b"first"] == [record.value for record in await found_by(source, 1)]
            outer = bus._link.outer(part)
            # As such a broker answers: the offset that comes next is out of range.
            source._client._fetcher._records[outer] = FetchError(error=OffsetOutOfRangeError({outer: 1}), backoff=0.0)
        await bus.publish("control", b"second", key=b"k")
        seconds = [[record.value for record in await found_by(source, 1)] for source in sources]
        for source in sources:
            await source.close()
        await bus.close()

        assert seconds == [[b"second"], [b"second"]]

    async def test_many_members_in_one_process_share_a_stage(self, kafka):
        """Members keep their assignor's state apart: 32 partitions over three members, each owned once."""
        bus = KafkaBus(kafka, prefix="many.", limits=LIMITS)
        await bus.start()
        await bus.create_topics([TASKS])
        members = [await bus.join(["tasks"], "init") for _ in range(3)]
        give_up = time.monotonic() + WAIT_S
        while sorted(len(member.assignment()) for member in members) != [10, 11, 11]:
            assert time.monotonic() < give_up, [len(member.assignment()) for member in members]
            await asyncio.sleep(0.02)
        owned = [partition for member in members for partition in member.assignment()]
        await asyncio.gather(*(member.close() for member in members))
        await bus.close()

        assert sorted(owned) == [TopicPartition("tasks", number) for number in range(32)]
