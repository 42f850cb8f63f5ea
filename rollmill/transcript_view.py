"""A rollout as text for a person: turn by turn, with what was sampled marked, and how it ended.

It knows no task family: texts are shown as the tokenizer gives them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from rollmill.output import visible
from schemas.messages import Trajectory
from schemas.outcome import Completed, Failed
from schemas.transcript import Transcript
from stages.run.render import Renderer


def conversation(trajectory: Trajectory, renderer: Renderer) -> Iterator[Text]:
    """Yield the lines of a rollout: prompts dim, sampled text bold with its mean log-prob."""
    record = trajectory.transcript
    if record is None:
        yield Text(ending(trajectory))
        return
    tokens, logprobs = record.token_ids, record.logprob_array
    for number, turn in enumerate(record.turns, 1):
        if turn.start in record.segments[1:]:
            yield Text("     another conversation, or this one rewritten:", "dim")
        prompt = visible(renderer.display(tokens[turn.start : turn.sampled]))
        answer = visible(renderer.display(tokens[turn.sampled : turn.stop]))
        mean = float(logprobs[turn.sampled : turn.stop].mean())
        yield Text.assemble(
            (f"{number:3d}  ", "dim"),
            (f"{prompt} ", "dim"),
            (answer, "bold green" if turn.valid else "bold red"),
            (f"   (mean log-prob {mean:.2f})", "dim"),
        )
    yield Text(f"     {ending(trajectory)}")
    if trajectory.verdict:
        yield Text(f"     verdict: {_cut(visible(str(trajectory.verdict)))}", "dim")


VERDICT_CHARS = 2_000
"""So many characters of a verdict are shown; `--json` has all."""


def _cut(text: str) -> str:
    half = VERDICT_CHARS // 2
    return text if len(text) <= VERDICT_CHARS else f"{text[:half]} ... {text[-half:]}"


TOKEN_COLUMNS = ("index", "id", "text", "sampled", "log-prob", "version")
"""What `token_rows` tells of each token."""


def token_rows(record: Transcript, renderer: Renderer) -> Iterator[tuple[str, ...]]:
    """Yield one row per token; log-prob and version only of sampled ones."""
    versions = {index: span.version for span in record.spans for index in range(span.start, span.stop)}
    for index, (token, logprob) in enumerate(zip(record.token_ids, record.logprob_array, strict=True)):
        text = visible(renderer.display(record.token_ids[index : index + 1]))
        drawn = (f"{logprob:.4f}", str(versions[index])) if index in versions else ("", "")
        yield (str(index), str(token), text, "yes" if index in versions else "", *drawn)


def ending(trajectory: Trajectory) -> str:
    """Return how a rollout ended, in one line."""
    outcome = trajectory.outcome
    if isinstance(outcome, Completed):
        parts = ", ".join(f"{name} {value:g}" for name, value in outcome.components.items())
        stop = trajectory.stop.value if trajectory.stop else "?"
        by_turn = "".join(f" {reward:g}" for reward in outcome.turn_rewards)
        ended = f"ended by {stop}; reward {outcome.reward:g} ({parts}); success {outcome.success:g}"
        return f"{ended}; by turn{by_turn}" if by_turn else ended
    if isinstance(outcome, Failed):
        return visible(f"failed ({outcome.kind.value} at {outcome.boundary.value}): {outcome.cause}")
    return visible(f"{type(outcome).__name__.lower()}: {outcome.cause}")
