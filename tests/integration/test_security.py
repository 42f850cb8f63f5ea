"""Secured listeners of a real broker: who may come in does the whole work of a service, who may not learns why."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest, DescribeAclsRequest

from infra import kafka_reach
from infra.broker.errors import JarsNotResolved, JavaNotFound, MavenNotFound
from infra.bus import Bus, Committed, TopicPartition
from infra.config import BusConfig
from infra.connect import connected
from infra.errors import BusError
from infra.kafka import KafkaBus, KafkaLimits
from infra.security_config import SecurityConfig
from rollmill import doctor
from schemas.access import Access, access
from schemas.topics import CONTROL, DEFAULT_PREFIX, TABLE
from tests.secure_kafka import PASSWORD, USER, SecureKafka, secure_kafka

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FAST = ("init", "status")
"""A service that does everything, and one that only reads; the others are like them."""

SERVICES = tuple(needed.service for needed in access())
WAIT_S = 60.0
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

WAYS_IN = {
    "tls": {"protocol": "ssl"},
    "mutual": {"protocol": "ssl", "cert_file": "client.pem", "key_file": "client.key"},
    "mutual, locked key": {
        "protocol": "ssl",
        "cert_file": "client.pem",
        "key_file": "locked.key",
        "key_password": PASSWORD,
    },
    **{f"login, {name}": {"protocol": "sasl_ssl", "mechanism": name} for name in MECHANISMS},
    "bare, SCRAM-SHA-512": {"protocol": "sasl_plaintext", "mechanism": "SCRAM-SHA-512"},
}
"""Listener and what is special -> settings."""

REFUSED = {
    **{
        f"login, {name}": ({"protocol": "sasl_ssl", "mechanism": name}, "wrong password, or no such")
        for name in MECHANISMS
    },
    "tls, authority of a stranger": ({"protocol": "ssl", "ca_file": "other.pem"}, "certificate .* is not accepted"),
    "mutual, no certificate": ({"protocol": "ssl"}, "refused the TLS connection .*check bus.security.cert_file"),
    "mutual, certificate of a stranger": (
        {"protocol": "ssl", "cert_file": "stranger.pem", "key_file": "stranger.key"},
        "refused the TLS connection .*check bus.security.cert_file",
    ),
    "tls, by a user": (
        {"protocol": "sasl_ssl", "mechanism": "PLAIN"},
        "takes no log-in, .*set bus.security.protocol to ssl",
    ),
}
"""What ends at once."""

MISTAKEN = {
    "tls": ({"protocol": "plaintext"}, "closes them unanswered .* does its listener want TLS or a log-in"),
    "bare": ({"protocol": "plaintext"}, "speaks Kafka but closes .* does its listener want a log-in"),
    "plaintext": ({"protocol": "ssl"}, "speaks no TLS .* is its listener plaintext"),
    "login": ({"protocol": "ssl"}, "speaks Kafka but closes .* does its listener want a log-in"),
}
"""What may heal, so that it is tried until the limit."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory) -> Iterator[SecureKafka]:
    """A broker whose users are named after services. Where it cannot run: a skip, in CI an error."""
    try:
        with secure_kafka(tmp_path_factory.mktemp("secure"), users=(USER, *SERVICES)) as running:
            yield running
    except (JavaNotFound, MavenNotFound, JarsNotResolved) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Kafka: {error}")


@pytest.fixture(autouse=True)
async def all_connections_end():
    """The client library does not await the end of each connection, and over TLS that takes a round trip."""
    yield
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        while len(loop._selector.get_map()) > 1:  # the one that is left is the loop's own
            await asyncio.sleep(0.01)


def settings(secured: SecureKafka, given: dict[str, str], *, user: str = USER, password: str = PASSWORD) -> dict:
    """Return settings with what belongs to the protocol, and files by their path."""
    whole = dict(given)
    if whole["protocol"] in ("ssl", "sasl_ssl"):
        whole.setdefault("ca_file", "ca.pem")
    if whole["protocol"].startswith("sasl"):
        whole |= {"user": user, "password": password}
    return {
        name: str(secured.certificates.folder / value) if name.endswith("_file") else value
        for name, value in whole.items()
    }


def bus_to(secured: SecureKafka, listener: str, given: dict[str, str]) -> KafkaBus:
    """Return a bus to a listener."""
    address = secured.addresses[listener.partition(",")[0]]
    limits = KafkaLimits(connect_s=WAIT_S)
    return KafkaBus(address, prefix="secured.", limits=limits, security=SecurityConfig(**given).open())


def assert_no_secret(text: str) -> None:
    """Neither as it is nor in the forms in which it travels."""
    for password in (PASSWORD, f"not {PASSWORD}"):
        assert password not in text
        assert repr(password)[1:-1] not in text
        assert str(password.encode())[2:-1] not in text
        assert base64.b64encode(password.encode()).decode() not in text


