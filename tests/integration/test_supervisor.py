import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from infra.broker.pidfile import identity_of
from rollmill.supervisor import running

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, sys
from pathlib import Path
from rollmill.supervisor import AlreadyRunning, Service, Supervisor, supervise
from rollmill.supervisor.readiness import says

STEADY = "import signal; print('ready', flush=True); signal.pause()"
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True)\\nwhile 1: signal.pause()"

def service(name, code, **options):
    return Service(name=name, argv=(sys.executable, "-c", code), ready=says("ready"), **options)

services = [
    service("broker", DEAF, stop_grace_s=0.2),
    service("run", STEADY, after=("broker",), instances=2),
]
supervisor = Supervisor(services, run_dir=Path(sys.argv[1]), on_event=lambda event: print(event, flush=True))
try:
    asyncio.run(supervise(supervisor, ready=lambda: print("all ready", flush=True)))
except AlreadyRunning as error:
    sys.exit(str(error))
print("stopped in order", flush=True)
"""


async def start(run_dir: Path, *, until: bytes = b"all ready") -> tuple[asyncio.subprocess.Process, bytes]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(run_dir)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        process_group=0,
    )
    said = b""
    async with asyncio.timeout(30):
        while until not in said:
            line = await child.stdout.readline()
            assert line, f"it ended early: {said.decode()}"
            said += line
    return child, said


async def rest(child: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(30):
        said, _ = await child.communicate()
    return said.decode()


async def all_gone(pids: list[int]) -> None:
    """Return when processes that are not ours to wait for have ended; killed ones take the system a moment."""
    async with asyncio.timeout(10):
        while any(identity_of(pid) is not None for pid in pids):
            await asyncio.sleep(0)


async def test_kill_9_of_the_supervisor_leaves_no_process_and_a_directory_that_starts_again(tmp_path):
    """Not even a service that ignores SIGTERM stays, and the next `up` is not told that one is running."""
    child, _ = await start(tmp_path)
    pids = [one.pid for one in running(tmp_path).instances]
    assert len(pids) == 3
    assert all(identity_of(pid) is not None for pid in pids)

    child.kill()
    assert await child.wait() == -signal.SIGKILL
    await rest(child)
    await all_gone(pids)
    assert running(tmp_path) is None

    again, _ = await start(tmp_path)
    again.send_signal(signal.SIGTERM)
    assert "stopped in order" in await rest(again)


async def test_ctrl_c_at_the_terminal_stops_in_order(tmp_path):
    """The terminal signals the whole foreground group; the services hear of it from the supervisor alone."""
    child, _ = await start(tmp_path)
    pids = [one.pid for one in running(tmp_path).instances]

    os.killpg(child.pid, signal.SIGINT)
    said = await rest(child)

    assert child.returncode == 0
    stops = [line for line in said.splitlines() if " stopped " in line]
    assert [line.partition(" ")[0].partition("[")[0] for line in stops] == ["run", "run", "broker"]
    assert all("SIGTERM" in line for line in stops[:2]), "asked in order, not interrupted by the terminal"
    await all_gone(pids)


async def test_ctrl_c_during_the_start_stops_what_has_started(tmp_path):
    """At any moment, not only when everything is ready."""
    child, _ = await start(tmp_path, until=b"started")
    os.killpg(child.pid, signal.SIGINT)
    said = await rest(child)

    assert child.returncode == 0, said
    assert "stopped in order" in said
    assert "Traceback" not in said


async def test_a_second_up_says_that_the_first_is_running_and_disturbs_nothing(tmp_path):
    """With the pid to stop."""
    child, _ = await start(tmp_path)
    second = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(tmp_path)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )

    assert f"already running (pid {child.pid}, since 20" in await rest(second)
    assert second.returncode == 1
    assert running(tmp_path).pid == child.pid
    child.send_signal(signal.SIGINT)
    assert "stopped in order" in await rest(child)
