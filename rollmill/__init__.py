"""The front door: the command line, the local supervisor, the demo, and the public names.

    import rollmill
    await rollmill.publish(bus, rollmill.SystemClock(), rollmill.JsonlSource(path), manifest)

What is not listed here is internal. Names are loaded when first used: every service process imports this package, and
most need none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infra.clock import SystemClock
    from infra.convert.nemo_rl import nemo_rl_batch
    from infra.convert.verl import verl_batch
    from infra.envhost.program import ProgramEnvironment
    from infra.kafka import KafkaBus
    from infra.memory import MemoryBus
    from infra.trajectories import TrajectoryReader
    from producers.collect import outcomes
    from producers.generated import GeneratedSource
    from producers.jsonl import JsonlSource
    from producers.publish import publish_source as publish
    from producers.source import Instance, TaskSource
    from schemas.control import RunManifest
    from schemas.grouping import SiblingGroup
    from schemas.messages import Budgets, Task, Trajectory
    from schemas.transcript import Sampling
    from stages.handlers.base import Action, Grade, Handler, Invalid, Opening

_WHERE = {
    "Action": "stages.handlers.base",
    "Budgets": "schemas.messages",
    "GeneratedSource": "producers.generated",
    "Grade": "stages.handlers.base",
    "Handler": "stages.handlers.base",
    "Instance": "producers.source",
    "Invalid": "stages.handlers.base",
    "JsonlSource": "producers.jsonl",
    "KafkaBus": "infra.kafka",
    "MemoryBus": "infra.memory",
    "Opening": "stages.handlers.base",
    "ProgramEnvironment": "infra.envhost.program",
    "RunManifest": "schemas.control",
    "Sampling": "schemas.transcript",
    "SiblingGroup": "schemas.grouping",
    "SystemClock": "infra.clock",
    "Task": "schemas.messages",
    "TaskSource": "producers.source",
    "Trajectory": "schemas.messages",
    "TrajectoryReader": "infra.trajectories",
    "nemo_rl_batch": "infra.convert.nemo_rl",
    "outcomes": "producers.collect",
    "publish": "producers.publish:publish_source",
    "verl_batch": "infra.convert.verl",
}
"""Public name -> where it is defined."""

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
    "ProgramEnvironment",
    "RunManifest",
    "Sampling",
    "SiblingGroup",
    "SystemClock",
    "Task",
    "TaskSource",
    "Trajectory",
    "TrajectoryReader",
    "nemo_rl_batch",
    "outcomes",
    "publish",
    "verl_batch",
]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    if name not in _WHERE:
        raise AttributeError(f"module 'rollmill' has no attribute {name!r}; public: {', '.join(__all__)}")
    module, _, original = _WHERE[name].partition(":")
    return getattr(import_module(module), original or name)
