"""A class archive that makes the local broker start in a third of the time.

Most of a JVM's start-up is loading and verifying 7,000 classes. Java can keep them in one mapped file (AppCDS): on
two cores format + start fell from 4.1 s to 1.5 s, for 48 MB of cache. The archive is written by one training run of a
broker on a scratch directory, once per set of jars and Java version; it is valid only for them, and a JVM that does
not accept it starts without it. Where it cannot be made (a Java without AppCDS) a marker is left, and brokers start
the slow way: this file never makes a start fail.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from pathlib import Path

from infra.broker.errors import LocalBrokerError
from infra.broker.jars import Jars, locked
from infra.broker.local import LocalBroker

log = logging.getLogger(__name__)

TRAINING_LIMIT_S = 120.0
"""Longest that the training run may take to start, and then to write its archive."""


def archive_path(jars: Jars) -> Path:
    """Return where the archive for these jars and this Java lies, made or not."""
    return jars.folder.parent / f"classes-{re.sub(r'[^A-Za-z0-9.]', '_', jars.java.version)}.jsa"


def ensure(jars: Jars) -> Path | None:
    """Return the archive, making it when it is not there; None where it cannot be made."""
    archive = archive_path(jars)
    refused = archive.with_suffix(".refused")
    if archive.exists() or refused.exists():
        return archive if archive.exists() else None
    with locked(jars.folder.parent / "lock", limit_s=3 * TRAINING_LIMIT_S):
        if archive.exists():
            return archive
        log.info("preparing a class archive for Kafka (once for this Java, about ten seconds)")
        try:
            _train(jars, archive)
        except LocalBrokerError as error:
            log.warning("no class archive, the broker will start about three seconds slower: %s", error)
            refused.write_text(f"{error}\n")
            return None
    return archive


def _train(jars: Jars, archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rollmill-kafka-") as scratch:
        made = Path(scratch) / archive.name
        broker = LocalBroker(Path(scratch) / "data", start_limit_s=TRAINING_LIMIT_S, stop_limit_s=TRAINING_LIMIT_S)
        broker.launch(jars, java_flags=[f"-XX:ArchiveClassesAtExit={made}"], detached=False)
        broker.stop()
        if not made.exists():
            raise LocalBrokerError(f"Java {jars.java.version} wrote no class archive at its exit")
        # Not a rename: the scratch directory may be on another file system.
        part = archive.with_suffix(".part")
        shutil.copyfile(made, part)
        part.replace(archive)
