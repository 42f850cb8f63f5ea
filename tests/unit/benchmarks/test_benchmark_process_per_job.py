import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import process_per_job
from benchmarks.process_per_job import ProcessPerJobServer

pytestmark = pytest.mark.integration


@pytest.fixture
def server():
    """A server with one worker a stage."""
    made = ProcessPerJobServer(workers=1)
    made.start()
    yield made
    made.stop()


def started(server):
    """Return the process of the first job, once it runs."""
    give_up = time.monotonic() + 20
    while not (alive := [state.process for state in server._jobs.values() if state.process.is_alive()]):
        assert time.monotonic() < give_up, "waited 20 s for the process of a job"
        time.sleep(0.005)
    return alive[0]


def test_each_job_goes_through_the_stages_in_a_process_of_its_own(server):
    """Three jobs at once on one worker a stage: all succeed, and each had its own process and session."""
    with ThreadPoolExecutor(3) as clients:
        results = list(clients.map(server.process, ({"instance_id": number} for number in range(3))))

    assert [result["instance_id"] for result in results] == [0, 1, 2]
    assert all(result["init"] and result["run"] and result["eval"] for result in results)
    assert len({process.pid for process in server._ended}) == 3


def test_a_job_whose_process_died_fails_once_another_request_looks(server, monkeypatch):
    """As in the original: a dead process is noticed only when a later request arrives."""
    monkeypatch.setattr(process_per_job, "DEAD_GRACE_S", -1.0)
    server._shared.semaphores["init"].acquire()  # the first job waits here
    with ThreadPoolExecutor(2) as clients:
        first = clients.submit(server.process, {"instance_id": 0})
        process = started(server)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        server._shared.semaphores["init"].release()
        second = clients.submit(server.process, {"instance_id": 1})

        assert first.result() == {"error": "the process died"}
        assert second.result()["success"]
