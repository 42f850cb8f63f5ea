from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_log import START, end, rules

from infra.errors import ConfigError
from trainer.advantages import step_advantages
from trainer.algorithm_config import Estimator
from trainer.group import Group
from trainer.groups import GroupAssembler
from trainer.shuffle import shuffled


def group(name, rewards, **changes):
    """Return a complete group whose siblings earned these rewards."""
    completed = tuple(end(i, name, i, float(reward), samples=len(rewards)) for i, reward in enumerate(rewards))
    return Group(id=name, admission=0, first=0, completed=completed, excluded=0, **changes)


def rewards(group):
    return [sibling.reward for sibling in group.completed]


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8), st.integers(0, 2**31))
def test_siblings_trade_rewards_and_nothing_else(earned, seed):
    """The same rewards in another order; samples, their success and their order stay."""
    before = group("a", earned)
    after = shuffled(before, seed)

    assert sorted(rewards(after)) == sorted(earned)
    assert [(t.sample, t.success, t.content) for t in after.completed] == [
        (t.sample, t.success, t.content) for t in before.completed
    ]
    assert after == shuffled(before, seed)


def test_whose_reward_a_sibling_gets_does_not_depend_on_what_it_did():
    """Over many groups the one that succeeded keeps its reward no more often than any other gets it."""
    taker = Counter(rewards(shuffled(group(f"g{n}", [1, 0, 0, 0]), 3)).index(1.0) for n in range(4_000))

    assert all(abs(count - 1_000) < 120 for count in taker.values()), taker


@pytest.mark.parametrize("estimator", [Estimator.GRPO, Estimator.RLOO, Estimator.REINFORCE_PLUS_PLUS])
def test_the_expected_advantage_of_a_success_is_nothing(estimator):
    """Nothing can be learnt where a success is worth as much as a failure."""
    groups = [shuffled(group(f"g{n}", [1, 1, 0, 0]), 0) for n in range(2_000)]
    found = step_advantages([g.completed for g in groups], estimator, std=True)
    succeeded = [float(a) for a, t in zip(found, [t for g in groups for t in g.completed], strict=True) if t.success]

    assert abs(sum(succeeded) / len(succeeded)) < 0.06


def test_the_order_is_the_same_on_every_machine():
    """It is a hash, written down here."""
    assert rewards(shuffled(group("a", [0, 1, 2, 3]), 5)) == [1.0, 3.0, 0.0, 2.0]
    assert rewards(shuffled(group("a", [0, 1, 2, 3]), 6)) == [2.0, 0.0, 1.0, 3.0]


def test_process_rewards_are_refused_by_name():
    """Turns of different episodes cannot trade."""
    record = end(4, "a", 1, 1.0, turns=2, turn_rewards=(0.0, 1.0), family="maze")
    plain = Group(id="a", admission=0, first=0, completed=(record,), excluded=0)

    with pytest.raises(ConfigError, match=r"a/1 at offset 4 has process rewards.*'maze' by outcome"):
        shuffled(plain, 0)


def test_a_group_is_kept_or_dropped_as_without_the_control():
    """The test looks at success, and the batch holds what was traded."""
    log = [end(0, "a", 0, 1.0), end(1, "a", 1), end(2, "b", 0), end(3, "b", 1), end(4, "c", 0, 1.0), end(5, "c", 1)]

    def decided(**changes):
        assembler = GroupAssembler(rules(**changes), START, versions={0: 0})
        return [event for record in log for event in assembler.feed(record)]

    (dropped, step), (dropped_too, control_step) = decided(), decided(shuffle_seed=2)
    assert dropped.group.id == dropped_too.group.id == "b"
    assert [m.reward for m in step.members] == [1.0, 0.0, 1.0, 0.0]
    assert [t.success for t in control_step.terminals] == [1.0, 0.0, 1.0, 0.0]
    assert step.digest != control_step.digest
