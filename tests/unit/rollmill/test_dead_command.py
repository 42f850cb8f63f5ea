"""`rollmill dead`: what a person sees of what was given up, and doing it again, on the in-memory log."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager

import msgspec
import pytest
from click.testing import CliRunner

from infra.bus import Record
from infra.clock import SystemClock
from infra.dead_letter import DeadLetter, Death, bury
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from rollmill.commands import dead
from schemas import codec
from schemas.topics import TABLE, TASKS
from tests.golden.samples import SAMPLES
from tests.logs import make_task, read_all

CLOCK = SystemClock()
GONE = Death(stage="run", cause="policy: gone", kind="engine", attempts=3, first_failed_ms=5)
POISON = Death(stage="init", cause="not msgpack: \x1b[31mred [/bold]")


@pytest.fixture
def bus(monkeypatch, tmp_path):
    """The log that the command finds, wherever it looks."""
    bus = MemoryBus()
    asyncio.run(bus.create_topics(TABLE))

    @asynccontextmanager
    async def connected(config, *, client):
        yield bus

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dead, "connected", connected)
    monkeypatch.setenv("COLUMNS", "400")  # no line of a table is broken
    return bus


def lay(bus, value, death, *, topic="tasks", partition=0, headers=()):
    asyncio.run(bury(bus, CLOCK, Record(topic, partition, 4, 7, b"k", value, headers), death))


def call(*arguments):
    return CliRunner().invoke(dead.command, arguments)


def result(*arguments):
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def tasks(bus):
    async def found():
        return [(await unpack(TASKS, record)).message for record in await read_all(bus, TASKS)]

    return asyncio.run(found())


def test_a_list_tells_what_died_of_what(bus):
    """One object per letter, the newest first."""
    lay(bus, codec.encode(make_task(sample=1, samples=4)), GONE, partition=2)
    (line,) = result("list")["letters"]

    assert ("2:0", "engine", "run", "tasks", "test/g0/1", 3, "policy: gone") == tuple(
        line[name] for name in ("id", "kind", "stage", "topic", "sample", "attempts", "cause")
    )
    assert line["at"].startswith("20")


def test_a_list_is_filtered_and_bounded(bus):
    """By kind, run, time and number."""
    for number in range(3):
        lay(bus, codec.encode(make_task(run=f"r{number}")), GONE, partition=number)
    lay(bus, b"\xc1", POISON, partition=3)

    def ids(*options):
        return {line["id"] for line in result("list", *options)["letters"]}

    assert {"3:0"} == ids("--kind", "poison")
    assert {"1:0"} == ids("--run", "r1")
    assert 4 == len(ids("--since", "1h")) == len(ids("--since", "2020-01-01"))
    assert set() == ids("--since", "2100-01-01T00:00:00+00:00")
    assert 2 == len(ids("--limit", "2"))


def test_a_time_that_is_none_is_a_wrong_call(bus):
    """It says what it may be."""
    done = call("list", "--since", "yesterday")

    assert (2, True) == (done.exit_code, "expected how long ago (90s, 15m, 6h, 2d) or an ISO time" in done.output)


def test_whatever_a_cause_holds_a_terminal_shows_and_does_not_obey(bus, capsys):
    """Somebody else's bytes are quoted in it."""
    lay(bus, b"\xc1", POISON)
    dead._show_list(result("list"))
    dead._show_letter(result("show", "0:0"))
    shown = capsys.readouterr().out

    assert "\\x1b[31mred [/bold]" in shown
    assert "\x1b" not in shown


def test_a_letter_that_can_be_read_is_shown_as_its_message(bus):
    """With its headers, and where it lay."""
    lay(bus, codec.encode(make_task(payload={"blob": b"\x00\xff"})), GONE, headers=(("mine", b"\xff"),))
    shown = result("show", "0:0")

    assert ("rollmill.task", "test", {"blob": "00ff"}) == tuple(
        shown["message"][name] for name in ("type", "run", "payload")
    )
    assert ({"topic": "tasks", "partition": 0, "offset": 4}, "k", "\\xff") == (
        shown["source"],
        shown["key"],
        shown["headers"]["mine"],
    )
    assert (3, 5, None) == (shown["attempts"], shown["first_failed_ms"], shown["unreadable"])


def test_a_rollout_is_shown_with_its_tokens_as_numbers_and_briefly_to_a_person(bus, capsys):
    """Nobody reads ten thousand log-probs on a terminal."""
    lay(bus, codec.encode(SAMPLES["rollmill.rollout"]), GONE, topic="rollouts")
    shown = result("show", "0:0")
    dead._show_letter(shown)

    assert [1, 70_000, 9] == shown["message"]["transcript"]["tokens"][:3]
    assert '"tokens": "9 entries"' in capsys.readouterr().out


def test_keys_that_json_has_not_are_shown_as_text(bus):
    """A payload that is no payload is a reason to look at a letter."""
    lay(bus, codec.encode(msgspec.structs.replace(make_task(), payload={"a": {b"k": 1, None: 2}})), GONE)

    assert {"a": {"b'k'": 1, "None": 2}} == result("show", "0:0")["message"]["payload"]


def test_bytes_that_cannot_be_read_are_dumped(bus, capsys):
    """The first of them, and why not."""
    lay(bus, b"\xc1 hello" * 100, POISON)
    shown = result("show", "0:0")
    dead._show_letter(shown)

    assert shown["unreadable"].startswith("not msgpack")
    assert "000000  c1 20 68 65 6c 6c 6f c1 20 68 65 6c 6c 6f c1 20  . hello. hello. " == shown["dump"][0]
    assert (16, 700) == (len(shown["dump"]), shown["bytes"])
    assert "c1 20 68 65" in capsys.readouterr().out


