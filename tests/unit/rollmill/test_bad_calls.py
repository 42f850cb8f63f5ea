"""Whatever a person types, a command answers with one clear error: exit code 1 or 2, no trace, JSON where asked for.

The commands and their parameters are found from the parser, so that a new one is covered without being named here. A
kind of parameter that this file does not know fails: then it says here what is hostile to it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from infra import connect
from infra.arguments import Checked, FilePath, Text
from infra.memory import MemoryBus
from rollmill.cli import cli, main
from schemas.topics import TABLE

NO_TEXT = "caf\udce9"
"""As Python hands over bytes that are not UTF-8."""

BEYOND = str(10**30)
"""More than 64 bits."""

RUN_TOML = 'run = "r"\nmodel = "m"\ndirectory = "d"\n[tasks]\nfamily = "toy"\n'

HOSTILE_SETTINGS = (
    "", "x", "=1", "bus..bootstrap=x", "nosuch.key=1", "run.nosuch=1", "bus.bootstrap=kafka", "bus.bootstrap=k:99999",
    f"run.max_in_flight={BEYOND}", "run.max_in_flight=" + "9" * 5000, "run.drain_s=nan", "run=7", "policy.url=x",
    'policy.model="\\u0000"',
)  # fmt: skip

HOSTILE_RULES = (
    "", "x", "=1", "nosuch=1", "algorithm.nosuch=1", "algorithm.horizon=0", "algorithm.horizon=" + BEYOND,
    "seed=" + BEYOND, "seed=" + "9" * 5000, "threads=0", "run=..", "run=-x", "run=''", 'run="a/b"', 'run="a\\u0000"',
    "run=" + "x" * 101, "algorithm.temperature=nan", "algorithm.lr=inf", "tasks=7", "algorithm=[]",
    'model="\\u0000"', 'directory="\\u0000"', 'publish="a\\nb"', "model=7", "publish=[]",
)  # fmt: skip

HOSTILE_STRINGS = {
    "--set": HOSTILE_SETTINGS,
    "--run-set": HOSTILE_RULES,
    "--preset": ("", "nosuch", "../debug"),
    "--since": ("yesterday", "5", "9" * 40 + "d", "0001-01-01T00:00:00+99:99"),
    "--only": ("", "tasks", "tasks:0", f"tasks:0:{BEYOND}", "tasks:x:0", "tasks:²:0"),
    "--password": (),
    "query": ("", "-- nothing", "DROP TABLE tasks", "SELECT 1; DROP TABLE tasks", "SELECT 'open"),
}
"""What is hostile to a parameter that takes any text."""

TEXTS = ("", "a\x00b", "a\nb", "\x1b[2J", "x" * 100_000)
NAMES = (*TEXTS, "..", "-x", "a b", "a/b/c/d", "é", "a\u202eb", "x" * 101)
NUMBERS = (BEYOND, f"-{BEYOND}", "9" * 5000, "", "nan", "1.5.2", "0x10", "²")


class Parameter(NamedTuple):
    """One parameter of one command."""

    path: tuple[str, ...]
    """The command's words."""
    command: click.Command
    found: click.Parameter

    def __str__(self) -> str:
        return f"{' '.join(self.path)} {self.found.opts[0]}"

    @property
    def hostile(self) -> tuple[str, ...]:
        """Values that it must not take."""
        kind, name = self.found.type, self.found.opts[0]
        if name in HOSTILE_STRINGS:
            return HOSTILE_STRINGS[name]
        if isinstance(kind, click.IntRange | click.FloatRange):
            return NUMBERS if isinstance(kind, click.IntRange) else (*NUMBERS, "inf", "-inf", "1e400", "-1")
        if isinstance(kind, FilePath):
            return ("", "a\x00b")
        if isinstance(kind, click.Choice):
            return ("", "nosuch", *TEXTS[1:])
        if isinstance(kind, Checked):
            return NAMES
        assert isinstance(kind, Text), f"{self}: say in this file which values are hostile to a {kind!r}"
        return TEXTS

    def call(self, value: str, toml: Path) -> list[str]:
        """Return a call that is right but for this value, which no option can be taken for."""
        others = [one for one in self.command.params if one.required and one is not self.found]
        flags = [f"{one.opts[0]}={_right(one, toml)}" for one in others if isinstance(one, click.Option)]
        places = {one.name: _right(one, toml) for one in others if isinstance(one, click.Argument)}
        if isinstance(self.found, click.Argument):
            places[self.found.name] = value
        else:
            flags.append(f"{self.found.opts[0]}={value}")
        order = [one.name for one in self.command.params if isinstance(one, click.Argument)]
        return [*self.path, *_json(self.command), *flags, "--", *(places[name] for name in order)]


def _right(parameter: click.Parameter, toml: Path) -> str:
    if isinstance(parameter.type, FilePath):
        return str(toml)
    return {"version": "r@last", "letter": "0:0", "query": "SELECT 1"}.get(parameter.name, "r")


def _json(command: click.Command) -> list[str]:
    return ["--json"] if any("--json" in parameter.opts for parameter in command.params) else []


