"""`rollmill dead` as a person calls it, on a real Kafka."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.bus import Record
from infra.clock import SystemClock
from infra.dead_letter import Death, bury
from infra.kafka import KafkaBus
from infra.wire import unpack
from schemas import codec
from schemas.topics import TABLE, TASKS
from tests.logs import make_task, read_all

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PREFIX = "dead-command."
LIMIT_S = 120.0
"""Longest that one command may take, seconds."""


def dead(kafka, *arguments):
    """Call the command and return its result."""
    settings = ("--set", f"bus.bootstrap={kafka}", "--set", f"bus.prefix={PREFIX}", "--json")
    command = [sys.executable, "-m", "rollmill", "dead", *arguments, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


async def test_what_died_is_listed_and_done_again(kafka):
    """Poison stays where it is; the sample that used up its attempts is published as a new group."""
    bus = KafkaBus(kafka, prefix=PREFIX)
    await bus.start()
    try:
        await bus.create_topics(TABLE)
        died = Death(stage="run", cause="policy: gone", kind="engine", attempts=3, first_failed_ms=5)
        task = codec.encode(make_task(sample=1, samples=2))
        await bury(bus, SystemClock(), Record("tasks", 3, 4, 7, b"g0", task), died)
        await bury(bus, SystemClock(), Record("tasks", 9, 1, 7, None, b"\xc1"), Death(stage="init", cause="no msgpack"))

        listed = {line["id"]: line for line in dead(kafka, "list")["letters"]}
        redriven = dead(kafka, "redrive", "--all")
        second = dead(kafka, "redrive", "--all")
        found = [(await unpack(TASKS, record)).message for record in await read_all(bus, TASKS)]
    finally:
        await bus.close()

    assert {"3:0": "engine", "9:0": "poison"} == {name: line["kind"] for name, line in listed.items()}
    assert ("test/g0/1", "") == (listed["3:0"]["sample"], listed["9:0"]["sample"])
    assert (2, 1, ["9:0"]) == (redriven["tasks"], redriven["letters"], [one["id"] for one in redriven["refusals"]])
    assert ([], redriven["groups"]) == (second["groups"], second["before"])
    assert {("g0", 0), ("g0", 1)} == {(task.redrive_of, task.sample) for task in found}
