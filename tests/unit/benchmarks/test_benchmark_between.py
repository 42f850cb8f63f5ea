import pytest

from benchmarks.between import Between, installed
from stages.handlers import registry
from stages.handlers.base import Action, Invalid


def test_a_seed_decides_the_numbers_and_what_lies_between_them_is_right():
    """Siblings and retries meet the same question; the two numbers themselves do not count."""
    family = Between()

    for seed in range(50):
        bounds = family.environment({}, seed)
        assert bounds.reset() == family.environment({}, seed).reset()
        for number in range(100):
            bounds.reset()
            assert bounds.step({"name": "say", "arguments": {"number": number}}).done
            assert family.grade(None, bounds.verdict()).success == (bounds.low < number < bounds.high)


def test_no_answer_is_wrong():
    """An episode that a malformed text ended is graded too."""
    assert Between().grade(None, Between().environment({}, 0).verdict()).success == 0.0


@pytest.mark.parametrize("text", ["71", " 71.", "It is 71"])
def test_one_number_is_an_answer(text):
    """Whatever stands around it."""
    action = Between().act(text)

    assert isinstance(action, Action)
    assert action.arguments == {"number": 71}


@pytest.mark.parametrize("text", ["", "none", "38 and 71"])
def test_anything_else_is_not(text):
    """Who says both has not chosen."""
    assert isinstance(Between().act(text), Invalid)


def test_the_family_is_found_as_third_parties_are(tmp_path):
    """Through an entry point of a distribution on the path, while it is asked for."""
    with installed(tmp_path / "family"):
        assert "between" in registry.families()
    assert "between" not in registry.families()
