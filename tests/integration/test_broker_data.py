"""A broker whose disk is full, or whose data is not its own: a clear error, nothing lost, and it goes on afterwards."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import broker
from infra.broker import archive, local
from infra.broker.errors import DiskFull, JarsNotResolved, JavaNotFound, MavenNotFound, WrongData
from infra.broker.jars import Jars
from infra.broker.local import LocalBroker, Node
from infra.bus import TopicPartition
from infra.errors import BusError
from infra.kafka import KafkaBus, KafkaLimits
from schemas.topics import CONTROL

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
META = "log/meta.properties"


@pytest.fixture(scope="module")
def jars() -> Jars:
    """Kafka's jars. Without Java or Maven: a skip, in CI an error."""
    try:
        return broker.prepare()
    except (JavaNotFound, MavenNotFound, JarsNotResolved) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Kafka: {error}")


@pytest.fixture
def data(tmp_path) -> Iterator[Path]:
    """A data directory whose broker, if any is left, is stopped at the end."""
    yield tmp_path / "data"
    broker.stop(tmp_path / "data")


def launch(data: Path, jars: Jars, node: Node | None = None) -> LocalBroker:
    """Start a broker with settings of its own."""
    classes = archive.ensure(jars)
    running = LocalBroker(data, node=node)
    running.launch(jars, java_flags=[f"-XX:SharedArchiveFile={classes}"] if classes else [], detached=False)
    return running


def test_without_room_nothing_is_started(data, jars, monkeypatch):
    """A Kafka that runs out of disk while it repairs its files may lose some."""
    monkeypatch.setattr(local, "MIN_FREE_BYTES", 10**18)
    with pytest.raises(DiskFull, match=r"\d+ MB are free for .*, \d+ are needed\nmake room on that disk"):
        launch(data, jars)

    assert not (data / "log").exists()


@pytest.mark.parametrize("meta", [None, b"", b"\xff\x00", b"version=1\n"], ids=["none", "empty", "bytes", "no cluster"])
def test_a_folder_that_is_no_kafkas_is_left_alone(data, jars, meta):
    """Somebody's files, or data whose identity was damaged: neither is formatted over."""
    (data / "log").mkdir(parents=True)
    (data / "log" / "notes.txt").write_text("mine")
    if meta is not None:
        (data / META).write_bytes(meta)
    before = {path: path.read_bytes() for path in (data / "log").iterdir()}
    with pytest.raises(WrongData, match=r"holds files, but no meta.properties that names a cluster.id\nnothing was"):
        launch(data, jars)

    assert {path: path.read_bytes() for path in (data / "log").iterdir()} == before


def test_data_of_another_cluster_is_refused_by_both_names(data, jars):
    """A node of a cluster that was given a directory of another one would never be let in."""
    (data / "log").mkdir(parents=True)
    (data / META).write_text("version=1\ncluster.id=theirs\nnode.id=1\n")
    with pytest.raises(WrongData, match="belongs to cluster theirs; this node is of cluster ours"):
        launch(data, jars, Node(cluster="ours"))


def test_data_in_a_format_that_this_kafka_does_not_know_is_refused(data, jars):
    """`rollmill broker start` says what was found and what to do, without a stack trace."""
    (data / "log").mkdir(parents=True)
    (data / META).write_text("version=7\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\nnode.id=1\n")
    done = subprocess.run(
        [sys.executable, "-m", "rollmill", "broker", "start", "--data", str(data)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * WAIT_S,
    )
    assert done.returncode == 1
    assert "ended with 1 while starting (java.lang.RuntimeException: Unknown meta.properties version" in done.stderr
    assert "Start it with the Kafka and the settings that wrote it, move it away" in done.stderr
    assert "\tat org.apache" not in done.stderr
    assert not broker.status(data).running


@pytest.mark.slow
def test_data_of_a_newer_kafka_is_refused(data, jars):
    """Its feature level is one that this Kafka does not know; the data stays for the one that does."""
    newer = Node(
        settings={"unstable.feature.versions.enable": "true", "unstable.api.versions.enable": "true"},
        format_options=("--feature", "metadata.version=29"),
    )
    launch(data, jars, newer).stop()
    with pytest.raises(WrongData, match=r"while starting \(.*FeatureLevelRecord.*only supports versions"):
        launch(data, jars)

    launch(data, jars, newer)
    assert broker.status(data).answers


@pytest.mark.slow
async def test_a_disk_that_fills_up_ends_the_broker_and_loses_nothing(data, jars):
    """Publishing fails at its limit; the broker says why it ended; with room again everything goes on.

    A limit on the size of files stands for the full disk: the write fails in the same call of Kafka's.
    """
    command = [sys.executable, "-m", "rollmill", "broker", "run", "--data", str(data)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as service:  # noqa: ASYNC220 - nothing else runs on this loop yet
        status = await_answer(data, service)
        resource.prlimit(status.pid or 0, resource.RLIMIT_FSIZE, (2_500_000, resource.RLIM_INFINITY))
        bus = KafkaBus(str(status.bootstrap), limits=KafkaLimits(outage_s=5.0))
        await bus.start()
        await bus.create_topics([CONTROL])
        acknowledged = []
        with pytest.raises(BusError, match=r"publishing to rollmill.control: no answer from .* in 5 s"):
            for number in range(1000):
                value = number.to_bytes(4, "big") + os.urandom(50_000)
                await bus.publish("control", value, key=str(number).encode())
                acknowledged.append(value)
        _, said = service.communicate(timeout=WAIT_S)

    assert service.returncode == 1
    assert "ended by itself (java.io.IOException: File too large)" in said
    assert "make room on that disk" in said
    launch(data, jars)
    later = await bus.publish("control", b"later", key=b"later")
    reader = await bus.read({TopicPartition("control", 0): 0})
    found = []
    give_up = time.monotonic() + WAIT_S
    while b"later" not in found:
        assert time.monotonic() < give_up, f"read {len(found)} records, waiting for the one at {later.offset}"
        found += [record.value for record in await reader.poll(100, 0.2)]
    await reader.close()
    await bus.close()

    assert len(acknowledged) > 10
    assert set(acknowledged) <= set(found)


def await_answer(data: Path, service: subprocess.Popen[str]) -> broker.BrokerStatus:
    """Return the broker's status once it answers."""
    give_up = time.monotonic() + WAIT_S
    while not (status := broker.status(data)).answers:
        assert service.poll() is None, "the service ended before its broker answered"
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for the broker"
        time.sleep(0.05)
    return status
