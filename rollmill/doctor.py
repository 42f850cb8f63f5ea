"""What works on this machine and what is missing, each with what to do about it.

Each check is independent, bounded, changes nothing that stays, and never raises: a machine on which something is
broken is what this file is for. `missing` means that a main path (`demo`, `up`, `train`) cannot work; `warning` that
it works less well; `info` is for optional parts. It starts no service.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra.blobs import KEEP_MS, Blob, BlobsAway, BlobStore, collectable
from infra.broker import jars
from infra.broker.errors import JavaNotFound, MavenNotFound
from infra.clock import Clock, SystemClock
from infra.errors import BusError, ConfigError
from infra.kafka_reach import reach
from infra.security_config import SecurityConfig
from rollmill import ports
from rollmill.paths import DATA_DIR, RUN_NAME
from rollmill.supervisor import running
from schemas.topics import HOUR_MS

MIN_PYTHON = (3, 11)
"""Oldest Python that runs Rollmill."""

IMPORT_LIMIT_S = 120.0
"""Longest that importing a package may take; torch needs seconds on a cold disk."""

PROBE_LIMIT_S = 5.0
"""Longest wait for a Kafka to answer."""

BLOBS_LIMIT_S = 60.0
"""Longest wait for the blob store to take a file and to list what it holds, seconds."""

DISK_NEEDED_BYTES = 500_000_000
"""Below this much free space the local broker or ClickHouse will soon fail."""

DISK_WANTED_BYTES = 5_000_000_000
"""Below this much free space longer runs may fill the disk."""

MEMORY_WANTED_BYTES = 3_000_000_000
"""What all services of a demo take together."""

CPUS_WANTED = 2
"""Policy and trainer take one thread each."""


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    """As it should be."""
    WARNING = "warning"
    """Works, but less well."""
    MISSING = "missing"
    """A main path cannot work."""
    INFO = "info"
    """Optional; here or not."""


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    """What was looked at."""
    verdict: Verdict
    """How it is."""
    found: str
    """What was found."""
    advice: str = ""
    """What to do about it."""


@dataclass(frozen=True)
class Diagnosis:
    """All checks of a machine."""

    checks: tuple[Check, ...]
    """In the order to read them."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing."""
        return all(check.verdict is not Verdict.MISSING for check in self.checks)


async def diagnose(
    data_dir: Path = DATA_DIR,
    *,
    bootstrap: str | None = None,
    security: SecurityConfig | None = None,
    blobs: BlobStore | None = None,
) -> Diagnosis:
    """Check this machine.

    Args:
        data_dir: where a local system would keep its data.
        bootstrap: addresses of a Kafka that runs elsewhere; without it a local one is expected to work.
        security: how to connect to it.
        blobs: the store that the configuration names, if it names one.
    """
    at_once: tuple[Callable[[], Check], ...] = (
        _python,
        lambda: _java(needed=bootstrap is None),
        lambda: _maven(needed=bootstrap is None),
        _kafka_jars,
        lambda: _services(data_dir),
        lambda: _ports(data_dir),
        lambda: _writable(data_dir),
        lambda: _disk(data_dir),
        _cpus,
        _memory,
        *(lambda tool=tool, what=what: _tool(tool, what) for tool, what in _SANDBOXES),
    )
    checked = await asyncio.gather(*(asyncio.to_thread(_guarded, check) for check in at_once))
    elsewhere = [await _kafka(bootstrap, security or SecurityConfig())] if bootstrap else []
    elsewhere.append(await _blobs(blobs, SystemClock()))
    # One after the other: two imports of this size at once only slow each other down.
    imported = [await _package(*package) for package in _PACKAGES]
    return Diagnosis((checked[0], *imported, *elsewhere, *checked[1:]))


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis for a person: one line per check, advice under what needs it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in diagnosis.checks:
        colour = _COLOURS[check.verdict]
        found, advice = escape(check.found), escape(check.advice)
        text = f"{found}\n[bold]-> {advice}[/]" if advice else found
        table.add_row(f"[{colour}]{check.verdict}[/]", check.name, text)
    console.print(table)
    broken = [check.name for check in diagnosis.checks if check.verdict is Verdict.MISSING]
    console.print(
        f"[red]missing: {', '.join(broken)}[/]" if broken else "[green]everything that `rollmill demo` needs is here[/]"
    )


