"""The wire page is true: its generated parts are fresh, its code runs, its numbers and headers are the real ones."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import zstandard
from hypothesis import given

from infra.blobs import KEEP_MS
from infra.blobs.directory import DirectoryBlobs
from infra.bus import Record
from infra.clock import VirtualClock
from infra.dead_letter import Death, bury
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas import codec, identity
from schemas.claim import ClaimCheck
from schemas.codec import encode
from schemas.control import Control, control_key
from schemas.limits import COMPRESS_OVER, INLINE_BYTES, VALUE_BYTES
from schemas.partition import murmur2
from schemas.topics import DEAD, DEFAULT_PREFIX, HOUR_MS, TABLE, TASKS
from tests.golden.samples import SAMPLES, TASK, golden_file
from tests.logs import read_all
from tests.strategies import FREE_FORM

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
CODE = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


def run(name: str) -> dict[str, Any]:
    """Return what a code block of the page defines."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(CODE[name], name, "exec"), names)
    return names


CONSUMER = run("consumer.py")
IDENTITY = run("identity.py")
CLAIM = run("claim.py")
NOISE = random.Random(5).randbytes(INLINE_BYTES)
"""Too large for a record, whatever is done with it."""


@pytest.fixture
async def bus() -> MemoryBus:
    """A log in memory with every topic of the table."""
    log = MemoryBus()
    await log.create_topics(TABLE)
    return log


def test_generated_parts_are_fresh():
    """Whoever changes a message runs `python -m docs.refresh`."""
    checked = subprocess.run(
        [sys.executable, "-m", "docs.refresh", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.stdout == ""
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(("topic", "kind"), [(topic, kind) for topic in TABLE for kind in topic.carries], ids=str)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "zstd"])
def test_the_consumer_decodes_every_topic(topic, kind, compressed):
    """Forty lines without our code read the golden bytes of whatever may lie on a topic."""
    for name in (name for name in SAMPLES if type(SAMPLES[name]) is kind):
        value = golden_file(name).read_bytes()
        headers = {"content-encoding": b"zstd"} if compressed else {}
        sent = zstandard.compress(value) if compressed else value
        message = CONSUMER["decode"](topic.name, sent, {**headers, "x-cause": b"why"})
        if topic.name == "dead":
            assert message == {"bytes": sent, "cause": "why"}
        else:
            assert message["type"] == kind.wire_type()
            assert set(msgpack.unpackb(value)) == set(message)


def test_the_consumer_unpacks_token_arrays():
    """The arrays are what the transcript's own views show."""
    message = CONSUMER["decode"]("rollouts", golden_file("rollmill.rollout").read_bytes(), {})
    transcript = SAMPLES["rollmill.rollout"].transcript
    assert list(message["transcript"]["tokens"]) == transcript.token_ids.tolist()
    assert list(message["transcript"]["mask"]) == transcript.mask_array.tolist()
    assert list(message["transcript"]["logprobs"]) == transcript.logprob_array.tolist()


def test_the_consumer_takes_tombstones_and_refuses_other_versions():
    """A removed key has no value, and a future version is not guessed at."""
    assert CONSUMER["decode"]("control", None, {}) is None
    with pytest.raises(ValueError, match="major version 2"):
        CONSUMER["decode"]("tasks", msgpack.packb({"v": 2, "type": "rollmill.task"}), {})


def test_the_consumer_names_every_topic():
    """The list in the example is the table's."""
    assert [topic.name for topic in TABLE] == CONSUMER["TOPICS"]
    assert CONSUMER["PREFIX"] == DEFAULT_PREFIX


def test_the_consumer_is_forty_lines_on_public_packages():
    """A Kafka client, msgpack and zstandard are enough, and it stays short."""
    code = CODE["consumer.py"].rstrip().splitlines()
    assert len(code) <= 45
    assert sum(bool(line.strip()) for line in code) <= 40
    imported = {line.split()[1] for line in code if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) == {"aiokafka", "msgpack", "zstandard"}


