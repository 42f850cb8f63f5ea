"""What the demo shows while it runs: one line per thing that happened, and one live line of figures.

On a terminal the live line is redrawn in place; elsewhere a plain line is printed every few seconds, so that a log
stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollmill.lag import StageLag
from rollmill.supervisor import Event, What
from rollmill.watch import RunState

PLAIN_EVERY_S = 10.0
"""Without a terminal the figures are printed this often, seconds."""

_SHOWN = {What.DIED, What.RESTARTED}


class Screen:
    """Prints to standard error, so that standard output is left to the result."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._began = time.monotonic()
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)
        self._plain_at = 0.0

    def __enter__(self) -> Self:
        """Begin the live line."""
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the live line."""
        self._live.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Print one line with the time."""
        self.console.print(Text.assemble((f"{self.seconds:6.1f} s  ", "dim"), Text.from_markup(text)))

    def print(self, text: str) -> None:
        """Print one line as it is, never wrapped, so that it can be copied."""
        self.console.print(Text(text), soft_wrap=True)

    def service(self, event: Event) -> None:
        """Print what happened to a service, when it says something."""
        if event.what in _SHOWN:
            self.say(f"[dim]{event}[/]")

    def figures(self, text: str) -> None:
        """Show figures; ` | ` separates the rows of a terminal."""
        if self.console.is_terminal:
            rows = Text.from_markup("\n".join(f"          {row}" for row in text.split(" | ")))
            rows.no_wrap, rows.overflow = True, "crop"
            self._live.update(rows)
        elif self.seconds - self._plain_at > PLAIN_EVERY_S:
            self._plain_at = self.seconds
            self.say(f"[dim]{text}[/]")

    def training(self, state: RunState, lags: Sequence[StageLag], *, max_steps: int) -> None:
        """Show the figures of a run that trains."""
        metrics, dropped = state.metrics, sum(state.dropped.values())
        recent = metrics.get("trainer.recent_success_mean", 0)
        left_s = metrics.get("trainer.left_s")
        left = "" if left_s is None else f"  {left_s:.0f} s left at most"
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(state.dropped.items()))
        stages = "  ".join(f"{lag.stage} {state.finished[lag.stage]} (lag {lag.lag})" for lag in lags)
        if not state.decided:
            self.figures(f"the trainer starts and waits for its first batch | {stages}")
            return
        self.figures(
            f"step [bold]{state.step}[/]/{max_steps}  version {state.version}  success [bold]{recent:.2f}[/]"
            f"  reward {metrics.get('trainer.reward_mean', 0):.2f}{left}"
            f" | kept {state.kept}  dropped {dropped}{f' ({reasons})' if reasons else ''}"
            f"  trainer idle {metrics.get('trainer.idle_share', 0):.0%}"
            f" | {stages}"
        )

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        table = Table(title=title, title_justify="left", header_style="bold")
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
