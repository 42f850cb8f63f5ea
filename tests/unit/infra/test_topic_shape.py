"""Topics on a broker, compared with the table and with the copies that the configuration asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.errors import ConfigError
from infra.topic_shape import Durability, configs, require, shape_of
from schemas.topics import CONTROL, TASKS

TWO_OF_THREE = Durability(replicas=3, min_insync=2)
SHAPE = replace(shape_of(TASKS), replicas=3, min_insync=2)


def problems(shape, durability):
    """Return what is said about `tasks` when it has this shape."""
    with pytest.raises(ConfigError) as caught:
        require([TASKS], {"tasks": shape}, prefix="p.", where="kafka:9092", durability=durability)
    return str(caught.value)


def test_more_copies_than_asked_for_do_no_harm():
    """A cluster may be more careful than we are."""
    require([TASKS], {"tasks": replace(SHAPE, replicas=5, min_insync=3)}, prefix="", where="", durability=TWO_OF_THREE)
    require([TASKS], {"tasks": SHAPE}, prefix="", where="")


@pytest.mark.parametrize(
    ("shape", "durability", "says"),
    [
        (replace(SHAPE, replicas=2), TWO_OF_THREE, "p.tasks: a partition has 2 copies, bus.replication is 3"),
        (replace(SHAPE, min_insync=1), TWO_OF_THREE, "p.tasks: min.insync.replicas is 1, bus.min_insync is 2"),
        (replace(SHAPE, replicas=1), Durability(), "min.insync.replicas is 2 but there are only 1 copies: nothing"),
        (replace(SHAPE, partitions=3), TWO_OF_THREE, "p.tasks: partitions is 3, the table says 32"),
    ],
)
def test_a_topic_that_could_lose_records_or_take_none_is_named(shape, durability, says):
    """With the setting that asks for more."""
    assert says in problems(shape, durability)


def test_new_topics_get_the_copies_in_sync_that_are_asked_for():
    """Otherwise the cluster's own setting holds."""
    assert configs(shape_of(CONTROL), TWO_OF_THREE)["min.insync.replicas"] == "2"
    assert "min.insync.replicas" not in configs(shape_of(CONTROL))