_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red", Verdict.INFO: "dim"}

_PACKAGES = (
    ("torch", "train", "the local policy server and the trainer"),
    ("transformers", "train", "the local policy server and the trainer"),
    ("chdb", "local", "the local ClickHouse"),
)
"""(package, extra of ours that brings it, who needs it)"""

_SANDBOXES = (
    ("bwrap", "bubblewrap: sandboxes for tools that run code (Debian and Ubuntu: apt-get install bubblewrap)"),
    ("apptainer", "Apptainer: sandboxes with an image of their own"),
)


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (OSError, subprocess.SubprocessError) as error:
        # Such as a `java` that hangs, or a disk that cannot be asked: broken in a way that no check expects.
        return Check("machine", Verdict.WARNING, f"a check failed: {type(error).__name__}: {error}")


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < MIN_PYTHON:
        needed = ".".join(map(str, MIN_PYTHON))
        return Check("Python", Verdict.MISSING, found, f"use Python {needed} or later")
    return Check("Python", Verdict.OK, found)


async def _package(name: str, extra: str, user: str) -> Check:
    """Import a package in a process of its own: one that is broken may also crash."""
    code = f"import {name}; print({name}.__version__)"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(IMPORT_LIMIT_S):
            said, complaint = await process.communicate()
    except TimeoutError:
        return Check(name, Verdict.WARNING, f"importing it took more than {IMPORT_LIMIT_S:.0f} s", "is the disk busy?")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    if process.returncode == 0:
        return Check(name, Verdict.OK, said.decode().strip().splitlines()[-1])
    advice = f"needed for {user}: pip install 'rollmill[{extra}]'"
    if process.returncode is not None and process.returncode < 0:
        found = f"importing it ended the process by signal {-process.returncode}: is it built for this processor?"
        return Check(name, Verdict.MISSING, found, advice)
    return Check(name, Verdict.MISSING, complaint.decode(errors="replace").strip().splitlines()[-1], advice)


def _java(*, needed: bool) -> Check:
    try:
        java = jars.find_java()
    except JavaNotFound as error:
        found = str(error).partition("\n")[0]
        return Check("Java", Verdict.MISSING if needed else Verdict.INFO, found, JavaNotFound.advice if needed else "")
    return Check("Java", Verdict.OK, f"{java.version} at {java.command}")


def _maven(*, needed: bool) -> Check:
    maven = shutil.which("mvn")
    if maven is not None:
        return Check("Maven", Verdict.OK, maven)
    if _jar_folder() is not None or not needed:
        return Check("Maven", Verdict.INFO, "none, and none is needed: Kafka's jars are here or Kafka runs elsewhere")
    return Check("Maven", Verdict.MISSING, "no `mvn` on the PATH", MavenNotFound.advice)


def _kafka_jars() -> Check:
    folder = _jar_folder()
    if folder is None:
        return Check("Kafka jars", Verdict.INFO, f"not in {jars.cache_dir()} yet; the first start fetches them (54 MB)")
    return Check("Kafka jars", Verdict.OK, f"{len(list(folder.glob('*.jar')))} in {folder}")


def _jar_folder() -> Path | None:
    """Return the cached jars of this version's pom; the folder's name ends with the pom's digest."""
    digest = hashlib.blake2b(jars.POM.read_bytes(), digest_size=4).hexdigest()
    return next(jars.cache_dir().glob(f"kafka-*-{digest}/libs"), None)


async def _kafka(bootstrap: str, security: SecurityConfig) -> Check:
    try:
        answers = await reach(bootstrap, security.open(), limit_s=PROBE_LIMIT_S)
    except (BusError, ConfigError) as error:
        advice = "is the address right (HOST:PORT,HOST:PORT), does the broker run, is bus.security what it wants?"
        return Check("Kafka", Verdict.MISSING, str(error), advice)
    first = answers[0]
    if first.brokers == 0:
        return Check("Kafka", Verdict.WARNING, f"{first.address} has no broker yet", "it is starting; try again")
    found = f"cluster {first.cluster} with {first.brokers} brokers answers at {first.address}"
    return Check("Kafka", Verdict.OK, f"{found} ({security.protocol})")


