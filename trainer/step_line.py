"""A finished step as text for a person: every figure with its name, at the same place in each step's line.

Where a line would not fit it goes on in the next one, indented. This file knows no terminal: it is told the width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.progress import Progress

GAP = "  "


class StepLines:
    """Says each step once: a callback for the loop."""

    def __init__(self, say: Callable[[str], None], width: int | None = None) -> None:
        """Set up.

        Args:
            say: takes one line.
            width: columns that a line may have; any number unless given.
        """
        self._say = say
        self._width = width
        self._said = 0

    def __call__(self, now: Progress) -> None:
        """Take what changed."""
        if now.measured == self._said:
            return
        self._said = now.measured  # 0 where a trainer begins anew, as after a rollback
        if not now.measured:
            return
        for line in lines(now, self._width):
            self._say(line)


def lines(now: Progress, width: int | None = None) -> Iterator[str]:
    """Yield the lines of the step that the figures are of."""
    first, *others = figures(now)
    line = first
    for figure in others:
        if width is not None and len(line) + len(GAP) + len(figure) > width:
            yield line.rstrip()
            line = " " * len(first)
        line += GAP + figure
    yield line.rstrip()


def figures(now: Progress) -> Iterator[str]:
    """Yield each figure with its name."""
    last, most = now.last, str(now.max_steps)
    yield f"step {now.measured:>{len(most)}}/{most}"
    yield f"reward {now.reward:7.3f}"
    yield f"success {now.success:.2f}"
    yield f"recent {now.recent_success:.2f}"
    yield f"kl {last.kl:7.4f}"
    yield f"entropy {last.entropy:6.3f}"
    yield f"clip {last.clip_share:.3f}"
    yield f"lag {last.lag_mean:.2f}"
    yield f"mixed {now.mixed_share:4.0%}"
    yield f"mismatch {last.mismatch:.4f}"
    yield f"{now.tokens_per_s:7.0f} tokens/s"
    yield f"idle {now.idle_share:4.0%} {_main_cause(now):13}"
    yield f"left {_left(now):10}"
    if now.components:
        yield "reward: " + ", ".join(f"{name} {value:.3f}" for name, value in now.components.items())
    if now.again:
        yield "(made again)"


def _main_cause(now: Progress) -> str:
    """Return what was waited for most; empty if hardly anything was."""
    cause = next(iter(now.idle_causes), "")
    return f"({cause})" if cause and now.idle_causes[cause] >= 0.01 else ""


def _left(now: Progress) -> str:
    return "?" if now.left_s is None else duration(now.left_s)


def duration(seconds: float) -> str:
    """Return a time in two units at most."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
