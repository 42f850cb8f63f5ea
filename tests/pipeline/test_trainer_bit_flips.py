"""One flipped bit in a recorded trajectory: its step and sample are named, or it means nothing and nothing differs."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import RUN, SAMPLES, decisions, failure, memory_bus, run_config, task, trajectory

from infra.claims import claimed
from infra.clock import SystemClock
from infra.reading import read_between
from infra.trajectories import trajectories_of
from infra.wire import Publisher, unpack
from schemas.codec import DecodeError, decode
from schemas.decisions import Member, StepDecided
from schemas.messages import Trajectory
from schemas.topics import TRAJECTORIES
from trainer import loop
from trainer.diff import Kind, diff
from trainer.replay import replay

CLOCK = SystemClock()
LOG = trajectories_of(RUN)
OTHER = "s"
LARGE = {"compressed": 20_000, "claimed": 950_000}
"""Bytes of noise, in a payload as hexadecimal text, that let its record be compressed, or become a claim check."""


class Ended(NamedTuple):
    """A run that has ended, and what lies in its log."""

    bus: object
    records: tuple
    members: dict[int, tuple[int, Member]]
    """Offset -> the step that trained on the record, and its member."""

    @classmethod
    async def of(cls, bus):
        end = (await bus.end_offsets(LOG.topic))[LOG.partition]
        records = [record async for record in read_between(bus, CLOCK, {LOG: 0}, {LOG: end})]
        steps = [decision for _, decision in await decisions(bus) if isinstance(decision, StepDecided)]
        return cls(bus, tuple(records), {m.offset: (step.step, m) for step in steps for m in step.members})


class Bit(NamedTuple):
    """A bit of a record: of its value, or of a header's name or value."""

    offset: int
    header: int | None
    """Number of the header; none for the value."""
    part: int
    """0 for the header's name, 1 for its value."""
    bit: int


# ---- a log


@pytest.fixture(scope="module")
def ended(model, tmp_path_factory):
    """Return a run whose log has failures, repeats and dropped groups, and on the same bus another one like it."""
    return asyncio.run(trained(tmp_path_factory.mktemp("run"), model, groups=9, runs=(RUN, OTHER)))


@pytest.fixture(scope="module")
def short(model, tmp_path_factory):
    """Return a run of one step."""
    return asyncio.run(trained(tmp_path_factory.mktemp("run"), model, groups=2))


@pytest.fixture(scope="module", params=LARGE)
def large(request, model, tmp_path_factory):
    """Return a run of one step with one record that does not lie in the log as it is, and which."""
    noise = LARGE[request.param]
    found = asyncio.run(trained(tmp_path_factory.mktemp("run"), model, groups=2, noise=noise))
    packed = [one for one in found.records if one.header("content-encoding") or claimed(one)]
    assert [claimed(one) is not None for one in packed] == [request.param == "claimed"]
    assert packed[0].offset in found.members
    return found, packed


async def trained(tmp_path, model, *, groups, noise=0, runs=(RUN,)):
    bus, steps = await memory_bus(), groups // 2 - groups // 4
    for run in runs:
        await record(bus, run, groups, noise)
        config = run_config(tmp_path, model, run, stop={"max_steps": steps}).model_copy(update={"run": run})
        async with asyncio.timeout(240):
            await loop.run(config, bus, CLOCK)
    found = await Ended.of(bus)
    assert {step for step, _ in found.members.values()} == set(range(1, steps + 1))
    for run in runs:
        assert (await diff(bus, CLOCK, RUN, run)).empty
        assert (await replay(bus, CLOCK, run)).all_equal
    return found


