"""`rollmill up` and the commands beside it, as a user calls them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.paths import DATA_DIR, RUN_NAME
from rollmill.supervisor import running
from tests.logs import wait_until

pytestmark = pytest.mark.integration

READY_S = 180.0


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, as a person would."""
    return subprocess.run(
        [sys.executable, "-m", "rollmill", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def last_json(done: subprocess.CompletedProcess[str]):
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(kafka, tmp_path_factory):
    """A folder in which `rollmill up` runs, on the session's Kafka."""
    folder = tmp_path_factory.mktemp("up")
    log = (folder / "up.log").open("w+")
    argv = [sys.executable, "-m", "rollmill", "up", "--bootstrap", kafka, "--set", f"bus.prefix=up-{os.getpid()}."]
    up = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield folder, up, log.name
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(60)
        log.close()


async def ready(folder):
    path, up, log = folder
    text = Path(log)
    await wait_until(
        lambda: "next: rollmill publish" in text.read_text() or up.poll() is not None, True, limit_s=READY_S
    )
    assert up.poll() is None, text.read_text()
    return path


async def test_tasks_from_a_file_come_out_as_outcomes_in_sql(folder):
    """Publish JSONL, wait, ask ClickHouse; a bad line is named and the rest is published."""
    path = await ready(folder)
    lines = [
        json.dumps({"family": "reasoning", "payload": {"generator": "chain_sum", "index": index}})
        for index in range(12)
    ]
    (path / "tasks.jsonl").write_text("\n".join([*lines[:3], '{"family": "reasoning"}', *lines[3:]]))

    published = call(path, "publish", "tasks.jsonl", "--run", "sums", "--max-tokens", "8", "--json")
    result = last_json(published)

    assert (12, 1) == (result["tasks"], published.returncode)
    assert "line 4" in result["bad_lines"][0]
    assert "payload" in result["bad_lines"][0]

    def outcomes() -> int:
        asked = call(path, "sql", "SELECT count() FROM accepted WHERE run = 'sums'", "--json")
        return last_json(asked)["rows"][0][0] if asked.returncode == 0 else 0

    await wait_until(outcomes, 12, limit_s=90)
    checked = call(path, "check", "sums", "--json")

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert last_json(checked)["admitted"] == 12
    assert last_json(checked)["conserved"]


async def test_a_task_that_no_record_holds_passes_through_every_process(folder):
    """Its value lies in the system's directory, where INIT and the sink find it; its family refuses it with a cause."""
    path = await ready(folder)
    noise = random.Random(0).randbytes(1_000_000).hex()
    (path / "large.jsonl").write_text(json.dumps({"family": "reasoning", "payload": {"noise": noise}}))
    published = call(path, "publish", "large.jsonl", "--run", "large", "--json")
    assert (1, 0) == (last_json(published)["tasks"], published.returncode)

    def stored() -> int:
        question = (
            "SELECT count() FROM accepted AS a, tasks AS t WHERE a.run = 'large' AND t.run = 'large' "
            "AND a.outcome = 'failed' AND length(t.payload) > 2000000"
        )
        asked = call(path, "sql", question, "--json")
        return last_json(asked)["rows"][0][0] if asked.returncode == 0 else 0

    await wait_until(stored, 1, limit_s=90)
    assert {"blobs": 1, "kept": {}}.items() <= last_json(call(path, "blobs", "status", "--json")).items()


async def test_the_other_commands_say_how_things_stand(folder):
    """`status`, `runs` and `show` work beside a running system."""
    path = await ready(folder)
    status, runs = call(path, "status", "--json"), call(path, "runs", "--json")
    shown = call(path, "show", "sums", "--json")

    assert {"init", "run", "eval"} == {stage["stage"] for stage in last_json(status)["stages"]}
    assert "sums" in {run["run"] for run in last_json(runs)["runs"]}
    assert last_json(shown)["task"]["family"] == "reasoning"


async def test_status_shows_the_board_and_does_without_it(folder):
    """A board that is killed is started again, and meanwhile the same is read from the log; nothing else notices."""
    path = await ready(folder)

    def source() -> str:
        return last_json(call(path, "status", "--json"))["source"]

    def instances() -> dict[str, tuple[int, int]]:
        return {
            f"{one.service}-{one.instance}": (one.pid, one.lives)
            for one in running(path / DATA_DIR / RUN_NAME).instances
        }

    await wait_until(lambda: source() == "board", True, limit_s=120)
    before = instances()
    os.kill(before["board-0"][0], signal.SIGKILL)
    shown = last_json(call(path, "status", "--json"))
    assert {"init", "run", "eval"} <= {stage["stage"] for stage in shown["stages"]}
    assert (shown["source"] == "board") == (shown["note"] == "")

    await wait_until(lambda: instances()["board-0"][1] > before["board-0"][1], True, limit_s=120)
    await wait_until(lambda: source() == "board", True, limit_s=120)
    after = instances()
    assert {name: one for name, one in before.items() if name != "board-0"} == {
        name: one for name, one in after.items() if name != "board-0"
    }


async def test_a_second_up_says_that_the_first_is_running(folder):
    """Two systems in one folder would share a directory: the second refuses."""
    path = await ready(folder)
    second = call(path, "up")

    assert second.returncode == 1
    assert "running" in second.stderr
