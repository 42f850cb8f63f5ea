"""`rollmill dead list | show | redrive`: what was given up, why, and doing it again."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
import msgspec

from infra.arguments import TEXT
from infra.blobs import BlobsAway
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.dead_letter import DeadLetter
from infra.errors import ConfigError
from producers.redrive import Redrive
from rollmill import output
from rollmill.graveyard import Line, Wanted, letter_at, letters, newest
from rollmill.output import iso, safe
from schemas import transcript
from schemas.codec import DecodeError
from schemas.message import Message

DUMP_BYTES = 256
"""So many of the first bytes are shown of what cannot be read."""

UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
"""Unit of `--since` -> seconds."""


def _since_ms(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Return a time, or how long ago it was, as milliseconds since the epoch."""
    if ago := re.fullmatch(r"([0-9]{1,9})([smhd])", value):
        return max(0, SystemClock().now_ms() - int(ago[1]) * UNITS_S[ago[2]] * 1000)
    try:
        return int(datetime.fromisoformat(value).timestamp() * 1000) if value else 0
    except (ValueError, OverflowError, OSError):  # no such text, or a year that the system's clock has not
        problem = f"{value!r} is no time; expected how long ago (90s, 15m, 6h, 2d) or an ISO time"
        raise click.BadParameter(problem, ctx, param) from None


def _or_any(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str:
    """Return what was given, and where nothing was what stands for all; an empty text is no name of anything."""
    return value or ""


def filters(command: Any) -> Any:
    """Add the options that choose letters."""
    for option in (
        click.option(
            "--since", "since_ms", callback=_since_ms, default="", help="Buried since: 2h, 3d, or an ISO time."
        ),
        click.option(
            "--kind", type=TEXT, callback=_or_any, help="Given up for this, such as engine, handler or poison."
        ),
        click.option("--run", "run", type=TEXT, callback=_or_any, help="About samples of this run."),
    ):
        command = option(command)
    return command


@click.group("dead")
def command() -> None:
    """See what was given up, and do it again."""


@command.command("list")
@filters
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 10_000), help="Most letters shown.")
@output.json_option
@output.config_options
def list_letters(limit: int, as_json: bool, config: Config, **chosen: Any) -> None:
    """List dead letters, the newest first."""
    found = output.run(_list(config, Wanted(**chosen), limit))
    output.print_result(
        {"letters": [{**asdict(line), "at": iso(line.at_ms, "milliseconds")} for line in found]}, as_json, _show_list
    )


async def _list(config: Config, wanted: Wanted, limit: int) -> list[Line]:
    async with connected(config.bus, client="dead") as bus:
        return await newest(bus, SystemClock(), wanted, limit)


def _show_list(result: dict[str, Any]) -> None:
    columns = ("id", "at", "kind", "stage", "topic", "sample", "cause")
    rows = [[safe(line[column]) for column in columns] for line in result["letters"]]
    output.print_table("dead letters", columns, rows)


@command.command("show")
@click.argument("letter", metavar="ID", type=TEXT)
@output.json_option
@output.config_options
def show(letter: str, as_json: bool, config: Config) -> None:
    """Show one dead letter, named PARTITION:OFFSET as `list` shows it."""
    output.print_result(output.run(_describe(config, letter)), as_json, _show_letter)


async def _describe(config: Config, name: str) -> dict[str, Any]:
    async with connected(config.bus, client="dead") as bus:
        return await _described(await letter_at(bus, SystemClock(), name))


async def _described(letter: DeadLetter) -> dict[str, Any]:
    original = letter.original
    described = {
        **asdict(await Line.of(letter)),
        "at": iso(letter.record.timestamp_ms, "milliseconds"),
        "first_failed_ms": letter.death.first_failed_ms,
        "source": {"topic": original.topic, "partition": original.partition, "offset": original.offset},
        "key": None if original.key is None else original.key.decode(errors="backslashreplace"),
        "headers": {header: value.decode(errors="backslashreplace") for header, value in letter.record.headers},
        "bytes": len(original.value or b""),
        "message": None,
        "unreadable": None,
    }
    try:
        described["message"] = _jsonable(await letter.message())
    except (DecodeError, BlobsAway) as error:  # a person is told the rest, whatever is wrong with the value
        described["unreadable"] = str(error)
        described["dump"] = hexdump((original.value or b"")[:DUMP_BYTES])
    return described


def _show_letter(result: dict[str, Any]) -> None:
    say = output.console.print
    say(f"[bold]{result['id']}[/], buried by {safe(result['stage'])} at {result['at']}")
    say(f"{safe(result['kind'])}: {safe(result['cause'])}")
    output.print_table(
        "headers", ("header", "value"), [[safe(cell) for cell in pair] for pair in result["headers"].items()]
    )
    if result["message"] is None:
        say(f"{result['bytes']} bytes that cannot be read: {safe(result['unreadable'])}")
        for line in result["dump"]:
            say(safe(line), highlight=False)
    else:
        say(safe(json.dumps(_short(result["message"]), indent=2, default=str)), highlight=False)


