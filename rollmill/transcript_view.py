"""A rollout as text for a person: turn by turn, with what was sampled marked, and how it ended.

It knows no task family: texts are shown as the tokenizer gives them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from schemas.messages import Trajectory
from schemas.outcome import Completed
from stages.run.render import Renderer


def conversation(trajectory: Trajectory, renderer: Renderer) -> Iterator[Text]:
    """Yield the lines of a rollout: prompts dim, sampled text bold with its mean log-prob."""
    record = trajectory.transcript
    if record is None:
        yield Text(f"no transcript: {trajectory.outcome}")
        return
    tokens, logprobs = record.token_ids, record.logprob_array
    for number, turn in enumerate(record.turns, 1):
        prompt = renderer.display(tokens[turn.start : turn.sampled])
        answer = renderer.display(tokens[turn.sampled : turn.stop])
        mean = float(logprobs[turn.sampled : turn.stop].mean())
        yield Text.assemble(
            (f"{number:3d}  ", "dim"),
            (f"{prompt} ", "dim"),
            (answer, "bold green" if turn.valid else "bold red"),
            (f"   ({mean:.2f})", "dim"),
        )
    yield Text(f"     {ending(trajectory)}")


def ending(trajectory: Trajectory) -> str:
    """Return how a rollout ended, in one line."""
    outcome = trajectory.outcome
    if isinstance(outcome, Completed):
        parts = ", ".join(f"{name} {value:g}" for name, value in outcome.components.items())
        stop = trajectory.stop.value if trajectory.stop else "?"
        return f"ended by {stop}; reward {outcome.reward:g} ({parts}); success {outcome.success:g}"
    return f"{type(outcome).__name__.lower()}: {getattr(outcome, 'cause', '')}"
