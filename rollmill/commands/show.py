"""`rollmill show RUN/GROUP/SAMPLE`: one sample from the log, turn by turn or token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from infra.arguments import Checked, FilePath
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.errors import ConfigError
from rollmill import output
from rollmill.ledger import find_trajectories
from rollmill.target import Target, parse_target, why_none
from rollmill.transcript_view import TOKEN_COLUMNS, conversation, ending, token_rows
from schemas import transcript
from schemas.messages import Trajectory
from stages.run.render import Renderer


@click.command("show")
@click.argument("target", metavar="SAMPLE", type=Checked("sample", parse_target))
@click.option("--model", type=FilePath(), default=None, help="Directory of its tokenizer.")
@click.option("--tokens", is_flag=True, help="One line per token: id, text, mask, log-prob, version.")
@output.json_option
@output.config_options
def command(target: Target, model: Path | None, tokens: bool, as_json: bool, config: Config) -> None:
    """Show a sample, named RUN/GROUP/SAMPLE; RUN alone or RUN/GROUP shows the first that is found."""
    found = output.run(_find(target, config))
    renderer = None if as_json else Renderer(model or config.policy.model)
    output.print_result(_plain(found), as_json, lambda _: _show(found, renderer, tokens=tokens))


async def _find(target: Target, config: Config) -> Trajectory:
    clock = SystemClock()
    async with connected(config.bus, client="show") as bus:
        async for trajectory in find_trajectories(bus, clock, target.run):
            if target.covers(trajectory.task):
                return trajectory
        raise ConfigError(f"no outcome of {target} is in `trajectories`: {await why_none(bus, clock, target)}")


def _plain(found: Trajectory) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(found, builtin_types=(bytes,))
    plain["transcript"] = transcript.as_builtins(found.transcript) if found.transcript else None
    return plain


def _show(found: Trajectory, renderer: Renderer | None, *, tokens: bool) -> None:
    assert renderer is not None, "a person reads text"
    task = found.task
    output.console.print(f"[bold]{task.run}/{task.group}/{task.sample}[/] attempt {task.attempt}, {task.family}")
    if found.tokenizer_digest not in {"", renderer.digest}:
        output.console.print(f"sampled with another tokenizer: give its directory with --model\n{ending(found)}")
        return
    if tokens and found.transcript is not None:
        output.print_table("tokens", TOKEN_COLUMNS, list(token_rows(found.transcript, renderer)))
    for line in conversation(found, renderer):
        output.console.print(line)
