import os
import subprocess
import sys

import pytest

from infra.broker.pidfile import identity_of
from rollmill.supervisor.runfile import InstanceState, RunFile, State, running


@pytest.fixture
def leftover():
    """A process that a killed supervisor left, in a session of its own."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"], start_new_session=True
    )
    yield child
    child.kill()
    child.wait(10)


def state_of(pid: int, identity: str) -> State:
    one = InstanceState(
        service="run", instance=0, state="ready", pid=pid, identity=identity, started_ms=1, lives=1, log="run.log"
    )
    return State(pid=os.getpid(), identity="of a supervisor that is gone", started_ms=1, addresses={}, instances=[one])


def killed(run_dir, pid: int, identity: str) -> None:
    """Leave the directory as a killed supervisor does: its state file stays, its lock is free."""
    first = RunFile(run_dir)
    first.write(state_of(pid, identity))
    first._lock.close()


def test_what_a_killed_supervisor_left_is_ended_by_the_next(run_dir, leftover):
    """Where the system offers no leash."""
    killed(run_dir, leftover.pid, identity_of(leftover.pid))
    assert running(run_dir) is None

    RunFile(run_dir).release()

    assert leftover.wait(10) == -9


def test_a_process_that_only_has_the_same_number_is_left_alone(run_dir, leftover):
    """Numbers are given away again; the start time tells."""
    killed(run_dir, leftover.pid, "another boot:1")

    RunFile(run_dir).release()

    assert leftover.poll() is None
