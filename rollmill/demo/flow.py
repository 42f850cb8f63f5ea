"""The demo's story, from an untrained model to a replayed run; every number in its result was measured on the way.

    warm start (while the services start) -> measure -> train, with two kills -> measure -> replay -> prove the books

It is the same on every `Machine`, and a service that fails for good ends it at once. What the numbers should be is
`recipe.py`; a control (`control.py`) is told in the same way.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.errors import BusError, RollmillError
from infra.inference.base import Weights
from rollmill.demo.baselines import baseline
from rollmill.demo.chart import draw
from rollmill.demo.control import rose
from rollmill.demo.evaluation import Measured, Suite, measure
from rollmill.demo.machine import Conservation, Machine, unless_broken
from rollmill.demo.queries import CONSERVATION, QUESTIONS
from rollmill.demo.recipe import Recipe
from rollmill.demo.screen import Screen
from rollmill.demo.warmstart import warm
from rollmill.lag import stage_lags
from rollmill.transcript_view import conversation
from rollmill.watch import RunState, RunWatch
from schemas.outcome import Completed
from schemas.scores import Scores
from stages.handlers.keydoor_policies import expert, random_player
from stages.run.render import Renderer
from trainer.replay import ReplayReport, replay
from trainer.sft import SftProgress

REPLAYED = 10
"""Batches replayed at the end."""

STEP_LIMIT_S = 120.0
"""Longest wait for a trainer step, seconds; a restart of the trainer is inside it."""

KILLED_IN_FLIGHT = 16
"""The RUN worker is killed when its stage works on at least this many samples."""

SHOW_EVERY_S = 0.5
"""The figures are refreshed this often, seconds."""


class DemoFailed(RollmillError):
    """The demo cannot go on; what was started is stopped."""


@dataclass
class Kills:
    """What was killed on the way, and what it cost."""

    count: int = 0
    """Processes killed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Service -> seconds until it was back at work."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """Where the demo keeps its things."""

    run: str
    """Name of the run that is trained."""
    seed: int
    """Seed of everything."""
    base: Path
    """The untrained model."""
    served: Path
    """Link to the model that the policy starts with: the untrained one, then the warm-started one."""
    warm: Path
    """The warm-started model."""
    run_toml: Path
    """The run's configuration."""
    chart: Path
    """The picture."""
    tables: Path
    """Where ClickHouse keeps its data, if it does."""


async def tell(machine: Machine, story: Story, recipe: Recipe, screen: Screen, *, kill: bool) -> dict[str, Any]:
    """Run the demo on a machine and return its result.

    Raises:
        DemoFailed: the warm start is not fit for training, or training ended without a step.
    """
    warming = asyncio.create_task(_warm_start(story, recipe, screen))
    try:
        async with machine:
            screen.say(f"services are up on [bold]{machine.name}[/]")
            await unless_broken(machine, warming)
            result, before, after, state = await unless_broken(
                machine, _play(machine, story, recipe, screen, kill=kill)
            )
    finally:
        warming.cancel()
        with suppress(asyncio.CancelledError):
            await warming
    await asyncio.to_thread(_chart, story, recipe, before, after, state)
    screen.say(f"chart: {story.chart}")
    if machine.keeps_tables:
        _show_questions(story, screen)
    return result


async def _play(
    machine: Machine, story: Story, recipe: Recipe, screen: Screen, *, kill: bool
) -> tuple[dict[str, Any], dict[str, Measured], dict[str, Measured], RunState]:
    """Evaluate, train, evaluate, replay, check."""
    _serve(story.served, story.warm)
    await machine.load(story.warm)
    before = await _measure(machine, story, recipe, screen, "before", None)
    _require_fit(before["sampled"].scores, recipe)
    state, kills = await _train(machine, story, recipe, screen, kill=kill)
    after = await _measure(machine, story, recipe, screen, "after", Weights(state.version, story.run))
    if not recipe.shuffled:  # a hunt that it won by chance would only mislead
        _show_episode(story, before["sampled"], after["sampled"], screen)
    _say_control(before["sampled"].scores, after["sampled"].scores, recipe, screen)
    report = await replay(machine.bus, machine.clock, story.run, last=REPLAYED)
    screen.say(f"replay: [bold]{report.summary()}[/]")
    seconds = screen.seconds
    place = await machine.conservation(story.run)
    _show_conservation(story, place, screen)
    result = _result(machine, before, after, state, kills, report, place, seconds)
    return {**result, **_control(before["sampled"].scores, after["sampled"].scores, recipe)}, before, after, state