@pytest.mark.parametrize("way", WAYS_IN)
async def test_who_may_come_in_does_the_work_of_a_service(secured, way, caplog):
    """Topics, publishing, a group, a reader: each client of the bus is secured; at DEBUG no log has the password."""
    caplog.set_level(logging.DEBUG)
    bus = bus_to(secured, way, settings(secured, WAYS_IN[way]))
    await bus.start()
    try:
        await bus.create_topics([CONTROL])
        await bus.check_topics([CONTROL])
        placed = await bus.publish("control", way.encode(), key=way.encode())
        member = await bus.join(["control"], way.replace(", ", "-"))
        by_group = await until_found(member, way.encode())
        await member.close()
        reader = await bus.read({TopicPartition("control", placed.partition): placed.offset})
        by_reader = await until_found(reader, way.encode())
        await reader.close()
    finally:
        await bus.close()

    assert (placed.offset, placed.offset) == (by_group, by_reader)
    assert_no_secret(caplog.text)


async def until_found(source, value: bytes) -> int:
    """Return the offset of a value."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for record in await source.poll(100, 0.2):
                if record.value == value:
                    return record.offset


@pytest.mark.parametrize("case", REFUSED)
async def test_who_is_refused_learns_what_to_check_and_no_secret_is_told(secured, case, caplog):
    """At once, long before the limit: more tries would not help."""
    caplog.set_level(logging.DEBUG)
    given, says = REFUSED[case]
    wrong = f"not {PASSWORD}" if case.startswith("login") else PASSWORD
    bus = bus_to(secured, case, settings(secured, given, password=wrong))
    with pytest.raises(BusError, match=says) as caught:
        await bus.start()

    assert_no_secret(caplog.text + str(caught.value) + repr(caught.value.__cause__))


@pytest.mark.parametrize("listener", MISTAKEN)
async def test_who_takes_one_listener_for_another_learns_so(secured, listener):
    """Plaintext to TLS, TLS to plaintext, no user where one is wanted."""
    given, says = MISTAKEN[listener]
    address = {**secured.addresses, "plaintext": secured.plaintext}[listener]
    trouble = await kafka_reach._ask(address, SecurityConfig(**settings(secured, given)).open(), limit_s=WAIT_S)

    assert isinstance(trouble, kafka_reach.Trouble)
    assert re.search(says, trouble.text), trouble.text


async def test_the_doctor_connects_as_the_services_do(secured):
    """With the same words when it cannot, and without the secret."""
    config = SecurityConfig(**settings(secured, WAYS_IN["login, PLAIN"]))
    wrong = SecurityConfig(**settings(secured, WAYS_IN["login, PLAIN"], password=f"not {PASSWORD}"))
    good = await doctor._kafka(secured.addresses["login"], config)
    bad = await doctor._kafka(secured.addresses["login"], wrong)

    assert (doctor.Verdict.OK, doctor.Verdict.MISSING) == (good.verdict, bad.verdict)
    assert "with 1 brokers" in good.found
    assert "wrong password" in bad.found
    assert_no_secret(json.dumps([asdict(good), asdict(bad)], ensure_ascii=False))


def test_a_command_says_what_to_check_and_not_the_password(secured, tmp_path):
    """`rollmill status --json` with the settings in a file and the password in the environment."""
    given = settings(secured, WAYS_IN["login, SCRAM-SHA-256"])
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items() if name != "password"]
    path = tmp_path / "rollmill.toml"
    path.write_text("\n".join([f"[bus]\nbootstrap = '{secured.addresses['login']}'", "[bus.security]", *lines]))
    found = [
        subprocess.run(
            [sys.executable, "-m", "rollmill", *command, "--json", "--config", str(path)],
            cwd=ROOT,
            env={**os.environ, "ROLLMILL_BUS__SECURITY__PASSWORD": password},
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        for command, password in ((("broker", "topics", "--create"), PASSWORD), (("status",), f"not {PASSWORD}"))
    ]

    assert [0, 1] == [done.returncode for done in found], found
    assert f"refused user '{USER}' by SCRAM-SHA-256: wrong password" in found[1].stderr
    assert ["", 1] == [found[0].stderr, found[1].stderr.count("\n")], "no noise at the end"
    assert_no_secret("".join(done.stdout + done.stderr for done in found))


READ, WRITE, DESCRIBE, DESCRIBE_CONFIGS = 3, 4, 8, 10
TOPIC, GROUP, ANY = 2, 3, 1
LITERAL, PREFIXED = 3, 4
ALLOW = 3


def grants(needed: Access) -> list[tuple[int, str, int, str, str, int, int]]:
    """Return what docs/security.md says of a service, as Kafka's entries."""
    rows = [(TOPIC, "", PREFIXED, operation) for operation in (DESCRIBE, DESCRIBE_CONFIGS)]
    rows += [(TOPIC, name, LITERAL, READ) for name in needed.reads]
    rows += [(TOPIC, name, LITERAL, WRITE) for name in needed.writes]
    rows += [(GROUP, needed.joins, LITERAL, READ)] if needed.joins else []
    rows += [(GROUP, needed.joins_under, PREFIXED, READ)] if needed.joins_under else []
    rows += [(GROUP, name, LITERAL, DESCRIBE) for name in needed.looks_at]
    who = f"User:{needed.service}"
    return [
        (kind, DEFAULT_PREFIX + name, pattern, who, "*", operation, ALLOW) for kind, name, pattern, operation in rows
    ]


