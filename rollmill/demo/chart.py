"""The demo's chart: success before and after, its course over the trainer's steps, and turns to success.

Draws what it is given; nothing is measured or computed here. The only file that imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from schemas.scores import Scores


def draw(path: Path, scores: Mapping[str, Scores], curve: Sequence[tuple[int, float]], optimum: float) -> None:
    """Write the chart as PNG.

    Args:
        path: the file.
        scores: player -> score, in the order of the bars.
        curve: (trainer step, mean success of the last groups).
        optimum: mean turns of the expert.
    """
    mpl.use("Agg")
    figure = Figure(figsize=(12, 4), layout="constrained")
    bars, course, turns = figure.subplots(1, 3)
    names = list(scores)
    success = [score.success for score in scores.values()]
    below = [score.success - score.low for score in scores.values()]
    above = [score.high - score.success for score in scores.values()]
    bars.bar(names, success, yerr=[below, above], capsize=4, color=["#9aa0a6", "#5b8def", "#2e9e5b", "#d0a215"])
    bars.set(title="success on held-out hunts (95 % intervals)", ylim=(0, 1.05), ylabel="success")
    course.plot([step for step, _ in curve], [value for _, value in curve], marker="o", color="#5b8def")
    course.set(title="training", xlabel="trainer step", ylabel="success of the last groups", ylim=(0, 1.05))
    turns.bar(names, [score.turns_to_success for score in scores.values()], color="#5b8def")
    turns.axhline(optimum, linestyle="--", color="#444", label=f"shortest possible: {optimum:.1f}")
    turns.set(title="turns to success", ylabel="turns")
    turns.legend(loc="lower right")
    figure.savefig(path, dpi=110)
