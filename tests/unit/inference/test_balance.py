"""Where generations go: to the engine that ends them first, episodes and siblings together while that costs little."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.inference.balance import FIRST_SHARE, RAMP_S, STAY, Ask, Balancer

LATER = 10 * RAMP_S
"""By then every engine has its full share."""


def balancer(*names, **weights):
    """Return a balancer whose engines have their full share, without a measured speed."""
    found = Balancer()
    for name in (*names, *weights):
        found.add(name, 0.0, weight=weights.get(name, 1.0))
    return found


def ask(episode="e", group="g", prompt=100, max_tokens=1000):
    return Ask(episode=episode, group=group, prompt=prompt, max_tokens=max_tokens)


def played(engines, one, now_s, *, took_s=1.0, sampled=100):
    """Choose, and end the generation some time later; return the engine's name."""
    choice = engines.choose(one, now_s)
    engines.done(choice, now_s + took_s, sampled)
    return choice.engine


def begun(engines, count, now_s=LATER, **changes):
    """Begin generations of as many episodes, without kin; return the engines' names."""
    asks = (ask(f"e{number}", f"g{number}", **changes) for number in range(count))
    return [engines.choose(one, now_s).engine for one in asks]


def test_equal_engines_share_alike():
    """The one with less in flight is next."""
    assert sorted(begun(balancer("a", "b"), 6)) == ["a", "a", "a", "b", "b", "b"]


def test_an_engine_with_twice_the_weight_gets_twice_as_much():
    """An operator's weight scales what its speed would give it."""
    assert begun(balancer(a=2.0, b=1.0), 9).count("a") == 6


def test_the_faster_engine_gets_more():
    """Speed is what was seen: the same generation took a third of the time, also with another one beside it."""
    engines = balancer("a", "b")
    for number in range(40):
        first, second = ask(f"x{number}", f"x{number}"), ask(f"y{number}", f"y{number}")
        both = [engines.choose(one, LATER + 9 * number) for one in (first, second)]
        for choice in both:
            engines.done(choice, LATER + 9 * number + (1.0 if choice.engine == "a" else 3.0), 100)

    assert 28 <= begun(engines, 40, LATER + 1000).count("a") < 40


def test_a_long_generation_counts_for_more_than_a_short_one():
    """Tokens are balanced, not requests."""
    engines = balancer("a", "b")
    first = engines.choose(ask("long", "long", prompt=20_000), LATER).engine

    assert begun(engines, 8).count(first) == 0


def test_the_turns_of_an_episode_stay_together():
    """Its engine has computed what the next prompt begins with."""
    engines = balancer("a", "b", "c")
    home = played(engines, ask("e", "g", prompt=2000), LATER)
    for turn in range(1, 6):
        others = [engines.choose(ask(f"o{turn}", f"o{turn}"), LATER + turn)]
        assert played(engines, ask("e", "g", prompt=2000 + 200 * turn), LATER + turn) == home
        for other in others:
            engines.failed(other)


def test_siblings_find_the_engine_that_knows_their_opening():
    """As long as that is worth the wait."""
    engines = balancer("a", "b")
    home = played(engines, ask("e0", "g", prompt=4000), LATER)
    homes = [engines.choose(ask(f"e{sibling}", "g", prompt=4000), LATER + 5).engine for sibling in range(1, 8)]

    assert homes[:2] == [home, home]
    assert len(set(homes)) == 2, "not all on one engine, with the other one idle"


def test_an_episode_leaves_an_engine_that_is_overloaded():
    """Computing its prompt anew elsewhere takes less than waiting."""
    engines = balancer("a", "b")
    home = played(engines, ask("e", "g", prompt=1000), LATER)
    other = "b" if home == "a" else "a"
    engines.drain(other)
    begun(engines, 50, LATER + 1)
    engines.add(other, LATER + 2)

    assert engines.choose(ask("e", "g", prompt=1200), LATER + 2 + RAMP_S).engine == other


def test_an_episode_does_not_leave_for_a_small_gain():
    """Its later turns would have to compute their prefix there as well."""
    engines = balancer("a", "b")
    home = played(engines, ask("e", "g", prompt=100, max_tokens=100), LATER, sampled=100)
    # One more generation on its engine, none on the other: a gain, and one below STAY once the prompt is counted.
    engines.drain("b" if home == "a" else "a")
    engines.choose(ask("o", "o", prompt=10, max_tokens=int(100 * (STAY - 1) / 2)), LATER + 2)
    engines.add("b" if home == "a" else "a", LATER + 2)

    assert engines.choose(ask("e", "g", prompt=200, max_tokens=100), LATER + 2 + RAMP_S).engine == home


