from itertools import islice

import pytest

from benchmarks.replenish import ALGORITHM, Instances, sampling


def varies(instance):
    return len(set(instance.payload["success"])) > 1


def test_half_of_the_groups_say_nothing():
    """By a seeded draw, the same from any place on."""
    groups = list(islice(Instances(1).instances(), 400))

    assert sum(map(varies, groups)) == pytest.approx(200, abs=40)
    assert next(Instances(1).instances(7)) == groups[7]


def test_waits_have_a_heavy_tail():
    """Waiting for the slowest sibling of a batch costs several times its median."""
    waits = sorted(wait for group in islice(Instances(1).instances(), 8) for wait in group.payload["run_s"])

    assert waits[-1] > 4 * waits[len(waits) // 2]


async def test_both_sides_fill_their_steps():
    """Each gives a rate; a group that was not kept, or not graded as given, would end the round with an error."""
    async with sampling(steps=1) as at_work:
        rates = [await at_work.ours(0), await at_work.rival(1, 0)]

    assert all(0 < rate < 1000 for rate in rates)
    assert ALGORITHM.groups == 8
