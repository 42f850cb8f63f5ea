"""`rollmill plan RUN.toml`: what a run will need, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from infra.arguments import FilePath
from infra.settings import given_by
from producers.sources import describe
from rollmill import output
from trainer.config import PLAN, RUN_SET, make_config, read_run
from trainer.model_shape import shape_of
from trainer.plan import Planned
from trainer.plan_config import make_plan_config
from trainer.plan_figures import Figure, LogBytes, bottleneck, notes, parameters, problems, sections
from trainer.plan_work import Limits, episodes_of_step
from trainer.record_sizes import EpisodeSize, sample_bytes, step_bytes


@click.command("plan")
@click.argument("run_toml", type=FilePath())
@output.preset_option
@click.option("--run-set", "run_overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of RUN.toml.")
@output.json_option
def command(run_toml: Path, preset: str | None, run_overrides: tuple[str, ...], as_json: bool) -> None:
    """Estimate tokens, memory, log, time and cost of a run, and say where its bottleneck is.

    Nothing is started or loaded. What is assumed of episodes and machines is the [plan] section of RUN.toml
    (`--run-set plan.engine_gpus=8` for a try); the model's shape is its config.json, or [plan.model].
    """
    planned, origin = make_plan(run_toml, run_overrides, preset)
    log = output.run(measured(planned))
    output.print_result(as_values(planned, log, origin), as_json, lambda _: _show(planned, log, origin))


def make_plan(path: Path, overrides: Sequence[str] = (), preset: str | None = None) -> tuple[Planned, str]:
    """Return the plan of a run, and where its model's shape is from.

    Raises:
        ConfigError: the run, its tasks, the assumptions or the model's shape cannot be.
    """
    values = read_run(path, overrides, preset)
    given = given_by(RUN_SET, overrides)
    inside = {key.removeprefix(f"{PLAN}."): by for key, by in given.items() if key.startswith(f"{PLAN}.")}
    assumed = make_plan_config(values.pop(PLAN, {}), str(path), inside)
    run = make_config(values, str(path), given)
    tasks = describe(dict(run.tasks))
    shape, origin = shape_of(run.model, assumed.model)
    limits = Limits(turn=tasks.max_tokens, episode=tasks.max_sampled_tokens)
    return Planned(run=run, shape=shape, assumed=assumed, limits=limits), origin


async def measured(plan: Planned) -> LogBytes:
    """Return what the log takes, as records of this size measure."""
    algorithm, assumed, episode = plan.run.algorithm, plan.assumed, plan.episode
    size = EpisodeSize(
        turns=max(1, round(episode.turns)),
        prompt=round(assumed.prompt_tokens),
        sampled=max(1, round(assumed.turn_tokens)),
        observed=round(assumed.observation_tokens),
        vocabulary=plan.shape.vocabulary,
        payload=round(assumed.payload_bytes),
    )
    dropped = episodes_of_step(algorithm, assumed) / algorithm.samples - algorithm.groups
    step = await step_bytes(
        algorithm.groups, algorithm.samples, dropped=round(dropped), buffered=algorithm.max_lag * algorithm.groups
    )
    return LogBytes(sample=await sample_bytes(size), step=step)


def as_values(plan: Planned, log: LogBytes, origin: str) -> dict[str, Any]:
    """Return the plan as plain values."""
    found = [figure for figures in sections(plan, log).values() for figure in figures]
    return {
        "run": plan.run.run,
        "model": {"parameters": plan.shape.count, "from": origin},
        "figures": {figure.name: figure.value for figure in found},
        "follows_from": {figure.name: figure.follows for figure in found},
        "phases": [
            {"steps": phase.steps, "horizon": phase.horizon, "step_s": phase.time.whole, "hours": phase.hours}
            for phase in plan.phases
        ],
        "bottleneck": plan.time(plan.horizon).bottleneck,
        "bottleneck_because": bottleneck(plan),
        "problems": problems(plan),
        "notes": notes(plan),
        "assumed": plan.assumed.model_dump(mode="json"),
    }


def _show(plan: Planned, log: LogBytes, origin: str) -> None:
    output.console.print(f"{plan.run.run}: {parameters(plan.shape.count)}, from {origin}", markup=False)
    for title, figures in sections(plan, log).items():
        rows = [(figure.name, shown(figure), figure.follows) for figure in figures]
        output.print_table(title, ("figure", "value", "follows from"), rows)
    if len(plan.phases) > 1:
        phases = [(s.steps, s.horizon, f"{s.time.whole:.3g} s", f"{s.hours:.3g} h") for s in plan.phases]
        output.print_table("phases", ("steps", "horizon", "step", "together"), phases)
    output.console.print(f"bottleneck: {bottleneck(plan)}", markup=False)
    for note in notes(plan):
        output.console.print(f"note: {note}", markup=False)
    for problem in problems(plan):
        output.console.print(f"[red]problem[/]: {escape(problem)}")


def shown(figure: Figure) -> str:
    """Return a value with its unit, for a person."""
    name, value = figure.name, figure.value
    if name.endswith("_bytes"):
        for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if value >= size:
                return f"{value / size:.3g} {unit}"
        return f"{value:.0f} B"
    if name.endswith("_share"):
        return f"{value:.0%}"
    if name.endswith("_per_s"):
        return f"{value:,.0f}"
    if name.endswith("_s"):
        return f"{value:.3g} s"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
