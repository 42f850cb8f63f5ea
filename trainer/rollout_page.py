"""A few rollouts of a step as text for a person: the best, the worst, the longest, and one that chance picks.

Which ones is a function of the step and the run's seed, so a step that is made again shows the same. What the policy
said, what it was taken to mean, and what it was told are kept apart by their margin. Texts are as the tokenizer gives
them, but for control characters: a policy says anything, also to a terminal. This file knows no files and no log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from infra.plain_text import visible
from schemas.transcript import TokenIds, Transcript, Turn
from trainer.groups import Step
from trainer.terminal import OTHER_RUN, Terminal

Decode = Callable[[TokenIds], str]
"""Ids -> text, with special tokens."""

PRINTED_CHARACTERS = 400
"""Of one text a terminal is shown so many; the file has all."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A rollout, and what it was picked for."""

    reasons: tuple[str, ...]
    """`best`, `worst`, `longest`, `random`; one rollout may be several of them."""
    sample: Terminal
    """The rollout."""


def picks(step: Step, seed: int) -> tuple[Pick, ...]:
    """Return the rollouts of a step to show, the best first; of equal ones the first in the batch."""
    graded = step.terminals
    draw = np.random.default_rng([abs(seed), step.number])
    chosen = {
        "best": max(range(len(graded)), key=lambda at: (graded[at].reward, -at)),
        "worst": min(range(len(graded)), key=lambda at: (graded[at].reward, at)),
        "longest": max(range(len(graded)), key=lambda at: (_sampled(graded[at]), -at)),
        "random": int(draw.integers(len(graded))),
    }
    reasons: dict[int, list[str]] = {}
    for reason, at in chosen.items():
        reasons.setdefault(at, []).append(reason)
    return tuple(Pick(reasons=tuple(why), sample=graded[at]) for at, why in reasons.items())


def page(run: str, step: int, chosen: tuple[Pick, ...], decode: Decode, most: int | None = None) -> str:
    """Return rollouts as text.

    Args:
        run: the run.
        step: the step that was trained on them.
        chosen: which.
        decode: makes text of token ids.
        most: characters of one text, from its middle the rest is left out; all of them unless given.
    """
    parts = ["\n".join(_rollout(run, step, pick, decode, most)) for pick in chosen]
    return "\n\n".join(parts) + "\n"


def _rollout(run: str, step: int, pick: Pick, decode: Decode, most: int | None) -> Iterator[str]:
    sample = pick.sample
    yield f"== step {step}, {' and '.join(pick.reasons)}: {run}/{sample.group}/{sample.sample}"
    made_of = ", ".join(f"{visible(name)} {value:g}" for name, value in sample.components)
    cut = ", cut off by a limit" if sample.truncated else ""
    yield (
        f"reward {sample.reward:g}{f' ({made_of})' if made_of else ''}, success {sample.success:g}{cut}; "
        f"{sample.turns} turns, {_sampled(sample)} sampled tokens{_versions(sample)}; offset {sample.offset}"
    )
    record = sample.transcript
    if record is None:
        yield "graded without a token record"
        return
    for number, turn in enumerate(record.turns):
        rewards = sample.turn_rewards
        yield _heading(number, turn, record, rewards[number] if rewards else None)
        yield from _block("told", decode(record.token_ids[turn.start : turn.sampled]), most)
        yield from _block("said", decode(record.token_ids[turn.sampled : turn.stop]), most)
        yield from _block("did" if turn.valid else "refused", turn.action, most)
    behind = record.turns[-1].stop if record.turns else 0
    if behind < len(record.mask):
        yield "-- after the last turn"
        yield from _block("told", decode(record.token_ids[behind:]), most)


def _heading(number: int, turn: Turn, record: Transcript, reward: float | None) -> str:
    earned = "" if reward is None else f", reward {reward:g}"
    anew = ", the history was rewritten before it" if turn.start and turn.start in record.segments else ""
    return f"-- turn {number + 1}{earned}{anew}"


def _block(name: str, text: str, most: int | None) -> Iterator[str]:
    """Yield a text with its name at the margin, so that none can be taken for another."""
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]}\n[... {len(text) - most // 2 * 2} characters ...]\n{text[len(text) - most // 2 :]}"
    for at, line in enumerate(visible(text).split("\n")):
        yield f"{'' if at else name:>8} | {line}".rstrip()


def _sampled(sample: Terminal) -> int:
    return sum(tokens for _, tokens in sample.sampled)


def _versions(sample: Terminal) -> str:
    versions = sorted({version for version, _ in sample.sampled})
    if not versions:
        return ""
    if OTHER_RUN in versions:
        return " of another run's weights"
    return f" of version {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else "")
