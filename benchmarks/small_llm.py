"""A real language model through the whole path on two cores: `python -m benchmarks.small_llm` trains SmolLM2-135M.

    python -m benchmarks.small_llm [--json] [--steps 5] [--page docs/small-llm.md]

Adapters are trained, on a task of one short turn (`between.py`), by rollouts that the local policy server samples from
each published version. This shows that tokenizer, chat template, log-probs and weights of a model that others made fit
together, and what it takes; a handful of steps is no training. The task was chosen by the model's success before, which
has to lie between the bounds below, and by nothing that came after. Peak memory is that of this one process, which is
policy server, stages, feeder and trainer at once.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import between, smollm2
from benchmarks.learning import STEP_LIMIT_S, trained
from benchmarks.report import machine
from infra.inference.base import Weights
from infra.inference.local_server.engine import EngineLimits
from producers.generated import GeneratedSource
from rollmill import toml
from rollmill.demo.in_process import MemoryMachine
from rollmill.demo.machine import unless_broken
from rollmill.evaluator import play
from schemas.control import RunManifest
from schemas.scores import Scores
from schemas.transcript import Sampling
from trainer.evaluation import scores
from trainer.replay import replay

PAGE = Path(__file__).parent.parent / "docs" / "small-llm.md"
"""Where the figures go."""

RUN = "small-llm"
"""The run."""

STEPS = 5
"""Trainer steps."""

QUESTIONS = 64
"""Questions of a measurement."""

QUESTIONS_LIMIT_S = 600.0
"""Longest wait for a measurement, seconds."""

MAX_TOKENS = 6
"""Most tokens of an answer: a number and the end of the turn."""

SUCCESS = (0.1, 0.7)
"""Bounds of the success before: outside them hardly any group of eight is mixed."""

LIMITS = EngineLimits(max_model_len=256, max_running=16, spare_slots=8, cache_bytes=1 << 29)
"""Of the engine: the model's own context would take most of a gigabyte a slot."""

RANK = 8
"""Of the adapters."""

ALGORITHM = {
    "groups": 4,
    "samples": 8,
    "max_lag": 1,
    "epochs": 1,
    "minibatches": 2,
    "lr": 1e-4,
    "horizon": 1,
    "temperature": 1.0,
    "micro_tokens": 1024,
    "lora": {"rank": RANK, "alpha": 2 * RANK},
}
"""Two optimizer steps on 32 samples in a trainer step; the rate is customary for adapters."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of it."""

    before: Scores
    """Success of the model as it came."""
    after: Scores
    """Success of the last version."""
    steps: int
    """Trainer steps."""
    optimizer_steps: int
    """Optimizer steps."""
    groups: int
    """Groups sampled."""
    dropped: int
    """Of these, groups without variance."""
    mismatch: float
    """How far trainer and engine are apart on tokens of the present weights, nats."""
    replayed: str
    """What replay says of the run."""
    seconds: float
    """Of training."""
    peak_gib: float
    """Most memory that the process held at once."""


async def measure(model: Path, folder: Path, steps: int) -> Figures:
    """Train a model and return what came of it.

    Args:
        model: its directory.
        folder: an empty one.
        steps: trainer steps.

    Raises:
        infra.errors.WaitTimeout: a step or a measurement did not come in time.
    """
    path = folder / "run.toml"
    path.write_text(toml.dumps(run_toml(model, folder / "trainer", steps)), encoding="utf-8")
    with between.installed(folder / "family"):
        async with MemoryMachine(model, limits=LIMITS) as at_work:
            return await unless_broken(at_work, _measure(at_work, path, steps))


def run_toml(model: Path, directory: Path, steps: int) -> dict[str, Any]:
    """Return the run's configuration as RUN.toml holds it."""
    return {
        "run": RUN,
        "model": str(model),
        "directory": str(directory),
        "algorithm": ALGORITHM,
        "stop": {"max_steps": steps},
        # A version is a whole model of half a gigabyte.
        "checkpoints": {"every": steps, "keep": 1, "keep_versions": 2},
        "tasks": {"family": "between", "max_tokens": MAX_TOKENS, "max_sampled_tokens": MAX_TOKENS},
    }


