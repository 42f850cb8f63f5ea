"""The flow as a picture and as a table, rendered from the topic table so that neither can go stale.

Pure functions from topics to Markdown; which page shows them is not known here. A test compares the pages with what
these functions render.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.topics import CONTROL, DEAD, EVENTS, HOUR_MS, METRICS, TABLE, Topic

Topics = Sequence[Topic[Any]]


def flowchart(topics: Topics = TABLE) -> str:
    """Return a Mermaid flowchart: services as rounded boxes, topics as cylinders, arrows the way records go.

    The retry tiers of a stage are one cylinder: they differ by their delay alone.
    """
    services = dict.fromkeys(name for topic in topics for name in (*topic.producers, *topic.consumers))
    lines = ["flowchart LR"]
    lines += [f"    {_service(name)}([{name}])" for name in services]
    lines += [f"    {_topic(topic)}[({_drawn(topic)})]" for topic in topics]
    for topic in topics:
        lines += [f"    {_service(name)} --> {_topic(topic)}" for name in topic.producers]
        lines += [f"    {_topic(topic)} --> {_service(name)}" for name in topic.consumers]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def way() -> Topics:
    """Return the topics that samples and decisions travel by: what every service writes or reads is left out."""
    return [topic for topic in TABLE if topic not in (EVENTS, METRICS, CONTROL, DEAD)]


def table(topics: Topics = TABLE, *, tags: bool = False) -> str:
    """Return a Markdown table with one row per topic; message types by class name, or by their tag on the wire."""
    lines = [
        "| topic | carries | partitions | a record's partition | written by | read by | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(topic, tags=tags) for topic in topics]
    return "\n".join(lines) + "\n"


def _row(topic: Topic[Any], *, tags: bool) -> str:
    cells = (
        f"`{topic.name}`",
        ", ".join(f"`{kind.wire_type()}`" if tags else kind.__name__ for kind in topic.carries),
        str(topic.partitions),
        topic.spread.value,
        ", ".join(topic.producers),
        ", ".join(topic.consumers),
        kept(topic),
    )
    return f"| {' | '.join(cells)} |"


def kept(topic: Topic[Any]) -> str:
    """Return for how long records are kept, in words."""
    if topic.retention_ms is None:
        return "the last of each key"
    hours = topic.retention_ms // HOUR_MS
    return f"{hours} hours" if hours < 48 else f"{hours // 24} days"


def _service(name: str) -> str:
    return f"service_{name}"


def _topic(topic: Topic[Any]) -> str:
    return "topic_" + _drawn(topic).replace(".", "_").replace("_*", "")


def _drawn(topic: Topic[Any]) -> str:
    return topic.name.rpartition(".")[0] + ".*" if topic.delay_ms else topic.name
