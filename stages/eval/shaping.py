"""How the parts of a grade make a reward: weights that were stamped on the task, and penalties for any family.

    component of the family    times its weight; 1 unless named
    repeated_actions           minus the turns that said again what had been said where the same was seen
    long_actions               minus the turns whose answer is over-long, or was cut off
    process                    weight of the turns' rewards

The two penalties are there only where the task names them; a family that gives a component of that name keeps its own.
What was seen is told by its tokens, from the record alone, so a rollout that is graded again has the same reward. With
`once_per_state` a turn is paid only if what it led to was not seen before in the episode: who asks the same again and
again earns once. Pure; without a stamp a grade stays as the family gave it.
"""

from __future__ import annotations

from dataclasses import replace

from schemas.messages import Shaping
from schemas.transcript import Transcript, Turn
from stages.handlers.base import Grade

REPEATED, LONG, PROCESS = "repeated_actions", "long_actions", "process"
"""Names that a weight may have beside those of the family's components."""


def shaped(grade: Grade, transcript: Transcript, shaping: Shaping | None) -> Grade:
    """Return a grade as it counts for a task that was stamped like this."""
    if shaping is None:
        return grade
    penalties = {REPEATED: -float(sum(repeated(transcript))), LONG: -float(sum(overlong(transcript, shaping)))}
    named = {name: value for name, value in penalties.items() if name in shaping.weights}
    weights = shaping.weights
    components = {name: weights.get(name, 1.0) * value for name, value in {**named, **grade.components}.items()}
    return replace(grade, components=components, turn_rewards=_turn_rewards(grade, transcript, shaping))


def repeated(transcript: Transcript) -> list[bool]:
    """Tell of each turn whether its answer was given before, in the same episode, to the same observation."""
    ids, seen, found = transcript.token_ids, set(), []
    for turn in transcript.turns:
        said = (_observation(transcript, turn), ids[turn.sampled : turn.stop].tobytes())
        found.append(said in seen)
        seen.add(said)
    return found


def overlong(transcript: Transcript, shaping: Shaping) -> list[bool]:
    """Tell of each turn whether its answer is longer than it should be."""
    most = shaping.long_action
    return [turn.finish == "length" or 0 < most < turn.stop - turn.sampled for turn in transcript.turns]


def led_to_new(transcript: Transcript) -> list[bool]:
    """Tell of each turn whether what the policy saw next was not seen before.

    Nobody asked for an answer to what the last turn led to, so it is not in the record: that turn is new unless it
    repeats one before.
    """
    turns = transcript.turns
    seen, found = {_observation(transcript, turn) for turn in turns[:1]}, []
    for after in turns[1:]:
        observation = _observation(transcript, after)
        found.append(observation not in seen)
        seen.add(observation)
    return [*found, *(not again for again in repeated(transcript)[-1:])]


def _turn_rewards(grade: Grade, transcript: Transcript, shaping: Shaping) -> tuple[float, ...]:
    weight, given = shaping.weights.get(PROCESS, 1.0), grade.turn_rewards
    if not shaping.once_per_state or len(given) != len(transcript.turns):
        return tuple(weight * reward for reward in given)
    return tuple(weight * reward * new for reward, new in zip(given, led_to_new(transcript), strict=True))


def _observation(transcript: Transcript, turn: Turn) -> bytes:
    return transcript.token_ids[turn.start : turn.sampled].tobytes()