async def _warm_start(story: Story, recipe: Recipe, screen: Screen) -> None:
    def on_step(progress: SftProgress) -> None:
        screen.figures(f"warm start: step {progress.step}/{progress.steps}, loss {progress.loss:.3f}")

    result = await asyncio.to_thread(warm, story.base, story.warm, recipe, story.seed, on_step)
    screen.say(f"warm start done: loss {result.first_loss:.2f} -> {result.last_loss:.2f} in {result.steps} steps")


def _serve(link: Path, model: Path) -> None:
    """Let the link name a model: a policy that dies must not come back with the weights of before."""
    fresh = link.with_suffix(".new")
    fresh.symlink_to(model, target_is_directory=True)
    fresh.replace(link)


async def _measure(
    machine: Machine, story: Story, recipe: Recipe, screen: Screen, when: str, weights: Weights | None
) -> dict[str, Measured]:
    """Play all suites at once, so that the engine batches across them.

    A version may be announced before the policy serves it; only these weights count. None: nothing is trained yet.
    """
    done = dict.fromkeys((suite.name for suite in recipe.suites()), 0)
    total = sum(suite.episodes for suite in recipe.suites())

    async def one(suite: Suite) -> Measured:
        def on_progress(count: int) -> None:
            done[suite.name] = count
            screen.figures(f"evaluation {when}: {sum(done.values())}/{total} episodes")

        run = f"{story.run}-{when}-{suite.name}"
        return await measure(
            machine.bus,
            machine.clock,
            suite,
            run=run,
            seed=story.seed,
            weights=weights,
            on_progress=on_progress,
        )

    measured = await asyncio.gather(*(one(suite) for suite in recipe.suites()))
    found = {suite.name: each for suite, each in zip(recipe.suites(), measured, strict=True)}
    sampled, greedy, larger = (found[name].scores for name in ("sampled", "greedy", "7x7"))
    screen.say(
        f"{when}: success [bold]{sampled.success:.2f}[/] ({sampled.low:.2f} to {sampled.high:.2f}), "
        f"greedy {greedy.success:.2f}, 7x7 {larger.success:.2f}, format {sampled.valid:.2f}"
    )
    return found


def _require_fit(score: Scores, recipe: Recipe) -> None:
    if score.valid < recipe.format_floor or score.success < recipe.success_floor:
        raise DemoFailed(
            f"the warm start is not fit for training: format {score.valid:.2f} (at least {recipe.format_floor}), "
            f"success {score.success:.2f} (at least {recipe.success_floor}); try another --seed"
        )


async def _train(
    machine: Machine, story: Story, recipe: Recipe, screen: Screen, *, kill: bool
) -> tuple[RunState, Kills]:
    watch, kills = RunWatch(machine.bus, machine.clock, story.run), Kills()
    await watch.start()
    following = asyncio.create_task(watch.follow())
    showing = asyncio.create_task(_show_figures(machine, watch, recipe, screen))
    try:
        await machine.train(story.run_toml)
        if kill:
            await _kill(machine, "run", watch, recipe.kill_run_after, kills, screen, busy=KILLED_IN_FLIGHT)
            await _kill(machine, "trainer", watch, recipe.kill_trainer_after, kills, screen)
        limit_s = recipe.time_limit_s + recipe.min_steps * STEP_LIMIT_S
        await watch.until(lambda state: state.ended is not None, "the end", limit_s)
    finally:
        for task in (following, showing):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    state = watch.state
    if not state.step:
        raise DemoFailed(f"training ended without a step: {state.ended}")
    screen.say(f"training ended after [bold]{state.step}[/] steps: {state.ended}; {state.repeated} starts repeated")
    return state, kills


async def _kill(
    machine: Machine, service: str, watch: RunWatch, after: int, kills: Kills, screen: Screen, *, busy: int = 0
) -> None:
    """Kill one process after a step, while it has work, and wait until it works again."""

    def due(state: RunState) -> bool:
        return state.ended is not None or (state.step >= after and state.in_flight[service] >= busy)

    await watch.until(due, f"step {after} with work in flight", STEP_LIMIT_S * after)
    if watch.state.ended is not None:
        return
    in_flight = watch.state.in_flight.total()
    try:
        lags = await stage_lags(machine.bus)
    except BusError:
        lags = []  # the log is away itself: the kill says the rest
    seconds = await machine.kill(service)
    if seconds is None:
        return
    kills.count += 1
    kills.seconds[service] = seconds
    behind = ", ".join(f"{lag.stage} {lag.lag}" for lag in lags)
    screen.say(
        f"[yellow]kill -9 {service}[/] at step {after}: {in_flight} samples in flight, lag {behind}; "
        f"back after [bold]{seconds:.1f} s[/], {watch.state.repeated} starts repeated so far"
    )