def test_a_new_engine_is_given_work_slowly():
    """Its cache is cold, and nobody knows its speed: it does not get all that comes while its books are empty."""
    engines = balancer("a", "b")
    begun(engines, 20)
    engines.add("new", LATER)
    at_first = [engines.choose(ask(f"n{number}", f"n{number}"), LATER).engine for number in range(6)]

    assert at_first.count("new") <= 1 + 6 * FIRST_SHARE
    assert [engines.choose(ask(f"m{n}", f"m{n}"), LATER + RAMP_S).engine for n in range(4)] == ["new"] * 4


@pytest.mark.parametrize("stop", ["drain", "away", "remove"])
def test_an_engine_that_takes_nothing_loses_its_episodes_to_the_others(stop):
    """In mid-episode: the next turn goes elsewhere, and the prefix is computed anew."""
    engines = balancer("a", "b")
    home = played(engines, ask("e", "g", prompt=1000), LATER)
    getattr(engines, stop)(home)
    moved = engines.choose(ask("e", "g", prompt=1200), LATER + 5)

    assert moved.engine != home
    assert moved.known == 0


def test_an_engine_that_came_back_knows_no_prefix():
    """It restarted, or is another one at the same address."""
    engines = balancer("a")
    played(engines, ask("e", "g", prompt=1000), LATER)
    engines.away("a")
    engines.back("a", LATER + 60)

    assert engines.choose(ask("e", "g", prompt=1200), LATER + 61).known == 0


def test_a_prefix_of_older_weights_is_none():
    """A load of weights empties the caches."""
    engines = balancer("a")
    played(engines, ask("e", "g", prompt=1000), LATER)
    engines.weights_changed("a")

    assert engines.choose(ask("e", "g", prompt=1200), LATER + 1).known == 0


def test_nobody_is_chosen_where_nobody_suits():
    """The caller waits, or says why not."""
    engines = balancer("a", "b")

    assert engines.choose(ask(), LATER, suits=lambda name: name == "b").engine == "b"
    assert engines.choose(ask(), LATER, suits=lambda _: False) is None
    assert Balancer().choose(ask(), LATER) is None


def test_an_engine_that_was_slow_once_is_asked_again():
    """One that nobody asks is never measured anew."""
    engines = balancer("a", "b", "c")
    for number in range(9):
        choices = [engines.choose(ask(f"{number}{n}", f"{number}{n}"), LATER + 2000 * number) for n in range(3)]
        for choice in choices:
            engines.done(choice, LATER + 2000 * number + (1000 if choice.engine == "c" else 1), 100)

    assert "c" in begun(engines, 40, LATER + 50_000)


def test_a_generation_of_a_former_engine_is_not_taken_from_the_one_that_has_its_name_now():
    """It was removed and added again meanwhile."""
    engines = balancer("a")
    old = engines.choose(ask("old", "old"), LATER)
    engines.remove("a")
    engines.add("a", LATER)
    engines.choose(ask("new", "new"), LATER)
    engines.done(old, LATER + 1, 100)

    assert engines.in_flight("a") == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_is_above_zero(weight):
    """To give an engine nothing it is drained."""
    with pytest.raises(ValueError, match="above 0"):
        Balancer().add("a", 0.0, weight=weight)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), st.integers(0, 9), st.integers(1, 5000)),
        st.tuples(st.sampled_from(["done", "failed"]), st.integers(0, 50), st.integers(0, 3000)),
        st.tuples(st.sampled_from(["drain", "away", "back", "add", "remove"]), st.integers(0, 3), st.just(0)),
    ),
    max_size=120,
)


@given(events=EVENTS)
@settings(deadline=None)
def test_whatever_happens_nothing_goes_where_it_must_not_and_the_books_come_out_even(events):
    """Chosen engines are known, ready and not draining; once all have ended, nothing is in flight."""
    engines, known, drained, away, open_choices, now_s = Balancer(), set(), set(), set(), [], 0.0
    for what, which, size in events:
        now_s += 0.5
        name = f"b{which}"
        if what == "choose":
            choice = engines.choose(ask(f"e{which}", f"g{which // 3}", prompt=size), now_s)
            ready = known - drained - away
            assert (choice is None) == (not ready)
            if choice is not None:
                assert choice.engine in ready
                assert 0 <= choice.known <= size
                open_choices.append(choice)
        elif what in {"done", "failed"} and open_choices:
            choice = open_choices.pop(which % len(open_choices))
            engines.failed(choice) if what == "failed" else engines.done(choice, now_s, size)
        elif what == "add":
            engines.add(name, now_s)
            known.add(name)
            drained.discard(name)
        elif what == "remove":
            engines.remove(name)
            for names in (known, drained, away):
                names.discard(name)
        elif what in {"drain", "away"} and name in known:
            getattr(engines, what)(name)
            (drained if what == "drain" else away).add(name)
        elif what == "back" and name in known:
            engines.back(name, now_s)
            away.discard(name)
    for choice in open_choices:
        engines.done(choice, now_s + 1, 10)

    assert [0] * len(known) == [engines.in_flight(name) for name in sorted(known)]