async def record(bus, run, groups, noise):
    """Record groups between each other; some samples fail, some end twice, and in some groups all do the same."""
    draw, publisher = random.Random(5), Publisher(bus, CLOCK, "test")
    samples = [(number, sample) for number in range(groups) for sample in range(SAMPLES)]
    samples.sort(key=lambda item: item[0] + 2 * draw.random())
    for number, sample in samples:
        what = task(number, sample, run=run)
        if noise and (number, sample) == (1, 1):
            what = msgspec.structs.replace(what, payload={"noise": random.Random(1).randbytes(noise).hex()})
        failed = sample == 2 and number % 3 == 1
        graded = trajectory(what, float(number % 4 == 3 or sample == number % 2), seed=1)
        await publisher.publish(TRAJECTORIES, failure(what) if failed else graded)
        if number % 4 == 2 and sample == 1:
            await publisher.publish(TRAJECTORIES, trajectory(what, 1.0, seed=2))


# ---- a flip


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip(bus, which: Bit):
    """Flip a bit of the log; a second time puts it back."""
    if which.header is None:
        bus.log.rewrite(LOG, which.offset, lambda value: flipped(value, which.bit))
        return

    def change(headers):
        name, value = headers[which.header]
        if which.part == 0:
            # A name that is no text is handed out as latin-1 here: what matters is that it is another one.
            name = flipped(name.encode("latin-1"), which.bit).decode("latin-1")
        else:
            value = flipped(value, which.bit)
        return (*headers[: which.header], (name, value), *headers[which.header + 1 :])

    bus.log.rewrite_headers(LOG, which.offset, change)


def bits_of(record):
    """Return (header, part, bytes) of everything in a record that has bits."""
    headers = [(at, part, text) for at, pair in enumerate(record.headers) for part, text in enumerate(pair)]
    return [(None, 0, record.value), *headers]


@st.composite
def any_bit(draw, records):
    record = draw(st.sampled_from(records))
    header, part, data = draw(st.sampled_from([bits_of(record)[0], *bits_of(record)]))
    return Bit(record.offset, header, part, draw(st.integers(0, len(data) * 8 - 1)))


async def meant(bus, offset):
    """Return the wire bytes that a record stands for; none if it cannot be read."""
    found = [record async for record in read_between(bus, CLOCK, {LOG: offset}, {LOG: offset + 1})]
    try:
        return (await unpack(TRAJECTORIES, found[0], bus)).raw
    except DecodeError:
        return None


async def look(ended, which: Bit):
    """Return whether a record with a flipped bit means the same, and what `diff` and `replay` find."""
    before = await meant(ended.bus, which.offset)
    flip(ended.bus, which)
    try:
        after = await meant(ended.bus, which.offset)
        return before == after, await diff(ended.bus, CLOCK, RUN, RUN), await replay(ended.bus, CLOCK, RUN)
    finally:
        flip(ended.bus, which)


def check(ended, which: Bit):
    """Hold what a flipped bit may do; return whether it changed what its record means."""
    same, found, report = asyncio.run(look(ended, which))
    if same:
        assert found.empty
        assert report.all_equal
    elif which.offset in ended.members:
        assert_named(ended, which, found.divergence)
        assert found.divergence.step == report.first_difference.step
        assert found.divergence.cause.endswith(report.first_difference.cause.partition(": ")[2])
    elif not report.all_equal:
        # Of a record that nobody trained on no content is recorded. If it decided something, that is named.
        causes = [*(step.cause for step in report.steps if step.cause), *report.other_drops]
        assert all("g00" in cause for cause in causes), causes
    return not same


def assert_named(ended, which: Bit, named):
    """It is said which step, which sample, and where the record lies."""
    step, member = ended.members[which.offset]
    assert named is not None
    assert named.kind is Kind.CHANGED
    assert f"offset {which.offset}" in named.cause
    if named.step == step:
        assert f"{member.group}/{member.sample}" in named.cause
    else:
        # The record now comes first under the id of another group, whose own records count no longer.
        assert named.step < step
        assert "names another task" in named.cause


# ---- what is promised


