import asyncio
import os
import signal
from pathlib import Path

import pytest

from infra.broker.pidfile import identity_of
from infra.clock import settle
from rollmill.supervisor import AlreadyRunning, Backoff, Restart, Supervisor, What, running, supervise
from rollmill.supervisor.readiness import at_once, says
from rollmill.supervisor.runfile import LOCK_NAME, STATE_NAME, RunFile

IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready')\nwhile 1: signal.pause()"
PARENT = (
    "import os, signal, subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'])\n"
    "print('child', child.pid); print('ready'); signal.pause()"
)


def child_of(run_dir: Path, name: str) -> int:
    lines = (run_dir / "logs" / f"{name}.log").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("child ")).split()[1])


async def gone(pid: int) -> None:
    """Return when a process that is not ours to wait for has ended; killed ones take the system a moment."""
    async with asyncio.timeout(10):
        while identity_of(pid) is not None:
            await asyncio.sleep(0)


async def test_a_service_that_ignores_the_request_to_end_is_killed_after_its_grace(python, events, run_dir):
    """Ctrl-C must work whatever a service does."""
    async with Supervisor([python("deaf", IGNORES, stop_grace_s=0.1)], run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()

    (stopped,) = events.of(What.STOPPED)
    assert "killed by SIGKILL" in str(stopped)
    assert identity_of(stopped.pid) is None


async def test_a_service_is_asked_by_its_own_signal(python, events, run_dir):
    """Some programs end in order by SIGINT only."""
    code = "import signal, sys; signal.signal(2, lambda *_: sys.exit(5)); print('ready'); signal.pause()"

    async with Supervisor(
        [python("x", code, stop_signal=signal.SIGINT)], run_dir=run_dir, on_event=events
    ) as supervisor:
        await supervisor.start()

    assert events.of(What.STOPPED)[0].exit.code == 5


async def test_what_a_service_started_itself_ends_with_it(python, run_dir):
    """Helpers of a stopped service do not stay."""
    async with Supervisor([python("parent", PARENT)], run_dir=run_dir) as supervisor:
        await supervisor.start()
        child = child_of(run_dir, "parent")
        assert identity_of(child) is not None

    await gone(child)


async def test_what_a_dead_service_left_is_removed_before_it_is_started_again(python, run_dir):
    """Two generations of helpers would fight for the same ports and files, and a leftover holds its output open."""
    async with Supervisor([python("parent", PARENT)], run_dir=run_dir, backoff=Backoff(first_s=0)) as supervisor:
        await supervisor.start()
        child = child_of(run_dir, "parent")
        killed = supervisor.kill("parent")
        await supervisor.recovered("parent", since=killed)
        await gone(child)

        assert identity_of(child) is None


async def test_a_stop_during_the_start_ends_what_has_started_and_starts_nothing_more(python, events, run_dir):
    """Ctrl-C while a service is still loading."""
    slow = python("slow", "import signal; signal.pause()", ready=says("never"))
    services = [python("a"), slow, python("late", after=("slow",))]

    async with Supervisor(services, run_dir=run_dir, on_event=events) as supervisor:
        starting = asyncio.create_task(supervisor.start())
        await events.nth(1, What.READY, "a")
        await events.nth(1, What.STARTED, "slow")
        starting.cancel()

    assert {"a", "slow"} == set(events.order(What.STOPPED))
    assert "late" not in events.order(What.STARTED)
    await asyncio.wait([starting])


async def test_a_stop_during_the_pause_before_a_restart_does_not_wait_for_it(python, events, run_dir):
    """Nobody waits fifteen seconds for a Ctrl-C."""
    async with asyncio.timeout(10):
        async with Supervisor(
            [python("run")], run_dir=run_dir, on_event=events, backoff=Backoff(first_s=15.0)
        ) as supervisor:
            await supervisor.start()
            supervisor.kill("run")
            await events.nth(1, What.DIED)

    assert not events.of(What.RESTARTED)


async def test_a_cancelled_supervisor_leaves_no_process(python, events, run_dir):
    """However the body is left, the services end first."""

    async def body():
        async with Supervisor([python("a")], run_dir=run_dir, on_event=events) as supervisor:
            await supervisor.start()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await events.nth(1, What.READY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert identity_of(events.all[0].pid) is None
    assert not (run_dir / STATE_NAME).exists()


async def test_a_second_supervisor_is_told_who_runs_and_since_when(python, run_dir):
    """It can say the pid, the time, and what to do; after the end the directory is free again."""
    async with Supervisor([python("a")], run_dir=run_dir, addresses={"kafka": "127.0.0.1:9092"}) as first:
        await first.start()
        state = running(run_dir)
        with pytest.raises(AlreadyRunning, match=rf"already running \(pid {os.getpid()}, since 20\d\d-.*kill"):
            async with Supervisor([], run_dir=run_dir):
                pass
        assert state.addresses == {"kafka": "127.0.0.1:9092"}
        assert [(one.service, one.state, one.lives) for one in state.instances] == [("a", "ready", 1)]

    assert running(run_dir) is None
    async with Supervisor([], run_dir=run_dir):
        pass


def test_a_supervisor_that_has_not_said_who_it_is_yet_is_still_the_first(run_dir):
    """Between the lock and the state file there is a moment."""
    first = RunFile(run_dir)
    with pytest.raises(AlreadyRunning, match="another process is just starting"):
        RunFile(run_dir)
    first.release()
    RunFile(run_dir).release()


def test_a_damaged_state_file_stops_nobody(run_dir):
    """Only the lock decides."""
    run_dir.mkdir()
    (run_dir / STATE_NAME).write_text("{")
    (run_dir / LOCK_NAME).touch()

    assert running(run_dir) is None
    RunFile(run_dir).release()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_everything_in_order(python, events, run_dir, number):
    """`supervise` returns after Ctrl-C or a kill, and all services have ended, the last first."""
    supervisor = Supervisor([python("a"), python("b", after=("a",))], run_dir=run_dir, on_event=events)

    await supervise(supervisor, ready=lambda: os.kill(os.getpid(), number))

    assert events.order(What.STOPPED) == ["b", "a"]


async def test_a_second_signal_kills_what_takes_too_long(python, events, run_dir):
    """Whoever presses Ctrl-C twice does not want to wait for a grace of minutes."""
    supervisor = Supervisor(
        [python("base"), python("deaf", IGNORES, stop_grace_s=600, after=("base",))], run_dir=run_dir, on_event=events
    )
    running_task = asyncio.create_task(supervise(supervisor))
    await events.nth(2, What.READY)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)

    async with asyncio.timeout(10):
        await running_task
    assert [str(event.exit) for event in events.of(What.STOPPED)] == ["killed by SIGKILL"] * 2


async def test_a_supervisor_that_ignores_the_end_of_its_terminal_goes_on(python, events, run_dir):
    """As `nohup` asks; it can still be stopped by other signals."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    supervised = asyncio.create_task(supervise(Supervisor([python("a")], run_dir=run_dir, on_event=events)))
    try:
        await events.nth(1, What.READY)
        os.kill(os.getpid(), signal.SIGHUP)
        await settle()
        assert not events.of(What.STOPPED)
        os.kill(os.getpid(), signal.SIGTERM)
        await supervised
    finally:
        signal.signal(signal.SIGHUP, before)

    assert events.order(What.STOPPED) == ["a"]


async def test_supervise_ends_when_all_have_finished(python, events, run_dir):
    """Nothing is left to supervise."""
    work = python("work", "print('done')", ready=at_once(), restart=Restart.ON_FAILURE)

    await supervise(Supervisor([work], run_dir=run_dir, on_event=events))

    assert events.order(What.ENDED) == ["work"]
