"""`rollmill demo`: a tiny policy learns through the whole system on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from infra.arguments import INT64, TEXT, FilePath
from infra.broker.errors import JavaNotFound, MavenNotFound
from infra.errors import ConfigError
from infra.service import set_up_logging
from rollmill import output, toml
from rollmill.paths import DATA_DIR, RUN_NAME


@click.command("demo")
@click.option("--seed", default=0, show_default=True, type=INT64, help="Seed of model, tasks and sampling.")
@click.option("--bus", type=click.Choice(["kafka", "memory"]), default="kafka", show_default=True, help="Which log.")
@click.option(
    "--bootstrap", type=TEXT, default=None, help="A Kafka that runs already, `host:port`; one is started without it."
)
@click.option(
    "--data",
    type=FilePath(directory=True),
    default=DATA_DIR / "demo",
    show_default=True,
    help="Everything of the demo is kept here; an earlier one there is removed.",
)
@click.option("--no-kill", is_flag=True, help="Kill no process on the way.")
@click.option(
    "--control",
    type=click.Choice(["shuffled"]),
    default=None,
    help="Train on rewards that siblings have traded: success must not rise (exit code 1 if it does).",
)
@output.json_option
def command(
    seed: int, bus: str, bootstrap: str | None, data: Path, no_kill: bool, control: str | None, as_json: bool
) -> None:
    """Warm-start a tiny transformer, train it through the topics, evaluate, replay, and prove the books."""
    output.errors.print("loading torch ...", style="dim")
    try:
        from rollmill.demo.flow import tell  # noqa: F401, PLC0415 - imports torch; the rest of the command may not
    except ImportError as error:
        raise ConfigError(f"the demo needs torch and chDB: pip install 'rollmill[train,local]' ({error})") from error
    set_up_logging("WARNING")
    shuffled = control == "shuffled"
    result = output.run(_demo(seed, bus, bootstrap, data.absolute(), kill=not no_kill, shuffled=shuffled))
    output.print_result(result, as_json, _show)
    if shuffled and result["control"]["rose"]:
        raise SystemExit(1)


async def _demo(
    seed: int, bus: str, bootstrap: str | None, data: Path, *, kill: bool, shuffled: bool
) -> dict[str, Any]:
    from rollmill.demo.flow import tell  # noqa: PLC0415 - imports torch
    from rollmill.demo.in_process import MemoryMachine  # noqa: PLC0415 - imports torch
    from rollmill.demo.machine import Machine  # noqa: PLC0415
    from rollmill.demo.processes import ProcessMachine  # noqa: PLC0415
    from rollmill.demo.recipe import Recipe  # noqa: PLC0415 - imports torch
    from rollmill.demo.screen import Screen  # noqa: PLC0415

    recipe = Recipe(shuffled=shuffled)
    with Screen() as screen:
        story = _prepare(seed, data, recipe)
        machine: Machine
        if bus == "memory":
            machine = MemoryMachine(story.served)
        else:
            machine = ProcessMachine(
                data, story.served, story.run_toml, story.run, bootstrap=bootstrap, say=screen.service
            )
        try:
            return await tell(machine, story, recipe, screen, kill=kill)
        except (JavaNotFound, MavenNotFound) as error:
            screen.say(f"[bold red]no Kafka on this machine:[/] {error}")
            screen.say("[bold red]going on in memory, in one process: nothing is durable, nothing can be killed[/]")
            return await tell(MemoryMachine(story.served), _prepare(seed, data, recipe), recipe, screen, kill=False)


def _prepare(seed: int, data: Path, recipe: Any) -> Any:
    """Clear the demo's directory and write model and run configuration."""
    from rollmill.demo.flow import Story  # noqa: PLC0415 - imports torch
    from rollmill.demo.warmstart import make_model  # noqa: PLC0415 - imports torch
    from rollmill.supervisor import running  # noqa: PLC0415

    if running(data / RUN_NAME) is not None:
        raise ConfigError(f"a demo is running in {data}; stop it, or give another --data")
    if data.exists() and any(data.iterdir()) and not (data / "run.toml").exists():
        raise ConfigError(f"{data} is not empty and holds no demo; give another --data")
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    run = f"demo-{seed}-shuffled" if recipe.shuffled else f"demo-{seed}"
    story = Story(
        run=run,
        seed=seed,
        base=data / "base",
        served=data / "served",
        warm=data / "warm",
        run_toml=data / "run.toml",
        chart=data / "demo.png",
        tables=data / "clickhouse",
    )
    make_model(story.base, seed)
    story.served.symlink_to(story.base, target_is_directory=True)
    story.run_toml.write_text(toml.dumps(recipe.run_toml(run, seed, story.warm, data / "trainer")))
    return story


def _show(result: dict[str, Any]) -> None:
    trained = "trained on shuffled rewards" if "control" in result else "trained"
    rows = [
        ("held-out success at T = 1", f"{result['success_before']:.2f}", f"{result['success_after']:.2f}"),
        ("greedy", f"{result['greedy_before']:.2f}", f"{result['greedy_after']:.2f}"),
        ("7x7 grid, never trained on", f"{result['success_7x7_before']:.2f}", f"{result['success_7x7_after']:.2f}"),
        ("turns to success", f"{result['turns_before']:.1f}", f"{result['turns_after']:.1f}"),
    ]
    output.print_table("the policy", ("", "warm start", trained), rows)
    output.console.print(
        f"{result['steps']} trainer steps, {result['trajectories']} trajectories, {result['kills']} kills, "
        f"{result['seconds']:.0f} s; {result['replay']}; {'conserved' if result['conserved'] else 'NOT conserved'}"
    )
