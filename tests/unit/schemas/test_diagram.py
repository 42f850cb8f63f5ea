"""The picture of the flow is the table, drawn."""

from __future__ import annotations

from schemas.diagram import flowchart, kept, table, way
from schemas.topics import CONTROL, EPISODES, EVENTS, INIT_RETRY_5S, TABLE, TASKS, TRAJECTORIES


def test_one_topic_as_a_flowchart():
    """Services are rounded, topics are cylinders, arrows go the way of the records."""
    assert flowchart([EPISODES]) == (
        "flowchart LR\n"
        "    service_init([init])\n"
        "    service_run([run])\n"
        "    topic_episodes[(episodes)]\n"
        "    service_init --> topic_episodes\n"
        "    topic_episodes --> service_run\n"
    )


def test_every_edge_of_the_table_is_drawn_once():
    """No writer and no reader is left out of the picture; tiers that differ by their delay are one."""
    edges = [line for line in flowchart().splitlines() if "-->" in line]
    tiers = {topic.name.rpartition(".")[0]: topic for topic in TABLE if topic.delay_ms}
    drawn = [*(topic for topic in TABLE if not topic.delay_ms), *tiers.values()]
    assert len(edges) == len(set(edges)) == sum(len(topic.producers) + len(topic.consumers) for topic in drawn)


def test_names_are_escaped_for_mermaid():
    """A dot may be in a label and not in an identifier."""
    assert "    topic_init_retry[(init.retry.*)]\n" in flowchart([INIT_RETRY_5S])


def test_the_way_leaves_out_what_everybody_uses():
    """A picture of nothing but what samples and decisions travel by."""
    assert {"events", "metrics", "control", "dead"} == {topic.name for topic in TABLE if topic not in way()}


def test_one_topic_as_a_row():
    """The table shows what the constant says."""
    assert table([EPISODES]).splitlines()[2] == "| `episodes` | Episode | 32 | round robin | init | run | 7 days |"


def test_types_by_their_tag():
    """Who has no Python knows messages by what is on the wire."""
    assert "| `rollmill.task` |" in table([TASKS], tags=True)


def test_every_topic_has_a_row():
    """The table is complete."""
    rows = table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [topic.name for topic in TABLE]


def test_retention_in_words():
    """Hours up to two days, then days; a compacted topic keeps the last of each key."""
    assert [kept(topic) for topic in (EVENTS, TRAJECTORIES, CONTROL)] == ["24 hours", "90 days", "the last of each key"]