async def _blobs(store: BlobStore | None, clock: Clock) -> Check:
    name = "blob store"
    if store is None:
        found = "none: messages that no record holds, over 900 kB compressed, are refused"
        return Check(name, Verdict.INFO, found, "`rollmill up` makes one; elsewhere set bus.blobs to a directory")
    try:
        async with asyncio.timeout(BLOBS_LIMIT_S):
            await store.probe()
            stock, pins = await store.stock(), await store.pins()
    except BlobsAway as error:
        advice = "without it no service starts: is bus.blobs the right directory, mounted, and ours to write?"
        return Check(name, Verdict.MISSING, str(error), advice)
    except TimeoutError:
        found = f"no answer within {BLOBS_LIMIT_S:g} s"
        return Check(name, Verdict.MISSING, found, "is its file system there, and is the network to it?")
    found, old = f"can be written; {_amount(stock)}", collectable(stock, pins, clock.now_ms())
    if not old:
        return Check(name, Verdict.OK, f"{found}, none of them collectable")
    found += f"; {_amount(old)} of them are over {KEEP_MS // (24 * HOUR_MS)} days old and pinned by nobody"
    advice = "`rollmill blobs collect` deletes these now; the reaper does once an hour, while records come"
    return Check(name, Verdict.WARNING, found, advice)


def _amount(blobs: Sequence[Blob]) -> str:
    return f"{len(blobs)} blobs, {sum(blob.size for blob in blobs) / 2**20:.1f} MiB"


def _services(data_dir: Path) -> Check:
    state = running(data_dir / RUN_NAME)
    if state is None:
        return Check("services", Verdict.INFO, f"none run on {data_dir}; `rollmill up` starts them")
    count = len(state.instances)
    return Check("services", Verdict.OK, f"{count} processes, supervised by pid {state.pid} since {state.since}")


def _ports(data_dir: Path) -> Check:
    try:
        ports.choose(["any"], kept=data_dir / "none")
    except ConfigError as error:
        return Check("ports", Verdict.MISSING, str(error), "end what listens there; `ss -ltnp` shows it")
    return Check("ports", Verdict.OK, "free ones on the loopback interface")


def _writable(data_dir: Path) -> Check:
    there = _existing(data_dir)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        advice = "change its owner, or give another directory with --data"
        return Check("data directory", Verdict.MISSING, f"cannot write to {there}: {error.strerror}", advice)
    return Check("data directory", Verdict.OK, f"{data_dir.absolute()} can be written")


def _disk(data_dir: Path) -> Check:
    free = shutil.disk_usage(_existing(data_dir)).free
    found = f"{_gigabytes(free)} free for {data_dir.absolute()}"
    if free < DISK_NEEDED_BYTES:
        return Check("disk", Verdict.MISSING, found, f"free at least {_gigabytes(DISK_NEEDED_BYTES)}")
    if free < DISK_WANTED_BYTES:
        return Check("disk", Verdict.WARNING, found, f"longer runs want {_gigabytes(DISK_WANTED_BYTES)}")
    return Check("disk", Verdict.OK, found)


def _cpus() -> Check:
    # What this process may use: a container or taskset may allow less than the machine has.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < CPUS_WANTED:
        return Check("CPUs", Verdict.WARNING, str(count), f"the demo is made for {CPUS_WANTED} and will be slow")
    return Check("CPUs", Verdict.OK, str(count))


def _memory() -> Check:
    available = _available_bytes()
    found = f"{_gigabytes(available)} available"
    if available < MEMORY_WANTED_BYTES:
        advice = f"all services of the demo together take about {_gigabytes(MEMORY_WANTED_BYTES)}"
        return Check("memory", Verdict.WARNING, found, advice)
    return Check("memory", Verdict.OK, found)


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux: what is installed is the best that can be told
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", maxsplit=1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _tool(tool: str, what: str) -> Check:
    where = shutil.which(tool)
    return Check(tool, Verdict.INFO, where or f"not here; optional, {what}")


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists: where it would be made."""
    path = path.absolute()
    return path if path.exists() or path == path.parent else _existing(path.parent)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
