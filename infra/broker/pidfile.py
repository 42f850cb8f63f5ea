"""Which process runs on a data directory: a pid that cannot be mistaken for another's.

A pid alone is not an identity: after a reboot or enough forks the same number belongs to a stranger. The file keeps
the time at which the process started beside its pid, and a process counts as alive only when both match; so nothing
here ever names a process that this project did not start. A zombie counts as gone. The file knows nothing of Kafka.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What the file says about the process it was written for."""

    pid: int
    """Process id."""
    identity: str
    """Boot and start time of the process, as the system tells them."""
    port: int
    """Port it was told to listen on."""


def identity_of(pid: int) -> str | None:
    """Return what tells this process from any other that ever has its pid; None if no such process runs."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        return _identity_by_ps(pid)
    try:
        # The name (field 2) may hold spaces and brackets; what follows the last bracket is regular.
        fields = stat.read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, start_ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}:{start_ticks}"


def _identity_by_ps(pid: int) -> str | None:
    found = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False, timeout=10
    )
    state, _, started = found.stdout.strip().partition(" ")
    return None if not started or state.startswith("Z") else started.strip()


def write(path: Path, *, pid: int, port: int) -> Entry:
    """Record a running process; ProcessLookupError if it is gone already."""
    identity = identity_of(pid)
    if identity is None:
        raise ProcessLookupError(f"process {pid} ended before it could be recorded in {path}")
    entry = Entry(pid=pid, identity=identity, port=port)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(entry)) + "\n")
    part.replace(path)
    return entry


def read(path: Path) -> Entry | None:
    """Return the entry, whether its process still runs or not; None without a readable file."""
    try:
        return Entry(**json.loads(path.read_text()))
    except (FileNotFoundError, TypeError, json.JSONDecodeError):
        return None


def alive(entry: Entry) -> bool:
    """Tell whether the very process of the entry still runs."""
    return identity_of(entry.pid) == entry.identity


def send_signal(entry: Entry, number: int) -> bool:
    """Signal the process of the entry; False if it is gone or its pid has a new owner."""
    if not alive(entry):
        return False
    try:
        os.kill(entry.pid, number)
    except ProcessLookupError:
        return False
    return True