async def _show_figures(machine: Machine, watch: RunWatch, recipe: Recipe, screen: Screen) -> None:
    while True:
        try:
            lags = await stage_lags(machine.bus)
        except BusError as error:
            screen.say(f"[yellow]the log does not answer, its services wait:[/] {error}")
        else:
            screen.training(watch.state, lags, max_steps=recipe.max_steps)
        await machine.clock.sleep(SHOW_EVERY_S)


def _show_episode(story: Story, before: Measured, after: Measured, screen: Screen) -> None:
    """Show the same hunt before and after: one that was lost at first and won later."""
    renderer = Renderer(story.warm)
    lost = {t.task.row: t for t in before.trajectories if isinstance(t.outcome, Completed) and not t.outcome.success}
    for later in after.trajectories:
        if later.task.row in lost and isinstance(later.outcome, Completed) and later.outcome.success:
            for title, shown in (("before", lost[later.task.row]), ("after", later)):
                screen.say(f"one hunt, {title}:")
                for line in conversation(shown, renderer):
                    screen.console.print(line)
            return


def _say_control(before: Scores, after: Scores, recipe: Recipe, screen: Screen) -> None:
    """Say whether a control did what it must."""
    if recipe.shuffled:
        verdict = "[red]it ROSE without its reward[/]" if rose(before, after) else "[green]it did not rise[/]"
        screen.say(
            f"control, with rewards that siblings have traded: {before.success:.2f} -> {after.success:.2f}, {verdict}"
        )


def _control(before: Scores, after: Scores, recipe: Recipe) -> dict[str, Any]:
    """Return what the result says of a control; nothing of a run that is none."""
    return {"control": {"rewards": "shuffled", "rose": rose(before, after)}} if recipe.shuffled else {}


def _show_conservation(story: Story, place: Conservation, screen: Screen) -> None:
    parts = " + ".join(f"{count} {name}" for name, count in place.counts.items())
    verdict = "[green]conserved[/]" if place.conserved else "[red]NOT conserved[/]"
    screen.say(f"{CONSERVATION.text} {CONSERVATION.of(story.run)}")
    screen.say(f"{place.admitted} samples admitted = {parts}: {verdict}")
    for violation in place.violations[:5]:
        screen.say(f"[red]{violation}[/]")


def _show_questions(story: Story, screen: Screen) -> None:
    """Print what to ask next; ClickHouse is started again for it, on the demo's own data."""
    screen.say("three questions worth asking next:")
    screen.print(f"rollmill clickhouse --data {story.tables}      # in one terminal, then in another:")
    for question in QUESTIONS:
        screen.print(f"# {question.text}")
        screen.print(f'rollmill sql "{question.of(story.run)}"')


def _chart(
    story: Story, recipe: Recipe, before: dict[str, Measured], after: dict[str, Measured], state: RunState
) -> None:
    suite = recipe.suites()[0]
    best = baseline(expert, suite, story.seed)
    players = {
        "random": baseline(random_player, suite, story.seed),
        "warm start": before["sampled"].scores,
        "final": after["sampled"].scores,
        "expert": best,
    }
    draw(story.chart, players, state.curve, best.turns_to_success)


def _result(
    machine: Machine,
    before: dict[str, Measured],
    after: dict[str, Measured],
    state: RunState,
    kills: Kills,
    report: ReplayReport,
    place: Conservation,
    seconds: float,
) -> dict[str, Any]:
    return {
        "bus": machine.name,
        "success_before": before["sampled"].scores.success,
        "success_after": after["sampled"].scores.success,
        "ci": {
            "before": [before["sampled"].scores.low, before["sampled"].scores.high],
            "after": [after["sampled"].scores.low, after["sampled"].scores.high],
        },
        "greedy_before": before["greedy"].scores.success,
        "greedy_after": after["greedy"].scores.success,
        "success_7x7_before": before["7x7"].scores.success,
        "success_7x7_after": after["7x7"].scores.success,
        "format_before": before["sampled"].scores.valid,
        "turns_before": before["sampled"].scores.turns_to_success,
        "turns_after": after["sampled"].scores.turns_to_success,
        "seconds": round(seconds, 1),
        "steps": state.step,
        "stopped": state.ended,
        "groups_kept": state.kept,
        "groups_dropped": dict(state.dropped),
        "trajectories": place.admitted,
        "dispositions": place.counts,
        "kills": kills.count,
        "recovered_s": {name: round(value, 1) for name, value in kills.seconds.items()},
        "repeated": state.repeated,
        "replay_equal": report.all_equal,
        "replay": report.summary(),
        "conserved": place.conserved,
    }
