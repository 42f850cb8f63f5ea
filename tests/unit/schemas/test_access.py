"""What an access control list must allow is the topic table, seen from the services."""

from __future__ import annotations

from schemas.access import JOINS, JOINS_UNDER, access, access_table, acl_commands
from schemas.topics import EPISODES, EVENTS, ROLLOUTS, TABLE


def test_one_service_of_a_small_table():
    """RUN reads its sources in its group, and writes its sink."""
    (run,) = [needed for needed in access([EPISODES, ROLLOUTS]) if needed.service == "run"]
    assert (("episodes",), ("rollouts",), "run", ()) == (run.reads, run.writes, run.joins, run.looks_at)


def test_every_edge_of_the_table_is_granted_once():
    """No service is left out, and none gets what it does not use."""
    needed = access()
    reads = sorted((one.service, name) for one in needed for name in one.reads)
    writes = sorted((one.service, name) for one in needed for name in one.writes)
    assert reads == sorted((service, topic.name) for topic in TABLE for service in topic.consumers)
    assert writes == sorted((service, topic.name) for topic in TABLE for service in topic.producers)


def test_groups_belong_to_services_that_read():
    """A group that nobody joins would be a grant for nobody."""
    assert {one.service for one in access() if one.reads and one.joins} == set(JOINS)
    assert {one.service for one in access() if one.reads and one.joins_under} == set(JOINS_UNDER)


def test_a_service_whose_groups_have_many_names_is_granted_all_of_them():
    """Each life of a board joins a group of its own."""
    commands = acl_commands("board", prefix="p.", user="bob", topics=[EVENTS]).splitlines()
    assert commands[-1] == "acls --operation Read --group p.board- --resource-pattern-type prefixed"
    assert "| board | `events` | - | READ all that begin with `board-` |" in access_table()


def test_the_page_has_a_row_for_each_service():
    """Empty cells say so."""
    rows = access_table().splitlines()[2:]
    assert [row.split(" ")[1] for row in rows] == [needed.service for needed in access()]
    assert "| policy | `control` | `metrics`, `control` | - |" in rows
    assert all("|  |" not in row for row in rows)


def test_the_commands_of_one_service_are_its_row():
    """With the prefix, which the table does not know."""
    commands = acl_commands("run", prefix="p.", user="alice", topics=[EPISODES, ROLLOUTS]).splitlines()
    assert "User:alice" in commands[0]
    assert commands[1:] == [
        "acls --operation Describe --operation DescribeConfigs --topic p. --resource-pattern-type prefixed",
        "acls --operation Read --topic p.episodes",
        "acls --operation Write --topic p.rollouts",
        "acls --operation Read --group p.run",
    ]
