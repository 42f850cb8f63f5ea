"""The figures, as one table: what is measured, against what, and what it must reach.

A benchmark is a module of this folder with `measure(*, quick: bool) -> Result`. Its rows name the ratios of that
result by their place: `ratio` is ours / rival, `detail.x.ratio` the ratio against another rival. What is measured here
is not judged here: `report.py` puts the figures beside these rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ratio and what it must reach."""

    key: str
    """Its place in the result: `ratio`, or `detail.<rival>.ratio`."""
    rival: str
    """What it is measured against."""
    at_least: float | None = None
    """The smallest ratio that is good enough; None where there is no such bound."""
    at_most: float | None = None
    """The largest one, where less is better."""

    def holds(self, figure: float) -> bool:
        """Tell whether a figure is good enough."""
        return (self.at_least is None or figure >= self.at_least) and (self.at_most is None or figure <= self.at_most)

    @property
    def bound(self) -> str:
        """The bound, for a person."""
        parts = [] if self.at_least is None else [f"at least {self.at_least:g}"]
        return ", ".join(parts if self.at_most is None else [*parts, f"at most {self.at_most:g}"])


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One call of `python -m benchmarks NAME`."""

    module: str
    """Where it lies."""
    work: str
    """What both sides do."""
    rows: tuple[Row, ...]
    """The ratios it gives, the first one first."""


TABLE: dict[str, Benchmark] = {
    "pipeline": Benchmark(
        module="benchmarks.pipeline",
        work="INIT, RUN and EVAL on a real Kafka: skewed waits while RUN has a backlog; then jobs that do nothing",
        rows=(
            Row(key="ratio", rival="RUN's slots always busy", at_least=0.95),
            Row(
                key="detail.process_per_job.ratio",
                rival="a spawned process per job behind three semaphores, as ProRL's default server (jobs/s)",
                at_least=20,
            ),
        ),
    ),
    "cancel": Benchmark(
        module="benchmarks.cancel",
        work="cancel 100 running episodes on a real Kafka, with every service a process of its own",
        rows=(
            Row(
                key="detail.p99_s",
                rival="none: seconds from the acknowledged cancel to the environment closed, p99",
                at_most=1,
            ),
        ),
    ),
}
"""Name -> benchmark, in the order of `--all`."""
