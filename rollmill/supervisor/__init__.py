"""Runs the services of one machine: start in order, restart, stop in reverse order, leave no orphans.

`service.py` is the data, `supervisor.py` the order, `instance.py` the lives of one instance, `process.py` one process
on its leash (`infra/leash.py`), `logfile.py` what it says, `readiness.py` the ways to know that a service is ready,
`runfile.py` who supervises a directory. Nothing here knows Rollmill's own services: `rollmill/services.py` lists them.
"""

from __future__ import annotations

from rollmill.supervisor.errors import (
    AlreadyRunning,
    CrashLoop,
    NotBack,
    NotReady,
    NotStopped,
    ServiceDied,
    SupervisorError,
)
from rollmill.supervisor.process import Exit
from rollmill.supervisor.runfile import InstanceState, State, running
from rollmill.supervisor.service import Backoff, Event, Ready, Restart, Service, What
from rollmill.supervisor.supervisor import Supervisor, supervise

__all__ = [
    "AlreadyRunning",
    "Backoff",
    "CrashLoop",
    "Event",
    "Exit",
    "InstanceState",
    "NotBack",
    "NotReady",
    "NotStopped",
    "Ready",
    "Restart",
    "Service",
    "ServiceDied",
    "State",
    "Supervisor",
    "SupervisorError",
    "What",
    "running",
    "supervise",
]
