import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.handlers.base import Action
from stages.handlers.keydoor import PROMPT, KeyDoor
from stages.handlers.keydoor_policies import clumsy_walker, demonstration, expert, play, random_player

seeds = st.integers(min_value=0, max_value=2**63)


@given(seeds)
def test_the_expert_opens_every_door_in_the_optimum(seed):
    """The expert is the chart's upper bound: nobody is faster."""
    verdict = play(expert, {"turns": 18}, dice="0", seed=seed).verdict
    assert verdict["opened"]
    assert verdict["turns"] == verdict["optimum"]


def success(policy, plays: int = 300) -> float:
    return sum(play(policy, {}, dice=str(n), seed=n).verdict["opened"] for n in range(plays)) / plays


def test_the_players_are_ordered_random_clumsy_expert():
    """The clumsy walker leaves much to learn, and it is not hopeless."""
    assert success(random_player) < 0.02
    assert 0.03 < success(clumsy_walker) < 0.3
    assert success(expert) > 0.97


@settings(deadline=None, max_examples=25)  # a search: some seeds need a hundred plays
@given(seeds)
def test_a_demonstration_is_a_success_of_well_formed_actions(seed):
    """A warm start imitates only hunts that were won, and every assistant turn in them is an action."""
    messages = demonstration({"split": "train"}, seed)
    assert messages[0] == {"role": "system", "content": PROMPT}
    assert [message["role"] for message in messages[1:]] == ["user", "assistant"] * (len(messages) // 2)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert all(isinstance(KeyDoor().act(answer), Action) for answer in answers)
    assert "take" in answers
    assert answers[-1] == "open"


@settings(deadline=None, max_examples=25)  # a search: some seeds need a hundred plays
@given(seeds)
def test_a_demonstration_is_a_function_of_payload_and_seed(seed):
    """The same seed gives the same words in every process, another seed another hunt."""
    assert demonstration({}, seed) == demonstration({}, seed)


def test_a_hunt_that_cannot_be_won_gives_no_demonstration():
    """The search for a success has a limit, and the error says what to change."""
    with pytest.raises(ValueError, match="allow more turns"):
        demonstration({"turns": 2}, 0)