def commands(path: tuple[str, ...] = (), found: click.Command = cli):
    """Yield every command that can be called, with its words."""
    if not isinstance(found, click.Group):
        yield path, found
        return
    ctx = click.Context(found)
    for name in found.list_commands(ctx):
        yield from commands((*path, name), found.get_command(ctx, name))


COMMANDS = list(commands())
PARAMETERS = [
    Parameter(path, command, found)
    for path, command in COMMANDS
    for found in command.params
    if not getattr(found, "is_flag", False)
]


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """An empty folder, no settings, and nothing left behind in this process."""
    for name in [name for name in os.environ if name.startswith("ROLLMILL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    thresholds, level, handlers = gc.get_threshold(), logging.root.level, logging.root.handlers[:]
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers


@pytest.fixture
def toml(tmp_path):
    """A RUN.toml."""
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML)
    return path


@pytest.fixture
def called(capsys):
    """Call the command line; return exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int | None, str, str]:
        # A bug is any other exception, and fails the test with its trace.
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code, *capsys.readouterr()

    return call


def refused(answer: tuple[int | None, str, str], arguments: list[str]) -> None:
    """Fail unless this is one clear error."""
    code, out, err = answer
    shown = [one[:80] for one in arguments]
    assert code in {1, 2}, f"{shown} ended with {code}: {err}"
    assert "rror: " in err, f"{shown} said nothing: {err!r}"
    assert "Traceback" not in err
    assert len(err) < 5_000, f"{shown} was told more than anybody reads"
    assert "\x1b" not in err, f"{shown} had its control characters obeyed"
    if "--json" in arguments:
        found = json.loads(out)
        assert list(found) == ["error"], shown
        assert found["error"]["exit_code"] == code
        assert found["error"]["message"]


@pytest.mark.parametrize("parameter", PARAMETERS, ids=str)
def test_a_hostile_value_is_refused_before_anything_is_opened(parameter, toml, called, monkeypatch):
    """Each parameter of each command."""
    monkeypatch.setattr(connect, "KafkaBus", lambda *_, **__: pytest.fail("the log was opened"))
    for value in (*parameter.hostile, NO_TEXT):
        arguments = parameter.call(value, toml)
        refused(called(*arguments), arguments)
    assert [toml] == list(Path(toml.parent).iterdir()), "something was written"


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_what_no_command_knows_is_refused(path, command, called, toml):
    """An option that there is not, and an argument too many."""
    for more in (["--nosuch"], ["--", *["x"] * 9]):
        arguments = [*path, *_json(command), *more]
        refused(called(*arguments), arguments)


@pytest.mark.parametrize("arguments", [["nosuch"], ["nosuch", "--json"], ["dead", "nosuch", "--json"], [NO_TEXT]])
def test_a_command_that_there_is_not_is_refused(arguments, called):
    """As a program that asked for JSON understands too."""
    refused(called(*arguments), arguments)


def test_the_environment_is_no_way_around(called, monkeypatch):
    """A setting of ours that is no text, wherever it would end up."""
    monkeypatch.setenv("ROLLMILL_BUS__BOOTSTRAP", NO_TEXT)
    code, _, err = called("runs")

    assert code == 2
    assert "the environment's ROLLMILL_BUS__BOOTSTRAP is not UTF-8: b'caf\\xe9'" in err


@pytest.mark.parametrize("parameter", PARAMETERS, ids=str)
def test_a_number_has_bounds_and_a_path_a_name(parameter):
    """64 bits at most; an empty path would be the current directory."""
    kind = parameter.found.type
    assert not isinstance(kind, click.Path) or isinstance(kind, FilePath)
    assert not isinstance(kind, type(click.INT)) or isinstance(kind, click.IntRange)
    assert not isinstance(kind, type(click.FLOAT)) or isinstance(kind, click.FloatRange)
    if isinstance(kind, click.IntRange | click.FloatRange):
        assert None not in (kind.min, kind.max)
        assert -(2**63) <= kind.min <= kind.max < 2**63


ABSENT = [
    ["show", "nosuch"], ["show", "nosuch/g/0"], ["explain", "batch", "nosuch"], ["keep", "nosuch"],
    ["replay", "nosuch"], ["replay", "nosuch", "--set", "filter=off"], ["replay", "nosuch", "--from", "eval"],
    ["replay", "nosuch", "--from", "run", "--into", "new"], ["diff", "nosuch", "other"], ["cancel", "nosuch"],
    ["dead", "show", "0:0"], ["dead", "show", "99:0"], ["dead", "redrive", "--id", "0:0"],
    ["export", "nosuch@best", "--to", "x"], ["compare", "nosuch@best", "other@last"], ["compare", "nosuch", "other"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", ABSENT, ids=" ".join)
def test_what_the_log_does_not_hold_is_an_error_that_names_it(arguments, called, monkeypatch, tmp_path):
    """On a log that is empty."""

    bus = MemoryBus()
    asyncio.run(bus.create_topics(TABLE))
    monkeypatch.setattr(connect, "KafkaBus", lambda *_, **__: bus)
    (tmp_path / "blobs" / "incoming").mkdir(parents=True)
    arguments = [*arguments, "--json", "--set", f"bus.blobs={tmp_path / 'blobs'}"]

    refused(called(*arguments), arguments)
