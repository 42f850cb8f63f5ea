import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.handlers.base import Action, Invalid
from stages.handlers.keydoor import MOVES, PROMPT, WORDS, Hunt, KeyDoor, Layout, layout_of

LAYOUT = {"size": 5, "turns": 14, "agent": [2, 2], "key": [1, 3], "door": [4, 3]}

seeds = st.integers(min_value=0, max_value=2**63)


def walk(hunt: Hunt, *texts: str) -> list[str]:
    """Say each text to the hunt; returns the observations."""
    seen = []
    for text in texts:
        action = KeyDoor().act(text)
        assert isinstance(action, Action)
        seen.append(hunt.step({"name": action.name, "arguments": action.arguments, "text": text}).observation)
    return seen


def hunt_of(**changes: object) -> Hunt:
    return KeyDoor().environment({**LAYOUT, **changes}, 0)


def test_a_hunt_is_won_by_key_then_door():
    """The hints lead to the key, then to the door, and opening it ends the hunt."""
    hunt = hunt_of()
    assert hunt.reset() == "find key north east"
    seen = walk(hunt, "go north", "go east", "take", "go south", "go south", "go south", "open")
    assert seen == [
        "find key east", "key at", "door south", "door south", "door south", "door at", "door opened"
    ]  # fmt: skip
    assert hunt.done
    assert hunt.verdict() == {"opened": True, "has_key": True, "turns": 7, "optimum": 7, "split": "train"}


def test_useless_actions_cost_a_turn_and_change_nothing():
    """Walls, `take` away from the key and `open` without it leave the state as it was."""
    hunt = hunt_of(agent=[0, 0], door=[0, 1])
    assert walk(hunt, "go north", "take", "go east", "open") == [
        "find key south east", "find key south east", "find key south east", "find key south east"
    ]  # fmt: skip
    assert not hunt.done
    assert hunt.turns == 4


def test_the_turn_limit_ends_a_hunt_without_success():
    """The last allowed turn is done, whatever it did; stepping further is the caller's error."""
    hunt = hunt_of(turns=2)
    walk(hunt, "take")
    assert hunt.step({"name": "take", "arguments": {}, "text": "take"}).done
    assert hunt.verdict()["opened"] is False
    with pytest.raises(ValueError, match="ended after 2 turns"):
        walk(hunt, "take")


@given(seeds)
def test_reset_gives_the_same_hunt_again(seed):
    """An environment is exactly resettable, from any state."""
    hunt = KeyDoor().environment({"size": 5}, seed)
    before = (hunt.reset(), hunt.verdict())
    walk(hunt, "go north", "go east", "take")
    assert (hunt.reset(), hunt.verdict()) == before


@given(seeds, st.sampled_from(["train", "held_out"]), st.integers(3, 9))
def test_a_seed_decides_a_layout_of_the_asked_split(seed, split, size):
    """Siblings and retries meet the same hunt, and no training layout is in the other split."""
    payload = {"size": size, "split": split}
    layout = layout_of(payload, seed)
    assert layout == layout_of(payload, seed)
    assert layout.split == split


@given(seeds, seeds, st.integers(0, 10_000))
def test_an_index_names_the_same_hunt_under_every_seed(one, other, index):
    """An evaluation before and after training plays the same hunts."""
    payload = {"split": "held_out", "index": index}
    assert layout_of(payload, one) == layout_of(payload, other)


def test_a_fifth_of_all_layouts_is_held_out():
    """The split hash is even over the 13,800 layouts of the default grid."""
    cells = [(row, column) for row in range(5) for column in range(5)]
    layouts = [
        Layout(size=5, agent=agent, key=key, door=door)
        for agent in cells
        for key in cells
        for door in cells
        if len({agent, key, door}) == 3
    ]
    held_out = sum(layout.split == "held_out" for layout in layouts)
    assert 0.18 < held_out / len(layouts) < 0.22


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 2}, "size must be an integer from 3 to 32, got 2"),
        ({"turns": 0}, "turns must be an integer"),
        ({"turns": True}, "turns must be an integer"),
        ({"door": [4, 5]}, "outside a 5x5 grid"),
        ({"door": [1, 3]}, "distinct cells"),
        ({"key": None}, r"key must be \[row, column\], got None"),
        ({"agent": "22"}, "agent must be"),
    ],
)
def test_a_bad_payload_is_refused_with_what_was_found(change, message):
    """The error names the field, the value and the rule."""
    with pytest.raises(ValueError, match=message):
        hunt_of(**change)


def test_an_unknown_split_is_refused():
    """The known splits are named."""
    with pytest.raises(ValueError, match="known: train, held_out"):
        layout_of({"split": "test"}, 0)


@pytest.mark.parametrize("text", ["take", "open", " take ", "go  north", *(f"go {name}" for name in MOVES)])
def test_well_formed_actions_are_read(text):
    """White space around and between words does not matter."""
    action = KeyDoor().act(text)
    assert isinstance(action, Action)
    assert action.name == text.split()[0]


@pytest.mark.parametrize("text", ["", "go", "north", "go up", "take open", "go north <|user|>", "please take"])
def test_anything_else_is_malformed(text):
    """Exactly one action is an answer; the reason lists them all."""
    found = KeyDoor().act(text)
    assert isinstance(found, Invalid)
    assert found.text == text
    assert "go west, take, open" in found.reason


@pytest.mark.parametrize("opened", [True, False])
def test_success_is_the_opened_door(opened):
    """Nothing but the goal earns a reward."""
    grade = KeyDoor().grade(None, {"opened": opened, "has_key": True})  # type: ignore[arg-type]
    assert grade.components == {"opened": float(opened)}
    assert grade.success == float(opened)


def test_the_opening_is_the_prompt_and_the_first_hint():
    """The policy sees the rules once, then only hints."""
    opening = KeyDoor().init(None, "key at")  # type: ignore[arg-type]
    assert opening.messages == (
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": "key at"},
    )
    assert opening.tools == ()


@given(seeds, st.lists(st.sampled_from(["take", "open", *(f"go {name}" for name in MOVES)]), max_size=14))
def test_every_hint_is_made_of_the_vocabulary(seed, texts):
    """A word-level model of `WORDS` never meets an unknown word."""
    hunt = KeyDoor().environment({}, seed)
    seen = [hunt.reset()]
    for text in texts:
        if not hunt.done:
            seen += walk(hunt, text)
    assert {word for text in (*seen, *texts, PROMPT) for word in text.split()} <= set(WORDS)
