"""The table of topics keeps its own rules."""

from __future__ import annotations

import re
import typing
from collections import Counter

import pytest

from schemas import topics
from schemas.claim import ClaimCheck
from schemas.message import Message
from schemas.messages import Rollout, Task
from schemas.retries import Delay
from schemas.topics import (
    DEAD,
    DECISIONS,
    EPISODES,
    ROLLOUTS,
    STAGE_PARTITIONS,
    TABLE,
    TASKS,
    TRAJECTORIES,
    Spread,
    Topic,
)
from tests.strategies import MESSAGE_TYPES

EACH = pytest.mark.parametrize("topic", TABLE, ids=str)


def test_names_are_unique():
    """A name means one topic."""
    assert [name for name, count in Counter(topic.name for topic in TABLE).items() if count > 1] == []


def test_every_topic_is_in_the_table():
    """A topic that is not in the table would never be created."""
    assert [value for value in vars(topics).values() if isinstance(value, Topic)] == list(TABLE)


def test_the_constant_is_the_name():
    """`INIT_RETRY_5S` is `init.retry.5s`: who reads the code finds the topic."""
    for name, value in vars(topics).items():
        if isinstance(value, Topic):
            assert value.name == name.lower().replace("_", ".")


@EACH
def test_names_are_good_for_kafka(topic):
    """Lower case with dots; underscores would collide with dots in Kafka's metrics."""
    assert re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", topic.name)
    assert str(topic) == topic.name


@pytest.mark.parametrize("topic", [TASKS, EPISODES, ROLLOUTS, DEAD], ids=str)
def test_stage_topics_have_one_partition_count(topic):
    """`dead` has as many, so that a record keeps its partition there."""
    assert topic.partitions == STAGE_PARTITIONS == 32


@pytest.mark.parametrize("topic", [TRAJECTORIES, DECISIONS], ids=str)
def test_a_run_lies_in_one_partition(topic):
    """Records of a run are ordered in the log: its arbiter is their offset."""
    assert topic.spread is Spread.RUN
    assert topic.partitions == 8


@EACH
def test_a_single_partition_is_one_partition(topic):
    """The word and the number agree."""
    assert (topic.spread is Spread.SINGLE) == (topic.partitions == 1)


@EACH
def test_state_is_compacted_and_the_rest_kept_by_time(topic):
    """Only `control` forgets what was replaced."""
    assert topic.compacted == (topic is topics.CONTROL)
    assert topic.compacted or topic.retention_ms > 0


@EACH
def test_a_retry_tier_says_its_delay_in_its_name(topic):
    """`init.retry.5s` is handled five seconds later, and nothing else is delayed."""
    match = re.fullmatch(r".*\.retry\.(\d+)([sm])", topic.name)
    assert topic.delay_ms == (int(match[1]) * {"s": 1_000, "m": 60_000}[match[2]] if match else 0)


@EACH
def test_every_topic_has_a_writer_and_a_reader(topic):
    """A topic that nobody reads, or writes, is a mistake."""
    assert topic.producers
    assert topic.consumers


def test_every_tag_is_unique():
    """Two types of one name could not be told apart in the log."""
    tags = Counter(kind.wire_type() for kind in (*MESSAGE_TYPES, ClaimCheck))
    assert [tag for tag, count in tags.items() if count > 1] == []


def test_every_message_has_a_topic():
    """A message that no topic carries cannot be said; a claim check stands for any of them."""
    assert set(_below(Message)) == {*MESSAGE_TYPES, ClaimCheck}


def test_what_is_made_again_is_a_task_at_init_and_a_rollout_at_eval():
    """A sample starts again from its task; only grading keeps what was made before."""
    tiers = {(topic.name.split(".")[0], topic.carries) for topic in TABLE if topic.delay_ms}
    assert tiers == {("init", (Task,)), ("eval", (Rollout,))}


@pytest.mark.parametrize("stage", ["init", "eval"])
def test_there_is_a_tier_for_each_delay(stage):
    """The names of the table of retries are the names of the tiers."""
    tiers = [topic.name for topic in TABLE if topic.delay_ms and topic.name.startswith(stage)]
    assert tiers == [f"{stage}.retry.{delay}" for delay in typing.get_args(Delay)]


def _below(kind: type) -> list[type]:
    return [
        found
        for child in kind.__subclasses__()
        for found in (child, *_below(child))
        if found.__module__.startswith("schemas.")
    ]