async def _measure(at_work: MemoryMachine, path: Path, steps: int) -> Figures:
    before = await _scores(at_work, None)
    began = time.monotonic()
    state = await trained(at_work, path, RUN, steps * STEP_LIMIT_S)
    seconds = time.monotonic() - began
    dropped = sum(state.dropped.values())
    return Figures(
        before=before,
        after=await _scores(at_work, Weights(state.version, RUN)),
        steps=state.step,
        optimizer_steps=int(state.metrics["trainer.optimizer_steps"]),
        groups=state.kept + dropped,
        dropped=dropped,
        mismatch=state.metrics["trainer.mismatch_lag0_nats"],
        replayed=(await replay(at_work.bus, at_work.clock, RUN)).summary(),
        seconds=round(seconds, 1),
        peak_gib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    )


async def _scores(at_work: MemoryMachine, weights: Weights | None) -> Scores:
    wanted = RunManifest(
        run=f"{RUN}-questions-{'before' if weights is None else weights.version}",
        seed=1,
        samples=1,
        horizon=1,
        sampling=Sampling(temperature=1.0, max_tokens=MAX_TOKENS),
        max_sampled_tokens=MAX_TOKENS,
    )
    source = GeneratedSource("between", {}, name="questions", count=QUESTIONS)
    ended = await play(at_work.bus, at_work.clock, source, wanted, weights=weights, limit_s=QUESTIONS_LIMIT_S)
    return scores(wanted.run, [one.played for one in ended])


def page(found: Figures, taken: str) -> str:
    """Return the figures for a person."""
    return f"""# A small language model on two cores

Written by `python -m benchmarks.small_llm`; do not edit. SmolLM2-135M-Instruct (float32, adapters of rank {RANK})
says a number between two others; rollouts come from the local policy server, through the stages, into the trainer,
and each version goes back. {found.steps} trainer steps are no training: what is shown is that a model which others
made goes round, and what that takes.

| | |
|---|---|
| success before, {QUESTIONS} questions at temperature 1 | {_of(found.before)} |
| success after | {_of(found.after)} |
| answers that are one number, before and after | {found.before.valid:.2f}, {found.after.valid:.2f} |
| trainer steps, optimizer steps | {found.steps}, {found.optimizer_steps} |
| groups of {ALGORITHM["samples"]} sampled, of these without variance | {found.groups}, {found.dropped} |
| trainer and engine apart on tokens of the present weights | {found.mismatch:.1e} nats |
| seconds of training, a step | {found.seconds:.0f}, {found.seconds / found.steps:.0f} |
| peak memory of the process that is all of it | {found.peak_gib:.1f} GiB |
| replay | {found.replayed} |

{taken}
"""


def _of(found: Scores) -> str:
    return f"{found.success:.2f} ({found.low:.2f} to {found.high:.2f})"


@click.command("small_llm")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and write no page.")
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Trainer steps.")
@click.option(
    "--page", "target", type=click.Path(path_type=Path, dir_okay=False), default=PAGE, help="Where the page is written."
)
def command(*, as_json: bool, steps: int, target: Path) -> None:
    """Train SmolLM2-135M for a few steps on rollouts of its own, and write what it took."""
    model = smollm2.model()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="rollmill-small-llm-") as folder:
        found = asyncio.run(measure(model, Path(folder), steps))
    if as_json:
        click.echo(json.dumps(asdict_of(found)))
        return
    taken = (
        f"Taken on {before['cores']} cores without a GPU, one torch thread each for engine and trainer, Python "
        f"{before['python']}, load {before['load_1m']} before and {machine()['load_1m']} after."
    )
    target.write_text(page(found, taken), encoding="utf-8")
    click.echo(target.read_text(encoding="utf-8"), nl=False)


def asdict_of(found: Figures) -> dict[str, Any]:
    """Return the figures as plain values."""
    scored = {
        name: {"success": s.success, "low": s.low, "high": s.high, "valid": s.valid, "missing": s.missing}
        for name, s in (("before", found.before), ("after", found.after))
    }
    return {**{name: value for name, value in asdict(found).items() if name not in scored}, **scored}


if __name__ == "__main__":
    command()
