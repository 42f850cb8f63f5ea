"""The rival of `pipeline`: a server that starts an operating-system process for every job.

Rebuilt from the behaviour of the default (process based) server of the ProRL Agent Server (public repository
NVIDIA-NeMo/ProRL-Agent-Server, README and `openhands/nvidia/async_server_process.py`, read at commit 40c1d8a):

- a request blocks a thread of the server until its job is done; 64 workers a stage are the command line's default;
- each request first looks for dead job processes (gone for over 10 s), then starts a process by `multiprocessing`,
  start method `spawn`, which makes itself a session of its own (`os.setsid`);
- the process acquires one semaphore per stage in turn (init, run, eval), all of them objects of a `Manager` process,
  keeps `job_status[job_id]` up to date under the Manager's lock, and puts its result into the Manager's queue;
- a thread of the server takes results from that queue and wakes the request.

Left out, all in the rival's favour: the HTTP front, the imports of the agent framework in every process (seconds), CPU
affinity, runtimes, the log lines, and the forced end of a process that had not quite ended when its result
was there (a wait of 0.5 s under the server's lock). Standard library only, as each process imports this module.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
import uuid
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from multiprocessing.managers import SyncManager
from typing import Any

STAGES = ("init", "run", "eval")

WORKERS = 64
"""Jobs at once in a stage."""

DEAD_GRACE_S = 10.0
"""A process that has been dead for this long without a result is cleaned up."""

JOB_LIMIT_S = 300.0
"""Longest wait of a request for its job."""

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Shared:
    """What server and job processes share: proxies of objects that live in the Manager's process."""

    semaphores: dict[str, Any]
    status: Any
    status_lock: Any
    results: Any


@dataclass
class JobState:
    """One request in work."""

    process: SpawnProcess
    finished: threading.Event = field(default_factory=threading.Event)
    result: dict[str, Any] = field(default_factory=dict)


class ProcessPerJobServer:
    """Takes jobs by `process`, from any number of threads."""

    def __init__(self, *, workers: int = WORKERS) -> None:
        self._workers = workers
        self._jobs: dict[str, JobState] = {}
        self._dead_since: dict[str, float] = {}
        self._ended: list[SpawnProcess] = []
        self._manager: SyncManager
        self._shared: Shared
        self._collector: threading.Thread

    def start(self) -> None:
        """Start the Manager and the thread that collects results."""
        self._manager = _spawn.Manager()
        self._shared = Shared(
            semaphores={stage: self._manager.Semaphore(self._workers) for stage in STAGES},
            status=self._manager.dict(),
            status_lock=self._manager.Lock(),
            results=self._manager.Queue(),
        )
        self._collector = threading.Thread(target=self._collect)
        self._collector.start()

    def process(self, instance: dict[str, Any]) -> dict[str, Any]:
        """Do one job in a process of its own and return its result; blocks until then.

        Raises:
            TimeoutError: the job gave no result in time.
        """
        self._look_for_dead()
        job_id = uuid.uuid4().hex
        process = _spawn.Process(target=process_job, args=(job_id, instance, self._shared))
        state = self._jobs[job_id] = JobState(process)
        process.start()
        try:
            if not state.finished.wait(JOB_LIMIT_S):
                raise TimeoutError(f"job {job_id} gave no result in {JOB_LIMIT_S:g} s; its process is {process.pid}")
        finally:
            self._ended.append(self._jobs.pop(job_id).process)
        return state.result

    def stop(self) -> None:
        """End everything that was started."""
        for process in (*self._ended, *(state.process for state in self._jobs.values())):
            process.join(DEAD_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._shared.results.put(None)
        self._collector.join()
        self._manager.shutdown()

    def _collect(self) -> None:
        while (item := self._shared.results.get()) is not None:
            state = self._jobs.get(item["job_id"])
            if state is not None:
                state.result = item["result"]
                state.finished.set()

    def _look_for_dead(self) -> None:
        for job_id, state in list(self._jobs.items()):
            if state.process.pid is None or state.process.is_alive():
                continue
            since = self._dead_since.setdefault(job_id, time.monotonic())
            if time.monotonic() - since > DEAD_GRACE_S:
                state.result = {"error": "the process died"}
                state.finished.set()
        for job_id in self._dead_since.keys() - self._jobs.keys():
            self._dead_since.pop(job_id, None)


def process_job(job_id: str, instance: dict[str, Any], shared: Shared) -> None:
    """Do one job: the main function of its process."""
    os.setsid()
    shared.results.put({"job_id": job_id, "result": asyncio.run(_stages(job_id, instance, shared))})


async def _stages(job_id: str, instance: dict[str, Any], shared: Shared) -> dict[str, Any]:
    result: dict[str, Any] = {"instance_id": instance["instance_id"], "success": True}
    for stage in STAGES:
        shared.semaphores[stage].acquire()  # blocks its loop, which has nothing else to do
        try:
            with shared.status_lock:
                shared.status[job_id] = stage
            result[stage] = await _no_op(instance)
        finally:
            shared.semaphores[stage].release()
            with shared.status_lock:
                shared.status.pop(job_id, None)
    return result


async def _no_op(instance: dict[str, Any]) -> bool:
    """Do the work of a stage: nothing."""
    return bool(instance)
