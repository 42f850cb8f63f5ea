"""A local Apache Kafka: everything that `rollmill broker` and a supervisor need, as plain functions.

`jars.py` fetches Kafka once, `archive.py` makes it start fast, `local.py` runs one node on a data directory,
`cluster.py` several nodes as one cluster. A real cluster needs none of this: give its bootstrap address. Topics are the
bus's business (`Bus.create_topics`).
"""

from __future__ import annotations

from pathlib import Path

from infra.broker import archive, jars
from infra.broker.errors import LocalBrokerError
from infra.broker.local import BrokerStatus, LocalBroker

__all__ = ["BrokerStatus", "LocalBroker", "LocalBrokerError", "prepare", "start", "status", "stop"]


def prepare() -> jars.Jars:
    """Fetch what a broker needs, when it is not in the cache yet: the jars and the class archive."""
    found = jars.resolve()
    archive.ensure(found)
    return found


def start(data_dir: Path, *, port: int = 0, insist: bool = False, detached: bool = True) -> LocalBroker:
    """Start a broker on a data directory and return it once it answers; its address is in `status()`.

    Args:
        data_dir: made when missing.
        port: the wished port; 0 for that of the last start here, else a free one.
        insist: raise PortTaken when the wished port is not free, instead of choosing another.
        detached: whether it outlives this process; else it ends with the calling thread at the latest.

    Raises:
        LocalBrokerError: one of `errors.py`; each says what was found and what to do.
    """
    found = prepare()
    classes = archive.ensure(found)
    broker = LocalBroker(data_dir, port=port, insist=insist)
    broker.launch(found, java_flags=[f"-XX:SharedArchiveFile={classes}"] if classes else [], detached=detached)
    return broker


def stop(data_dir: Path) -> bool:
    """Stop the broker of a data directory, whoever started it; False if none ran."""
    return LocalBroker(data_dir).stop()


def status(data_dir: Path) -> BrokerStatus:
    """Return what is known about the broker of a data directory."""
    return LocalBroker(data_dir).status()
