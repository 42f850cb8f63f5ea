"""What each part of DAPO adds on the demo's task: `python -m benchmarks.ablation` trains without one after the other.

    python -m benchmarks.ablation [--seeds 5] [--steps 10] [--processes 2] [--page docs/ablation.md]

Each variant and seed is one training run (`learning.py`). A variant is held against all parts on, seed by seed, since
the runs of a seed begin with the same weights and tasks; the interval is Student's, over seeds. "No difference seen" is
a result: it says how large one could be, by its interval. Every number of the variants is a default of the product or
the value in the paper that had no such part; none was chosen by what came out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.learning import DULL, EPISODES, STEPS, Learnt, Run, learn_all
from benchmarks.report import machine

PAGE = Path(__file__).parent.parent / "docs" / "ablation.md"
"""Where the table goes."""

ALL_ON = "all on"
"""The variant that the others are held against."""

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> 97.5 % quantile of Student's distribution."""

MOST_SEEDS = max(T_975) + 1
"""More seeds have no quantile here."""

CLIP = {"clip_high": 0.2}
"""The upper bound of the ratio is the lower one's distance, as in PPO."""
LEVEL = {"level": "sample"}
"""Every sample counts the same in the loss, as in GRPO."""
FILTER = {"filter": "off"}
"""Groups whose siblings all end alike are trained on too, and fill a step."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train."""

    name: str
    """For a person."""
    algorithm: Mapping[str, Any]
    """What differs from the demo's `[algorithm]`."""

    def run(self, seed: int, *, steps: int, episodes: int) -> Run:
        """Return its run of a seed."""
        return Run(
            name=self.name.replace(" ", "-"), seed=seed, algorithm=self.algorithm, steps=steps, episodes=episodes
        )


VARIANTS = (
    Variant(name=ALL_ON, algorithm={}),
    Variant(name="without clip-higher", algorithm=CLIP),
    Variant(name="without token-level loss", algorithm=LEVEL),
    Variant(name="without dynamic sampling", algorithm=FILTER),
    Variant(name="without all three", algorithm={**CLIP, **LEVEL, **FILTER}),
)
"""What is compared."""


HEAD = """# What each part of DAPO adds on the demo's task

Written by `python -m benchmarks.ablation`; do not edit. Task, model and whatever is not named are the demo's: {seeds}
seeds, {steps} trainer steps a run, {episodes} held-out hunts a measurement, sampled at temperature 1. The warm start
solves {start} of them. The runs of a seed begin with the same weights and the same tasks, and differences are
taken seed by seed; ± is half of Student's 95 % interval over seeds. A run ends early once {dull} groups in a row have
taught nothing, as under a policy that has collapsed. Without dynamic sampling groups that teach nothing fill a step
too, so the same steps take fewer groups: see the last column.

{taken}

"""
"""Of the page."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over seeds and where it may lie."""

    mean: float
    half: float
    """Half the width of the 95 % interval; infinite for one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the mean of some seeds' values and Student's interval."""
        count = len(values)
        spread = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.inf
        return cls(mean=statistics.fmean(values), half=T_975[count - 1] * spread if count > 1 else spread)

    @property
    def verdict(self) -> str:
        """What a difference amounts to."""
        if abs(self.mean) <= self.half:
            return "no difference seen"
        return "better" if self.mean > 0 else "worse"


def success(learnt: Learnt) -> float:
    """Return a run's success on held-out hunts after its last step."""
    return learnt.after.success


def start_of(learnt: Learnt) -> float:
    """Return what the model achieved that a run began with; NaN where nobody measured it."""
    return learnt.before.success if learnt.before else math.nan


def course(learnt: Learnt) -> float:
    """Return the mean of a run's training curve: how soon it rose, which one look at the end does not tell."""
    return statistics.fmean(value for _, value in learnt.curve) if learnt.curve else math.nan


