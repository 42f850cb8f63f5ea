"""The digest that tells whether two trainer steps are the same step."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.batch import batch_digest, content_hash
from schemas.decisions import Member
from tests.golden.samples import MEMBERS
from tests.strategies import structs


def test_the_digest_is_over_the_members_in_order():
    """Anybody can compute it: text fields with a zero byte after each, then the reward as a double."""
    expected = hashlib.sha256()
    for member in MEMBERS:
        for part in (member.group, str(member.sample), str(member.offset), member.content):
            expected.update(part.encode() + b"\x00")
        expected.update(struct.pack("<d", member.reward))
    assert batch_digest(MEMBERS) == expected.hexdigest()
    assert batch_digest(reversed(MEMBERS)) != batch_digest(MEMBERS)


@pytest.mark.parametrize(
    "change", [{"group": "other"}, {"sample": 7}, {"offset": 7}, {"content": "c" * 64}, {"reward": 0.25}]
)
def test_every_field_of_a_member_counts(change):
    """A batch of the same samples with other rewards is another batch."""
    assert batch_digest([msgspec.structs.replace(MEMBERS[0], **change), MEMBERS[1]]) != batch_digest(MEMBERS)


@given(members=st.lists(structs(Member), max_size=4))
def test_the_digest_is_the_same_after_the_wire(members):
    """A step read back from the log has the digest that was written into it."""
    again = [msgspec.convert(msgspec.to_builtins(member), Member) for member in members]
    assert batch_digest(again) == batch_digest(members)


def test_the_content_hash_is_sha256():
    """Any tool can check a record against a decision."""
    assert content_hash(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