@given(payload=FREE_FORM.filter(lambda value: isinstance(value, dict)))
def test_the_pages_identity_is_ours(payload):
    """A producer in another language names the same groups."""
    assert IDENTITY["payload_digest"](payload) == identity.payload_digest(payload)
    assert IDENTITY["group_id"]("r", "s", 1, 2, payload) == identity.group_id("r", "s", 1, 2, payload)


def test_the_pages_task_is_the_golden_one():
    """The hex on the page, decoded, is the sample; a reader can check an encoder of their own against it."""
    shown = re.search(r"in hex:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert bytes.fromhex(shown[1]) == encode(TASK)


@pytest.mark.parametrize("text", ["foobar", "abc"])
def test_the_pages_hashes_are_right(text):
    """The two vectors tell whether somebody's murmur2 is Kafka's."""
    assert f'murmur2("{text}") = 0x{murmur2(text.encode()):08x}' in PAGE


def test_the_pages_limits_are_ours():
    """The numbers in the prose are the constants."""
    prose = " ".join(PAGE.split())
    assert f"up to {COMPRESS_OVER // 1024} KiB" in prose
    assert f"{VALUE_BYTES // 2**20} MiB uncompressed" in prose
    assert f"a record at most {INLINE_BYTES:,} bytes as sent, with key and headers" in prose
    assert f"once it is {KEEP_MS // (24 * HOUR_MS)} days old" in prose
    assert f"{codec.MAX_ITEMS:,} values" in prose
    assert f"at most {codec.MAX_DEPTH} deep" in prose


def headers_on_the_page(before: str) -> set[str]:
    """Return the names in the header table that follows a phrase."""
    rows = PAGE.split(before)[1].split("|---|---|\n")[1].split("\n\n")[0]
    return {row.split("`")[1] for row in rows.splitlines()}


async def test_the_pages_headers_are_what_is_sent(bus):
    """The table lists each header that a publisher writes, and no other."""
    publisher = Publisher(bus, VirtualClock(), "run-3")
    for value in ("x" * COMPRESS_OVER, NOISE):
        large = msgspec.structs.replace(TASK, payload={"value": value})
        await publisher.publish(TASKS, large, first_failed_ms=4)
    sent = {name for record in await read_all(bus, TASKS) for name, _ in record.headers}
    assert headers_on_the_page("**Headers**") == sent


@pytest.mark.parametrize("value", [NOISE, NOISE.hex()], ids=["plain", "zstd"])
async def test_the_pages_readers_redeem_what_we_send(tmp_path, value):
    """The two examples together read a large message without our code."""
    store = DirectoryBlobs(tmp_path, VirtualClock())
    await store.create()
    bus = MemoryBus(blobs=store)
    await bus.create_topics(TABLE)
    await Publisher(bus, VirtualClock(), "run-3").publish(
        TASKS, msgspec.structs.replace(TASK, payload={"value": value})
    )
    (record,) = await read_all(bus, TASKS)
    ticket = CONSUMER["decode"]("tasks", record.value, dict(record.headers))
    assert (ticket["type"], ticket["digest"].encode()) == (ClaimCheck.wire_type(), dict(record.headers)["claim-check"])

    message = CONSUMER["decode"](
        "tasks", CLAIM["redeem"](tmp_path, ticket), {"content-encoding": ticket["encoding"].encode()}
    )

    assert message["payload"] == {"value": value}
    with pytest.raises(ValueError, match="no digest"):
        CLAIM["redeem"](tmp_path, {"digest": "../" * 20 + "etc/passwd"})


async def test_the_pages_dead_letter_headers_are_what_is_sent(bus):
    """Who looks into `dead` finds what the page promises."""
    poison = Record(topic="tasks", partition=3, offset=4, timestamp_ms=5, key=b"k", value=b"\xc1")
    death = Death(stage="init", cause="not msgpack", kind="engine", attempts=3, first_failed_ms=4)
    await bury(bus, VirtualClock(), poison, death)
    (record,) = await read_all(bus, DEAD)
    assert headers_on_the_page("**`dead`**") == {name for name, _ in record.headers}


def test_the_pages_control_keys_are_ours():
    """Every kind of state is on the list."""
    kinds = {control_key(message).split("/")[0] for message in SAMPLES.values() if isinstance(message, Control)}
    for kind in kinds:
        assert f"`{kind}/<" in PAGE