@given(data=st.data())
@settings(max_examples=80)
def test_whatever_bit_of_a_record_flips_is_named_or_means_nothing(ended, data):
    """Value and headers, of records that were trained on and of others."""
    check(ended, data.draw(any_bit(ended.records)))


@given(data=st.data())
@settings(max_examples=40)
def test_a_flipped_bit_of_a_compressed_record_or_a_claim_check_is_named_or_means_nothing(large, data):
    """In the frame, in the claim, in the header that tells of either."""
    ended, packed = large
    check(ended, data.draw(any_bit(packed)))


@pytest.mark.parametrize("field", ["tokens", "mask", "logprobs", "reward"])
@given(data=st.data())
@settings(max_examples=8)
def test_a_flipped_bit_of_what_is_trained_on_is_always_named(ended, field, data):
    """No bit of a token id, of the mask, of a log-prob or of the reward is without meaning."""
    record = data.draw(st.sampled_from([one for one in ended.records if one.offset in ended.members]))
    begin, length = place_of(record.value, field)
    bit = data.draw(st.integers(begin * 8, (begin + length) * 8 - 1))

    assert check(ended, Bit(record.offset, None, 0, bit))


def place_of(value, field):
    """Return where the bytes of a field begin, and how many they are."""
    message = decode(value, Trajectory)
    if field == "reward":
        return value.index(b"reward\xcb") + len(b"reward\xcb"), 8
    data = getattr(message.transcript, field)
    return value.index(data), len(data)


@given(data=st.data())
@settings(max_examples=30)
def test_a_flipped_bit_does_not_keep_a_run_from_being_compared_with_another(ended, data):
    """What was trained on is named as changed, in the run that it was changed in; anything else may differ or not."""
    which = data.draw(any_bit(ended.records))

    async def compare():
        before = await meant(ended.bus, which.offset)
        flip(ended.bus, which)
        try:
            return before == await meant(ended.bus, which.offset), await diff(ended.bus, CLOCK, OTHER, RUN)
        finally:
            flip(ended.bus, which)

    same, found = asyncio.run(compare())
    if same:
        assert found.empty
    elif which.offset in ended.members:
        assert_named(ended, which, found.divergence)
        assert found.divergence.cause.startswith(f"{RUN}: ")


@pytest.mark.parametrize("large", ["claimed"], indirect=True)
async def test_a_blob_that_was_changed_is_named_by_the_sample_that_it_belongs_to(large):
    """The record is the same, and what it speaks of is not."""
    ended, packed = large
    digest, blobs = claimed(packed[0]), ended.bus.blobs
    data = await blobs.get(digest)
    blobs.damage(digest)
    try:
        found, report = await diff(ended.bus, CLOCK, RUN, RUN), await replay(ended.bus, CLOCK, RUN)
    finally:
        await blobs.put(data)

    step, member = ended.members[packed[0].offset]
    for named, cause in ((found.divergence.step, found.divergence.cause), first_of(report)):
        assert named == step
        assert f"{member.group}/{member.sample}" in cause
        assert f"offset {member.offset} cannot be read any more" in cause


def first_of(report):
    return report.first_difference.step, report.first_difference.cause


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=1000)
def test_any_of_many_flipped_bits_is_named_or_means_nothing(ended, data):
    """The same, for longer."""
    check(ended, data.draw(any_bit(ended.records)))


@pytest.mark.slow
def test_every_single_bit_of_a_record_that_was_trained_on_is_named_or_means_nothing(short):
    """One record, from the first bit of its value to the last one of its last header."""
    offset = min(short.members)
    record = next(one for one in short.records if one.offset == offset)
    flips = [Bit(offset, header, part, bit) for header, part, data in bits_of(record) for bit in range(len(data) * 8)]

    changed = sum(check(short, which) for which in flips)

    # All of the value has a meaning; of the headers only how the value is packed has, and this one is not.
    assert len(record.value) * 8 - changed < 64