def page(found: Mapping[str, Sequence[Learnt]], *, steps: int, episodes: int, taken: str) -> str:
    """Return the page: what was compared, a line per variant, and every run.

    Args:
        found: variant -> its runs, by seed in the same order.
        steps: trainer steps of each run.
        episodes: held-out hunts of each measurement.
        taken: on which machine, for a person.
    """
    runs = found[ALL_ON]
    start = Interval.of([start_of(run) for run in runs])
    head = HEAD.format(dull=DULL, seeds=len(runs), steps=steps, episodes=episodes, start=_of(start), taken=taken)
    return head + _summary(found) + "\nSuccess on held-out hunts after the last step, run by run:\n\n" + _each(found)


def _summary(found: Mapping[str, Sequence[Learnt]]) -> str:
    lines = [
        "| variant | success after | less all on | | success in training | less all on | | groups sampled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        cells = [name]
        for figure in (success, course):
            values = [figure(run) for run in runs]
            cells.append(_of(Interval.of(values)))
            apart = Interval.of([a - b for a, b in zip(values, map(figure, found[ALL_ON]), strict=True)])
            cells += ["", ""] if name == ALL_ON else [_of(apart, sign="+"), apart.verdict]
        lines.append(_row([*cells, f"{statistics.fmean(run.groups for run in runs):.0f}"]))
    return "\n".join(lines) + "\n"


def _each(found: Mapping[str, Sequence[Learnt]]) -> str:
    seeds = [f"seed {run.run.seed}" for run in found[ALL_ON]]
    lines = [_row(["variant", *seeds]), "|---" * (len(seeds) + 1) + "|"]
    lines.append(_row(["the warm start", *(f"{start_of(run):.2f}" for run in found[ALL_ON])]))
    lines += [_row([name, *(f"{success(run):.2f}" for run in runs)]) for name, runs in found.items()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _of(interval: Interval, sign: str = "") -> str:
    return f"{interval.mean:{sign}.2f} ± {interval.half:.2f}"


def measure(seeds: Sequence[int], *, steps: int, episodes: int, processes: int) -> dict[str, list[Learnt]]:
    """Train all variants and return variant -> its runs, by seed."""
    # Seed by seed: a machine that gets busy on the way slows all variants of a seed alike.
    runs = [variant.run(seed, steps=steps, episodes=episodes) for seed in seeds for variant in VARIANTS]

    def say(learnt: Learnt) -> None:
        click.echo(f"{learnt.run.id}: success {success(learnt):.2f} after {learnt.seconds:.0f} s", err=True)

    learnt = learn_all(runs, processes, say)
    return {variant.name: learnt[at :: len(VARIANTS)] for at, variant in enumerate(VARIANTS)}


@click.command("ablation")
@click.option("--seeds", type=click.IntRange(1, MOST_SEEDS), default=5, show_default=True, help="Runs of each variant.")
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Trainer steps of a run.")
@click.option("--episodes", type=click.IntRange(1), default=EPISODES, show_default=True, help="Hunts of a measurement.")
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True, help="Runs at once, a core each.")
@click.option(
    "--page", "target", type=click.Path(path_type=Path, dir_okay=False), default=PAGE, help="Where the page is written."
)
def command(seeds: int, steps: int, episodes: int, processes: int, target: Path) -> None:
    """Train the demo's policy without one part of DAPO after the other, and write what came of it."""
    before, began = machine(), time.monotonic()
    found = measure(range(seeds), steps=steps, episodes=episodes, processes=processes)
    minutes = (time.monotonic() - began) / 60
    taken = (
        f"Taken on {before['cores']} cores without a GPU, {processes} runs at once, Python {before['python']}, load "
        f"{before['load_1m']} before and {machine()['load_1m']} after; it took {minutes:.0f} minutes."
    )
    target.write_text(page(found, steps=steps, episodes=episodes, taken=taken), encoding="utf-8")
    click.echo(target.read_text(encoding="utf-8"), nl=False)


if __name__ == "__main__":
    command()
