"""`rollmill train RUN.toml`: trains a run from its manifest on; `--resume` goes on with one, `--fork` leaves it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import msgspec

from infra.arguments import RUN, STEP, FilePath
from infra.bus import Bus
from infra.clock import Clock, SystemClock
from infra.config import Config
from infra.connect import connected
from infra.errors import ConfigError, Failure
from infra.inference.model_digest import TokenizerMissing, tokenizer_digest
from infra.service import INTERRUPTED, set_up_logging, until_stopped
from infra.wire import Publisher
from producers.publish import ensure_manifest, require_free
from producers.sources import describe
from rollmill import output, toml
from rollmill.baseline import with_baseline
from rollmill.evaluator import evaluator_of
from rollmill.manifest import manifest_of
from schemas.control import RunManifest
from stages.handlers.registry import handler
from trainer.config import RunConfig, load_config
from trainer.crew import follow
from trainer.fork import RUN_FILE, fork
from trainer.loop import RunResult
from trainer.loop import run as run_trainer
from trainer.ranks import Ranks, ranks_here
from trainer.step_line import StepLines


@click.command("train")
@click.argument("run_toml", type=FilePath())
@click.option("--resume", is_flag=True, help="Go on with a run that was started before.")
@click.option("--rollback", type=STEP, metavar="STEP", help="Go on with the run from this step; undo the later ones.")
@click.option("--force", is_flag=True, help="Begin although the model is not fit to be trained (exit code 3).")
@click.option(
    "--fork", "fork_name", metavar="NEW_RUN", type=RUN, help="Begin a new run with this one's last checkpoint."
)
@output.preset_option
@click.option("--run-set", "run_overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of RUN.toml.")
@output.json_option
@output.config_options
def command(
    run_toml: Path,
    preset: str | None,
    resume: bool,
    rollback: int | None,
    force: bool,
    fork_name: str | None,
    run_overrides: tuple[str, ...],
    as_json: bool,
    config: Config,
) -> None:
    """Train a policy. The feeder, the stages and the policy run beside it: see `rollmill up`.

    What a run may change when it goes on with --resume is a table; an error shows it. A fork takes only the weights of
    the run's last checkpoint: it has decisions and a RUN.toml of its own, which its feeder is given. After a rollback
    the samples of undone steps count as rolled back, and are not trained on again.

    A run with an [evaluation] probes its model before the first step, and does not begin with one whose actions are
    mostly not allowed.

    `torchrun --nproc-per-node 2 -m rollmill train RUN.toml` trains with two processes that share weights and passes.
    """
    if fork_name and (resume or rollback is not None):
        raise click.UsageError(
            "--resume and --rollback go on with the run, --fork begins another one: give one of them"
        )
    set_up_logging("WARNING" if as_json else "INFO")
    with ranks_here() as ranks:
        if ranks.rank:
            follow(ranks)
            return
        run = load_config(run_toml, run_overrides, preset)
        folder = run_toml.parent
        if fork_name:
            result = output.run(_fork(run, folder, fork_name, config, ranks, force=force))
        else:
            result = output.run(_train(run, folder, config, ranks, resume=resume, rollback=rollback, force=force))
    if result is None:
        raise SystemExit(INTERRUPTED)
    output.print_result(asdict(result), as_json, _show)


async def _train(
    run: RunConfig,
    folder: Path,
    config: Config,
    ranks: Ranks,
    *,
    resume: bool = False,
    rollback: int | None = None,
    force: bool = False,
) -> RunResult | None:
    """Train to the end; None when a signal stopped it, and `--resume` goes on from there."""
    clock = SystemClock()
    result: RunResult | None = None

    async def work() -> None:
        nonlocal result
        async with connected(config.bus, client="trainer") as bus:
            evaluator = evaluator_of(bus, clock, run, folder)
            wanted = manifest_and_digests(run)
            await require_free(bus, clock, wanted)
            result = await run_trainer(
                await asyncio.to_thread(with_baseline, run, folder),
                bus,
                clock,
                resume=resume,
                rollback=rollback,
                evaluator=evaluator,
                force=force,
                on_progress=_step_lines(),
                on_rollouts=_print_as_it_is,
                manifest=lambda: write_manifest(wanted, bus, clock),
                ranks=ranks,
            )

    await until_stopped(work())
    return result


async def _fork(
    run: RunConfig, folder: Path, name: str, config: Config, ranks: Ranks, *, force: bool
) -> RunResult | None:
    """Make a fork of a run, then train it."""
    async with connected(config.bus, client="trainer") as bus:
        forked = await fork(anchored(run, folder), name, bus, SystemClock(), run_toml_of)
    output.errors.print(
        f"{name} begins with step {_step(forked)} of {run.run}: feed it by {forked.directory / RUN_FILE}"
    )
    return await _train(forked, folder, config, ranks, force=force)


def anchored(run: RunConfig, folder: Path) -> RunConfig:
    """Return the run with the files of its tasks by their whole paths, so that they are found from any folder."""

    def whole(tasks: dict[str, Any]) -> dict[str, Any]:
        return {**tasks, "jsonl": str((folder / tasks["jsonl"]).resolve())} if "jsonl" in tasks else tasks

    evaluation = run.evaluation
    if evaluation is not None:
        evaluation = evaluation.model_copy(update={"tasks": whole(evaluation.tasks)})
    return run.model_copy(update={"tasks": whole(run.tasks), "evaluation": evaluation})


def run_toml_of(run: RunConfig) -> str:
    """Return a run's configuration as RUN.toml, without what has its default."""
    return toml.dumps(run.model_dump(mode="json", exclude_defaults=True, exclude_none=True))


def _step(forked: RunConfig) -> int:
    return forked.forked_from.step if forked.forked_from else 0


def manifest_and_digests(run: RunConfig) -> RunManifest:
    """Return the run's manifest with what names code, model and prompt, for the record. Raises ConfigError."""
    described = describe(dict(run.tasks))
    try:
        tokenizer = tokenizer_digest(run.model)
    except TokenizerMissing as error:
        raise ConfigError(f"model = {run.model}: {error}") from error
    digests = {"code": version("rollmill"), "model": str(run.model), "tokenizer_digest": tokenizer}
    if described.family is not None:
        try:
            digests["prompt_version"] = handler(described.family).prompt_version
        except Failure as failure:
            raise ConfigError(f"tasks.family = {described.family!r}: {failure.cause}") from failure
    return msgspec.structs.replace(manifest_of(run), extra=digests)


async def write_manifest(wanted: RunManifest, bus: Bus, clock: Clock) -> int:
    """Write a run's manifest if it has none, and return where its trajectories begin.

    Raises:
        ConfigError: the run has another manifest.
    """
    return (await ensure_manifest(bus, clock, Publisher(bus, clock, "trainer"), wanted)).trajectories_start


def _step_lines() -> StepLines:
    """Return what prints each step: within a terminal's width, or as one line into a file."""
    terminal = output.errors
    return StepLines(
        lambda line: _print_as_it_is(output.visible(line)), terminal.width if terminal.is_terminal else None
    )


def _print_as_it_is(text: str) -> None:
    """Print text that others have a part in: without markup."""
    output.errors.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(result: dict[str, Any]) -> None:
    output.console.print(f"ended after {result['steps']} steps: {result['reason']}; model in {result['directory']}")
