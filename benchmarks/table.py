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
    quick_at_most: float | None = None
    """The largest one with `--quick`, where so short a run cannot tell as much."""

    def holds(self, figure: float, *, quick: bool = False) -> bool:
        """Tell whether a figure is good enough."""
        most = self._most(quick=quick)
        return (self.at_least is None or figure >= self.at_least) and (most is None or figure <= most)

    def bound(self, *, quick: bool = False) -> str:
        """Return the bound, for a person."""
        parts, most = [] if self.at_least is None else [f"at least {self.at_least:g}"], self._most(quick=quick)
        return ", ".join(parts if most is None else [*parts, f"at most {most:g}"])

    def _most(self, *, quick: bool) -> float | None:
        return self.quick_at_most if quick and self.quick_at_most is not None else self.at_most


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
    "hop": Benchmark(
        module="benchmarks.hop",
        work="messages of 1 KB through one stage that does nothing, from Kafka to Kafka, all defaults",
        rows=(
            Row(
                key="ratio",
                rival="a bare aiokafka loop, idempotent, acks=all, decoding and encoding (messages/s)",
                at_least=0.3,
            ),
            Row(key="detail.no_events.ratio", rival="the same, ours without events", at_least=0.45),
            Row(key="detail.faust.ratio", rival="a Faust agent that forwards", at_least=2),
        ),
    ),
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
    "scaling": Benchmark(
        module="benchmarks.scaling",
        work="1, 2, 4 and 8 RUN workers, episodes that wait as on a remote policy, while every worker has a backlog",
        rows=(Row(key="ratio", rival="eight times what one worker does (episodes/s)", at_least=0.95),),
    ),
    "recovery": Benchmark(
        module="benchmarks.recovery",
        work="kill -9 a RUN worker with 64 tasks in flight beside another one, supervised as by `rollmill up`",
        rows=(
            Row(key="detail.lost", rival="none: samples without a rollout", at_most=0),
            Row(key="detail.repeated", rival="none: samples that were started more than once, of one kill", at_most=64),
            Row(
                key="detail.back_s",
                rival="none: seconds from the kill until all of its tasks run again; session timeout 10 s + 3 s",
                at_most=13,
            ),
        ),
    ),
    "replenish": Benchmark(
        module="benchmarks.replenish",
        work="groups to train on, heavy-tailed episodes, half of the groups without variance; through the three stages",
        rows=(
            Row(
                key="ratio",
                rival="synchronous dynamic sampling as in DAPO: sample, filter, sample again (kept groups/s)",
                at_least=1.8,
            ),
            Row(key="detail.larger_batches.ratio", rival="the same with generation batches three times as large"),
        ),
    ),
    "routing": Benchmark(
        module="benchmarks.routing",
        work="heavy-tailed episodes of many turns on simulated engines of unequal speed, with caches of prefixes",
        rows=(
            Row(key="ratio", rival="ProRL's heap: a count that never falls, a job stays (episodes/s)", at_least=1.5),
            Row(
                key="detail.prefix_hits_ratio", rival="the same: share of prompt tokens that were cached", at_least=0.95
            ),
        ),
    ),
    "serve": Benchmark(
        module="benchmarks.serve",
        work="64 episodes of several turns on the local policy server, the demo's model, one thread",
        rows=(
            Row(key="ratio", rival="a transformers.generate call per request (sampled tokens/s)", at_least=3),
            Row(
                key="detail.batched_generate.ratio",
                rival="one call of generate for a batch of prompts of equal length",
                at_least=1,
            ),
        ),
    ),
    "codec": Benchmark(
        module="benchmarks.codec",
        work="a trajectory of 32k tokens with log-probs and mask, encoded and decoded, without compression",
        rows=(
            Row(key="ratio", rival="msgpack lists, floats of 64 bits (trajectories/s)", at_least=50),
            Row(key="detail.bytes_ratio", rival="the same: bytes", at_most=0.8),
        ),
    ),
    "step": Benchmark(
        module="benchmarks.step",
        work="a trainer step on heavy-tailed lengths, the demo's model",
        rows=(
            Row(
                key="ratio",
                rival="one padded batch per mini-batch, as TRL does; the same loss to 1e-5 (tokens/s)",
                at_least=1.5,
            ),
        ),
    ),
    "soak": Benchmark(
        module="benchmarks.soak",
        work="small tasks through all stages: 200,000, with reaper and board; with --quick 8,000, without",
        rows=(
            Row(
                key="detail.rss_slope",
                rival="none: growth of the worst service's resident memory per 100,000 tasks, as a share of it",
                at_most=0.01,
                quick_at_most=0.10,
            ),
        ),
    ),
}
"""Name -> benchmark, in the order of `--all`."""
