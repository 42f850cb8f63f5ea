"""The front door: the command line, the local supervisor, the demo, and the public names.

    import rollmill
    await rollmill.publish(bus, rollmill.SystemClock(), rollmill.JsonlSource(path), manifest)

What is not re-exported here is internal.
"""

from __future__ import annotations

from infra.clock import SystemClock
from infra.kafka import KafkaBus
from infra.memory import MemoryBus
from producers.generated import GeneratedSource
from producers.jsonl import JsonlSource
from producers.publish import publish_source as publish
from producers.source import Instance, TaskSource
from schemas.control import RunManifest
from schemas.messages import Budgets, Task, Trajectory
from schemas.transcript import Sampling
from stages.handlers.base import Action, Grade, Handler, Invalid, Opening

__all__ = [
    "Action",
    "Budgets",
    "GeneratedSource",
    "Grade",
    "Handler",
    "Instance",
    "Invalid",
    "JsonlSource",
    "KafkaBus",
    "MemoryBus",
    "Opening",
    "RunManifest",
    "Sampling",
    "SystemClock",
    "Task",
    "TaskSource",
    "Trajectory",
    "publish",
]