@command.command("redrive")
@click.option("--all", "everything", is_flag=True, help="Every letter that the other options choose.")
@click.option(
    "--id", "ids", multiple=True, type=TEXT, metavar="ID", help="This letter, PARTITION:OFFSET; may be repeated."
)
@click.option(
    "--again",
    is_flag=True,
    help="Also groups that an earlier redrive published; only samples without an outcome gain by it.",
)
@filters
@output.json_option
@output.config_options
def redrive(everything: bool, ids: tuple[str, ...], again: bool, as_json: bool, config: Config, **chosen: Any) -> None:
    """Publish the tasks of dead letters again, each as a new group.

    A group that several letters speak of is published once, and one that an earlier redrive published is left alone. A
    letter that holds no task is named, and the rest goes on.
    """
    if everything == bool(ids):
        raise click.UsageError(
            "say either --all or which letters: --id PARTITION:OFFSET, as `rollmill dead list` shows"
        )
    result = output.run(_redrive(config, ids, Wanted(**chosen), again=again))
    output.print_result(result, as_json, _show_redriven)
    if result["refused"] and (ids or not (result["groups"] or result["before"])):
        raise SystemExit(1)


async def _redrive(config: Config, ids: tuple[str, ...], wanted: Wanted, *, again: bool) -> dict[str, Any]:
    clock = SystemClock()
    async with connected(config.bus, client="redrive") as bus:
        chosen = _named(bus, ids, wanted) if ids else letters(bus, clock, wanted)
        report = await Redrive(bus, clock).run(chosen, again=again)
    return {
        "groups": [msgspec.to_builtins(group) for group in report.groups.values()],
        "tasks": sum(group.samples for group in report.groups.values()),
        "letters": report.letters,
        "before": [msgspec.to_builtins(group) for group in report.before.values()],
        "letters_before": report.letters_before,
        "refused": report.refused,
        "refusals": [{"id": name, "reason": reason} for name, reason in report.refusals],
    }


async def _named(bus: Bus, ids: tuple[str, ...], wanted: Wanted) -> AsyncIterator[DeadLetter]:
    """Yield letters by their ids, all of which must be there before any is redriven."""
    found = [await letter_at(bus, SystemClock(), name) for name in ids]
    for letter in found:
        if not await wanted.has(letter):
            raise ConfigError(
                f"dead letter {letter.id} is none that --run, --kind and --since choose; nothing was done"
            )
    for letter in found:
        yield letter


def _show_redriven(result: dict[str, Any]) -> None:
    columns = ("run", "group", "redrive_of", "samples", "letter")
    rows = [[safe(group[column]) for column in columns] for group in result["groups"]]
    output.print_table("groups published again", columns, rows)
    output.console.print(f"{result['tasks']} tasks of {len(rows)} groups, from {result['letters']} dead letters")
    if result["before"]:
        output.console.print(
            f"{len(result['before'])} groups, of {result['letters_before']} dead letters, were published by an earlier "
            f"redrive and are left alone, such as {safe(result['before'][0]['group'])} for "
            f"{safe(result['before'][0]['redrive_of'])}; --again publishes them once more"
        )
    for refusal in result["refusals"]:
        output.errors.print(f"[yellow]not redriven:[/] {refusal['id']}: {safe(refusal['reason'])}")
    if (unnamed := result["refused"] - len(result["refusals"])) > 0:
        output.errors.print(f"[yellow]not redriven:[/] {unnamed} more")


def hexdump(data: bytes) -> list[str]:
    """Return lines of 16 bytes: offset, hex, text."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {text}")
    return lines


def _jsonable(value: Any) -> Any:
    """Return a message as JSON can hold it: also keys and bytes that JSON has not."""
    match value:
        case transcript.Transcript():
            return transcript.as_builtins(value)
        case msgspec.Struct():
            kind = {"type": value.wire_type()} if isinstance(value, Message) else {}
            return {**kind, **{name: _jsonable(getattr(value, name)) for name in value.__struct_fields__}}
        case dict():
            return {str(key): _jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [_jsonable(item) for item in value]
        case _:
            return value.hex() if isinstance(value, bytes) else value


def _short(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for a person: token arrays by their length."""
    record = message.get("transcript")
    if not record:
        return message
    arrays = {name: f"{len(record[name])} entries" for name in ("tokens", "mask", "logprobs")}
    return {**message, "transcript": {**record, **arrays}}