async def prepare_lists(address: str) -> None:
    """Make the topics of the table and the access control lists of the documentation."""
    async with connected(BusConfig(bootstrap=address), client="admin", check=False) as bus:
        await bus.create_topics(TABLE)
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    try:
        entries = [entry for needed in access() for entry in grants(needed)]
        for entry in entries:
            answer = await admin._send_request(CreateAclsRequest(*entry))
            assert [code for code, _ in answer.creation_responses] == [0], answer
        async with asyncio.timeout(WAIT_S):
            known = 0
            while known < len(entries):  # the broker learns of them a moment after it has stored them
                found = await admin._send_request(DescribeAclsRequest(ANY, None, ANY, None, None, ANY, ANY))
                known = sum(len(resource[3]) for resource in found.resources)
    finally:
        await admin.close()


@pytest.fixture(scope="module")
def listed(secured: SecureKafka) -> SecureKafka:
    """The broker with its topics and lists."""
    asyncio.run(prepare_lists(secured.plaintext))
    return secured


@pytest.mark.parametrize(
    "needed",
    [pytest.param(one, marks=() if one.service in FAST else pytest.mark.slow, id=one.service) for one in access()],
)
async def test_the_documented_lists_let_each_service_do_its_work_and_nothing_else(listed, needed):
    """As that user: its topics and its group work; a topic that it does not write or read is refused by name."""
    login = settings(listed, WAYS_IN["login, SCRAM-SHA-256"], user=needed.service)
    config = BusConfig(bootstrap=listed.addresses["login"], security=SecurityConfig(**login))
    names = [topic.name for topic in TABLE]
    not_written = next(name for name in names if name not in needed.writes)
    not_read = next(name for name in names if name not in needed.reads)
    async with connected(config, client=needed.service) as bus:
        for name in needed.writes:
            await bus.publish(name, b"x", key=b"k", partition=0)
        for name in needed.reads:
            reader = await bus.read({TopicPartition(name, 0): (await bus.end_offsets(name))[0]})
            await reader.poll(1, 0.0)
            await reader.close()
        for group in needed.looks_at:
            await bus.committed(group, "tasks")
        for group in filter(None, (needed.joins, needed.joins_under and f"{needed.joins_under}1")):
            member = await bus.join(list(needed.reads), group)
            await member.commit({TopicPartition(needed.reads[0], 0): Committed(0)})
            await member.close()
        nowhere = "the cluster or any topic" if not needed.writes else f"the topic .*{not_written}"
        with pytest.raises(BusError, match=rf"user '{needed.service}' has no access on {nowhere}"):
            await bus.publish(not_written, b"x", key=b"k")
        with pytest.raises(BusError, match=r"Authorization|no access"):
            await read_until_refused(bus, not_read)


async def read_until_refused(bus: Bus, topic: str) -> None:
    """Read a topic; the first answers may say nothing yet."""
    reader = await bus.read({TopicPartition(topic, 0): (await bus.begin_offsets(topic))[0]})
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                await reader.poll(1, 0.1)
    finally:
        await reader.close()


async def test_who_is_in_no_list_is_told_what_is_missing(listed):
    """Not that the topics were missing, which it cannot know."""
    security = SecurityConfig(protocol="ssl", **certificate(listed, "guest"))
    config = BusConfig(bootstrap=listed.addresses["mutual"], security=security)
    with pytest.raises(BusError, match=r"this client has no DESCRIBE on .*rollmill.tasks.* docs/security.md"):
        async with connected(config, client="guest"):
            pass


def certificate(secured: SecureKafka, name: str) -> dict[str, str]:
    """Return the settings of a certificate."""
    files = {"ca_file": "ca.pem", "cert_file": f"{name}.pem", "key_file": f"{name}.key"}
    return {setting: str(secured.certificates.folder / file) for setting, file in files.items()}
