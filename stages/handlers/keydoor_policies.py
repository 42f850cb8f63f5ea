"""Who plays KeyDoor without a model: a scripted expert, a random player and the clumsy walker.

The expert and the random player bound the demo's chart from above and below. The clumsy walker is the warm start's
teacher: it knows the words and when to `take` and `open`, but mostly keeps walking the way it went last, so a model
that imitates it formats every action and solves few hunts. What is left to learn is to trust the hint.

Everything here is a pure function of its arguments: a seed gives the same play in every process. It does not know
models or tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stages.handlers.base import Action
from stages.handlers.keydoor import ACTIONS, MOVES, PROMPT, Hunt, KeyDoor

Policy = Callable[[Hunt, str | None, random.Random], str]
"""Sees the running hunt, the last direction walked (None before the first) and its own dice; says an action."""

HABIT: Final = 0.90
"""How often the clumsy walker repeats its last direction."""

COMPASS: Final = 0.02
"""How often it follows the hint; the rest is a random direction."""

DEMONSTRATION_TRIES: Final = 1000
"""Plays from which a demonstration takes the first that succeeds; the clumsy walker needs about twenty."""


def expert(hunt: Hunt, _last: str | None, _dice: random.Random) -> str:
    """Play the shortest hunt: walk the first bearing, `take` and `open` in place."""
    if hunt.bearings:
        return f"go {hunt.bearings[0]}"
    return "open" if hunt.has_key else "take"


def random_player(_hunt: Hunt, _last: str | None, dice: random.Random) -> str:
    """Choose uniformly among all well-formed actions."""
    return dice.choice(ACTIONS)


def clumsy_walker(hunt: Hunt, last: str | None, dice: random.Random) -> str:
    """Walk on by habit, sometimes by the compass; `take` and `open` only in place, and then always."""
    if not hunt.bearings:
        return "open" if hunt.has_key else "take"
    roll = dice.random()
    if roll < HABIT and last is not None:
        return f"go {last}"
    if roll < HABIT + COMPASS:
        return f"go {dice.choice(hunt.bearings)}"
    return f"go {dice.choice(list(MOVES))}"


@dataclass(frozen=True, kw_only=True)
class Play:
    """One finished hunt: its messages, ending with the last action, and the environment's verdict."""

    messages: list[dict[str, str]]
    """The conversation, from the system prompt to the last action."""
    verdict: dict[str, Any]
    """What the environment held at the end."""


def play(policy: Policy, payload: Mapping[str, Any], *, dice: str, seed: int) -> Play:
    """Let a policy play the hunt that *payload* and *seed* name; *dice* seeds the policy's own choices."""
    handler = KeyDoor()
    hunt = handler.environment(payload, seed)
    rng = random.Random(f"keydoor policy {dice}")
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": hunt.hint}]
    last: str | None = None
    while True:
        text = policy(hunt, last, rng)
        messages.append({"role": "assistant", "content": text})
        action = handler.act(text)
        assert isinstance(action, Action), f"a scripted policy knows the words, yet it said {text!r}"
        last = action.arguments.get("direction", last)
        result = hunt.step({"name": action.name, "arguments": action.arguments, "text": text})
        if result.done:
            return Play(messages=messages, verdict=hunt.verdict())
        messages.append({"role": "user", "content": result.observation})


def demonstration(payload: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
    """A success of the clumsy walker as chat messages; the assistant's turns are what a warm start imitates.

    Only successes teach all four parts of a hunt: most of its plays never see the door. Each try meets another hunt,
    unless the payload names one by index or cells, since some hunts are longer than their turn limit.
    """
    for attempt in range(DEMONSTRATION_TRIES):
        drawn = random.Random(f"keydoor demonstration {seed} {attempt}").getrandbits(62)
        shown = play(clumsy_walker, payload, dice=str(drawn), seed=drawn)
        if shown.verdict["opened"]:
            return shown.messages
    raise ValueError(
        f"keydoor: no success in {DEMONSTRATION_TRIES} plays of {dict(payload)} from seed {seed}; allow more turns"
    )
