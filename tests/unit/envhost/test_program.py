"""An agent that is a program gets its address, runs alone, and is ended with everything that it started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from infra.envhost.program import OUTPUT_BYTES, ProgramEnvironment
from tests.logs import wait_until

ADDRESS = {"base_url": "http://here/v1", "api_key": "k", "model": "policy", "outcome_url": "http://here/outcome"}
OPEN, WAIT = {"name": "open", "arguments": ADDRESS, "text": ""}, {"name": "wait", "arguments": {}, "text": ""}


def program(code, **settings):
    environment = ProgramEnvironment([sys.executable, "-c", code], **settings)
    environment.reset()
    return environment


async def ended(environment):
    environment.step(OPEN)
    await wait_until(lambda: environment.step(WAIT).done, True)
    found = environment.verdict()
    environment.close()
    return found


async def test_it_finds_its_address_and_nothing_else(monkeypatch):
    """No secret of the host is among its variables."""
    monkeypatch.setenv("SECRET", "x")
    found = await ended(program("import os, json; print(json.dumps(dict(os.environ)))", variables={"MORE": "y"}))
    seen = json.loads(found["output"])

    assert (0, ADDRESS["base_url"], "k", "policy", ADDRESS["outcome_url"], "y") == (
        found["exit_code"],
        *(seen[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL")),
        seen["OUTCOME_URL"],
        seen["MORE"],
    )
    assert {"PATH", "HOME", "MORE", "OUTCOME_URL"} == {
        name
        for name in seen
        if not name.startswith(("OPENAI_", "LC_", "_"))  # the interpreter may set a locale
    }


async def test_it_runs_in_a_directory_of_its_own_with_its_files():
    """Which is gone afterwards."""
    code = "import os; print(os.getcwd()); print(open('task.txt').read())"
    place, text = (await ended(program(code, files={"task.txt": "find the key"})))["output"].splitlines()

    assert "find the key" == text
    assert not Path(place).exists()


async def test_a_program_that_fails_says_so_in_its_verdict():
    """The end of what it printed is kept, and no more."""
    found = await ended(program(f"import sys; sys.stderr.write('x' * {3 * OUTPUT_BYTES} + 'no key'); sys.exit(3)"))

    assert (3, OUTPUT_BYTES, "no key") == (found["exit_code"], len(found["output"]), found["output"][-6:])


CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); "


def alive(pid):
    """Tell whether a process runs; one that was killed may wait for its parent to see that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["verdict", "reset", "close"])
async def test_what_still_runs_is_ended_with_its_children(end):
    """By whoever has the episode next, or at its end; it has no exit code then."""
    environment = program(CHILD + "sys.stdin.close(); import time; time.sleep(1000)")
    environment.step(OPEN)
    running = environment._running
    await wait_until(lambda: running.output.endswith("\n"), True)
    assert not environment.step(WAIT).done
    getattr(environment, end)()

    assert running.exit_code is None
    await wait_until(lambda: not alive(int(running.output)), True)
    environment.close()


async def test_children_that_a_program_left_behind_end_with_the_episode():
    """The program itself ended well."""
    found = await ended(program(CHILD))

    assert 0 == found["exit_code"]
    await wait_until(lambda: not alive(int(found["output"])), True)


async def test_opened_again_it_begins_anew():
    """After a reset, as for every claim."""
    environment = program("import os; print(os.getcwd())")
    places = set()
    for _ in range(2):
        environment.step(OPEN)
        await wait_until(lambda: environment.step(WAIT).done, True)
        places.add(environment.verdict()["output"])
        environment.reset()

    assert 2 == len(places)
    assert {"exit_code": None, "output": ""} == environment.verdict()
    with pytest.raises(ValueError, match="open it first"):
        environment.step(WAIT)


def test_a_program_that_is_not_there_leaves_nothing_behind(tmp_path, monkeypatch):
    """It raises, which fails the episode."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        ProgramEnvironment(["/no/such/program"]).step(OPEN)

    assert [] == list(tmp_path.iterdir())
