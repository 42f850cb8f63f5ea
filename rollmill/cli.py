"""The command line: `rollmill COMMAND`. Thin: each command is a module of `rollmill/commands`, loaded when called.

A command that gives a result takes `--json` and then prints one JSON object last on standard output; one that serves
runs until it is stopped. Errors go to standard error and say what was tried, what was found and what to do; with
`--json` the object on standard output is then `{"error": {"kind": ..., "message": ..., "exit_code": ...}}`. Exit codes:
0 done, 1 it did not work, 2 the call was wrong, 3 `train` found the model unfit to be trained, 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from infra.arguments import require_text
from infra.disk import described
from infra.errors import RollmillError
from infra.plain_text import visible
from infra.service import INTERRUPTED
from rollmill.json_line import error_line
from rollmill.paths import DATA_DIR

SHOWN_CHARS = 4_000
"""Longest error that is printed: it may repeat what was given."""

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Watch a policy learn through the whole system on this machine."),
    "up": ("up", "Run all services on this machine, supervised."),
    "train": ("train", "Train a policy as RUN.toml says."),
    "plan": ("plan", "Estimate what a run will need: memory, log, time, cost."),
    "publish": ("publish", "Publish the tasks of a JSONL file."),
    "runs": ("runs", "List the runs."),
    "status": ("status", "Show lag, what is in flight and what it waits for."),
    "cancel": ("cancel", "Cancel a run, a group or a sample: queued and running."),
    "show": ("show", "Show one sample, turn by turn or token by token."),
    "backends": ("backends", "The engines that sample: list, add, drain, remove."),
    "dead": ("dead", "See what was given up, and do it again: list, show, redrive."),
    "explain": ("explain", "Say why a run's next batch does not form."),
    "replay": ("replay", "Replay a run from its topics and compare."),
    "diff": ("diff", "Find the first step in which two runs differ, and why."),
    "compare": ("compare", "Say which of two evaluated versions is better on the same tasks."),
    "export": ("export", "Write a version of a run as a model folder: RUN@best, RUN@last, RUN@step:N."),
    "check": ("check", "Prove where every sample of a run went."),
    "sql": ("sql", "Ask ClickHouse."),
    "keep": ("keep", "Keep the large values of a run from collection."),
    "blobs": ("blobs", "Large values: what the store holds, and delete what no record needs."),
    "doctor": ("doctor", "Say what works on this machine and what is missing."),
    "broker": ("broker", "A local one-node Apache Kafka: start, stop, status, topics, run."),
    "clickhouse": ("clickhouse", "Serve ClickHouse's HTTP interface from a local directory."),
    "policy": ("policy", "Serve a policy, and follow the weights of a run."),
    "envhost": ("envhost", "Serve environments."),
    "init": ("stage", "Run one INIT worker."),
    "run": ("stage", "Run one RUN worker."),
    "eval": ("stage", "Run one EVAL worker."),
    "feeder": ("feeder", "Feed a run from its task source, as its trainer allows."),
    "reaper": ("reaper", "End samples whose time ran out."),
    "trainer": ("train", "The trainer service: the same as `train`."),
    "board": ("board", "Serve the live board: what every sample does right now."),
    "sink": ("sink", "Write the topics to ClickHouse, exactly once."),
}
"""Command -> (module in rollmill/commands, what it does)."""


class Commands(click.Group):
    """Loads a command's module when the command is called, so that `--help` imports nothing heavy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, importing its module."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rollmill.commands.{COMMANDS[cmd_name][0]}")
        found: click.Command = getattr(module, f"{cmd_name}_command", None) or module.command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rollmill")
def cli() -> None:
    """Rollout-as-a-service for reinforcement learning of multi-turn LLM agents, on a durable log."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    Args:
        arguments: the call, without the program's name; that of this process unless given.
    """
    # Each failed reconnect would write a line; what matters comes as an error of ours.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    given = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    try:
        require_text(given, os.environ)
        cli.main(given, standalone_mode=False)
    except click.ClickException as error:
        _say(error)
        _fail(error, error.format_message(), error.exit_code, as_json=as_json)
    except (click.Abort, KeyboardInterrupt) as error:
        _fail(error, "interrupted", INTERRUPTED, as_json=as_json)
    except RollmillError as error:
        click.echo(f"error: {shown(str(error))}", err=True)
        _fail(error, str(error), error.exit_code, as_json=as_json)
    except OSError as error:  # a full disk, a read-only folder: nobody's bug
        text = described(error, [DATA_DIR])
        click.echo(f"error: {text}", err=True)
        _fail(error, text, 1, as_json=as_json)
    except Exception as error:  # a bug: whoever reads standard output is told too, and the trace says the rest
        if as_json:
            click.echo(error_line(error, repr(error), 1))
        raise


def _say(error: click.ClickException) -> None:
    """Print a wrong call with how to call right."""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} -h' for help.\n", err=True)
    click.echo(f"Error: {shown(error.format_message())}", err=True)


def shown(text: str) -> str:
    """Return what an error says so that a person can read it: as long as that, with nothing in it that is obeyed."""
    cut = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"
    return visible(cut)


def _fail(error: BaseException, text: str, code: int, *, as_json: bool) -> NoReturn:
    """Exit; a program that asked for JSON gets an object, as it would of a result."""
    if as_json:
        click.echo(error_line(error, text, code))
    sys.exit(code)