def test_a_value_in_a_store_that_nobody_named_is_no_reason_to_show_nothing(bus, capsys):
    """Headers and cause are there all the same, and say what to set; also of one whose headers name no sample."""
    task = make_task(payload={"image": random.Random(0).randbytes(1_000_000)})
    asyncio.run(Publisher(bus, CLOCK, "test").publish(TASKS, task))
    (record,) = asyncio.run(read_all(bus, TASKS))
    kept = tuple(pair for pair in record.headers if pair[0] == "claim-check")
    for headers in (record.headers, kept):
        asyncio.run(bury(bus, CLOCK, msgspec.structs.replace(record, headers=headers), GONE))
    bus.blobs = None
    first, second = result("show", f"{record.partition}:0"), result("show", f"{record.partition}:1")
    dead._show_letter(first)

    assert ("test/g0/0", "policy: gone", None) == (first["sample"], first["cause"], first["message"])
    assert ("", "policy: gone", None) == (second["sample"], second["cause"], second["message"])
    assert "there is no store: set bus.blobs" in first["unreadable"]
    assert {"test/g0/0", ""} == {line["sample"] for line in result("list")["letters"]}
    assert "policy: gone" in capsys.readouterr().out


def test_a_letter_is_read_while_the_log_is_open(bus, monkeypatch):
    """Its value may lie in the log's blob store."""
    lay(bus, codec.encode(make_task()), GONE)
    opened = []

    @asynccontextmanager
    async def connected(config, *, client):
        opened.append(client)
        yield bus
        opened.clear()

    reads = DeadLetter.message

    async def message(letter):
        assert opened, "the log is closed"
        return await reads(letter)

    monkeypatch.setattr(dead, "connected", connected)
    monkeypatch.setattr(DeadLetter, "message", message)

    assert "test" == result("show", "0:0")["message"]["run"]


def test_a_letter_that_is_not_there_is_an_error(bus):
    """It says what is there."""
    done = call("show", "0:0")

    assert (1, True) == (done.exit_code, "holds offsets 0 to 0" in str(done.exception))


def test_one_letter_is_redriven_by_its_id(bus):
    """As a group of its own; the others stay."""
    lay(bus, codec.encode(make_task(samples=4)), GONE)
    lay(bus, codec.encode(make_task(group="g1")), GONE)
    done = result("redrive", "--id", "0:0")

    assert ([("g0", 4)], 4, 1, 0) == (
        [(group["redrive_of"], group["samples"]) for group in done["groups"]],
        done["tasks"],
        done["letters"],
        done["refused"],
    )
    assert {"g0"} == {task.redrive_of for task in tasks(bus)}


def test_all_letters_of_a_run_are_redriven_and_what_cannot_be_is_named(bus, capsys):
    """One group for all dead siblings; the rest goes on."""
    for sample in range(2):
        lay(bus, codec.encode(make_task(run="a", sample=sample, samples=2)), GONE)
    lay(bus, codec.encode(make_task(run="b")), GONE)
    lay(bus, b"\xc1", POISON, headers=(("ce_subject", b"a/g0/9"),))
    done = result("redrive", "--all", "--run", "a")
    dead._show_redriven(done)

    assert (["0:3"], 1, 2, 1) == (
        [refusal["id"] for refusal in done["refusals"]],
        done["refused"],
        done["letters"],
        len(done["groups"]),
    )
    assert {"a"} == {task.run for task in tasks(bus)}
    shown = capsys.readouterr()
    assert "2 tasks of 1 groups, from 2 dead letters" in shown.out


def test_a_second_redrive_says_what_was_done_before(bus, capsys):
    """And is no failure; `--again` does it once more."""
    lay(bus, codec.encode(make_task(samples=2)), GONE)
    first = result("redrive", "--all")
    second = result("redrive", "--all")
    dead._show_redriven(second)
    again = result("redrive", "--id", "0:0", "--again")

    assert ([], first["groups"], 1) == (second["groups"], second["before"], second["letters_before"])
    assert "1 groups, of 1 dead letters, were published by an earlier redrive" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (first["groups"], [], 4) == (again["groups"], again["before"], len(tasks(bus)))


def test_a_letter_that_was_asked_for_and_cannot_be_redriven_is_a_failure(bus):
    """A script sees it."""
    lay(bus, b"\xc1", POISON)
    named, every = call("redrive", "--id", "0:0"), call("redrive", "--all")

    assert (1, 1) == (named.exit_code, every.exit_code)
    assert "not redriven: 0:0: no task can be read from it" in " ".join(named.output.split())


@pytest.mark.parametrize("arguments", [(), ("--all", "--id", "0:0")])
def test_a_redrive_says_which_letters(bus, arguments):
    """Neither everything by mistake, nor nothing in silence."""
    done = call("redrive", *arguments)

    assert (2, True) == (done.exit_code, "say either --all or which letters" in done.output)


def test_an_id_that_the_other_options_do_not_choose_does_nothing(bus):
    """Somebody mistook the run."""
    lay(bus, codec.encode(make_task(run="a")), GONE)
    done = call("redrive", "--id", "0:0", "--run", "b")

    assert (1, [], True) == (done.exit_code, tasks(bus), "nothing was done" in str(done.exception))


def test_nothing_dead_is_nothing_to_do(bus):
    """And no error."""
    assert ([], 0) == (result("list")["letters"], result("redrive", "--all")["tasks"])
