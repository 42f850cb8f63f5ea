"""One Apache Kafka node on this machine: KRaft, loopback only, data in a named directory.

The data directory holds everything: `log/` (Kafka's own), `server.properties` (as rendered for the last start),
`broker.log` (this start; `broker.log.1` is the one before), `broker.json` (process and port). Invariants: at most one
broker runs on a directory; only a process that the pid file proves to be ours is ever signalled; `launch` returns
when this very cluster answers with a registered broker, or raises and leaves no process; a port, once chosen, is kept
over restarts while it stays free. A child dies with the thread that started it, a detached broker outlives everybody.
This file neither finds jars (`jars.py`) nor creates topics.
"""

from __future__ import annotations

import base64
import logging
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from infra import loopback
from infra.broker import diagnosis, pidfile, probe
from infra.broker.errors import AlreadyRunning, DiskFull, NotStarted, NotStopped, PortTaken, WrongData
from infra.broker.jars import Jars, locked
from infra.loopback import HOST, PORTS

log = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("server.properties")
"""The broker's settings; names in braces are filled in at each start."""

HEAP_MB = 512
"""Most heap the broker may grow to; a few hundred small partitions need about 150."""

START_LIMIT_S = 60.0
"""Longest wait until a started broker answers; one to five seconds are usual."""

STOP_LIMIT_S = 20.0
"""Longest wait for an orderly end, before the process is killed."""

MIN_FREE_BYTES = 100_000_000
"""A broker is not started with less room on its disk: one that fills up while Kafka repairs its files may lose some."""

_POLL_S = 0.02
"""Pause between two looks at a broker that is starting or ending, seconds."""

_PORT_ATTEMPTS = 3
"""Starts tried when somebody takes the port between its choice and the broker's bind."""

_CPU_FLAGS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # fewer threads, quicker start, enough speed
_LOG_FLAGS = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
)

_STARTED: dict[int, subprocess.Popen[bytes]] = {}
"""Brokers that this process started, by pid: whoever stops one here must reap it, and only the parent can."""


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """What is known about the broker of a data directory."""

    data_dir: Path
    """The directory asked about."""
    running: bool
    """Whether its process is alive."""
    answers: bool
    """Whether it answers as this cluster, with a registered broker."""
    pid: int | None
    """Its process; None when it does not run."""
    port: int | None
    """Port of this or, when it does not run, of the last start."""
    bootstrap: str | None
    """Address for clients; None when it does not run."""
    log: Path
    """Where the broker writes what it has to say."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """How a node differs from the one of a laptop: further listeners, a place in a cluster."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Lines for server.properties that win over the template; values may use its names, `$$` is a dollar sign."""
    format_options: tuple[str, ...] = ()
    """Further options for formatting a new data directory, such as `--add-scram`. They may hold secrets."""
    cluster: str | None = None
    """Id of the cluster it belongs to; None: that of its data, a fresh one for a new directory."""
    heap_mb: int = HEAP_MB
    """Most heap it may grow to."""


class _PortLost(Exception):
    """The chosen port was taken between the choice and the broker's bind."""


class LocalBroker:
    """The broker of one data directory, whoever started it."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        insist: bool = False,
        start_limit_s: float = START_LIMIT_S,
        stop_limit_s: float = STOP_LIMIT_S,
        node: Node | None = None,
    ) -> None:
        """Name a data directory; nothing is touched yet.

        Args:
            data_dir: made when missing; formatted on the first start.
            port: the wished port; 0 for that of the last start here, else a free one.
            insist: raise when the wished port is taken, instead of choosing another.
            start_limit_s: longest wait until the broker answers.
            stop_limit_s: longest wait for an orderly end.
            node: how it differs from the default.
        """
        self._node = node or Node()
        self.data_dir = data_dir.absolute()
        self._wish = port
        self._insist = insist and port != 0
        self._start_limit_s = start_limit_s
        self._stop_limit_s = stop_limit_s
        self._pid_path = self.data_dir / "broker.json"
        self._log_path = self.data_dir / "broker.log"
        self._meta_path = self.data_dir / "log" / "meta.properties"

    def launch(self, jars: Jars, *, java_flags: Sequence[str] = (), detached: bool) -> BrokerStatus:
        """Start the broker and wait until it answers.

        Args:
            jars: what to run and by which Java.
            java_flags: further flags, such as a class archive.
            detached: whether it outlives this process; else it ends with the calling thread at the latest.

        Raises:
            AlreadyRunning: a broker runs on this directory.
            PortTaken: the port insisted on is not free.
            NotStarted: it ended or did not answer in time; the error shows the end of its log.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        java = [str(jars.java.command), "-Xms64m", f"-Xmx{self._node.heap_mb}m", *_CPU_FLAGS, *java_flags, *_LOG_FLAGS]
        java += ["-cp", jars.classpath]
        with locked(self.data_dir / "lock", limit_s=self._start_limit_s + self._stop_limit_s):
            _reap()
            self._refuse_second()
            self._refuse_full_disk()
            cluster = self._formatted(java)
            for _ in range(_PORT_ATTEMPTS):
                port = self._choose_port()
                try:
                    self._run(java, port=port, cluster=cluster, detached=detached)
                except _PortLost:
                    log.info("port %d was taken while the broker started", port)
                else:
                    return self.status()
        raise PortTaken(f"port {port} is in use; it was taken while the broker started")

    def status(self) -> BrokerStatus:
        """Return what is known about the broker now."""
        entry = pidfile.read(self._pid_path)
        running = entry is not None and pidfile.alive(entry)
        port = entry.port if entry else None
        answer = probe.ask(HOST, port) if running and port else None
        return BrokerStatus(
            data_dir=self.data_dir,
            running=running,
            answers=answer is not None and answer.brokers > 0 and answer.cluster == self._cluster(),
            pid=entry.pid if entry and running else None,
            port=port,
            bootstrap=f"{HOST}:{port}" if running else None,
            log=self._log_path,
        )

    def stop(self) -> bool:
        """End the broker in order, or by force when that takes too long; False if none ran.

        Raises:
            NotStopped: the process is still there after it was killed.
        """
        entry = pidfile.read(self._pid_path)
        if entry is None or not pidfile.send_signal(entry, signal.SIGTERM):
            _reap()
            return False
        if not self._gone(entry, self._stop_limit_s):
            log.warning("the broker (pid %d) did not end in %.0f s; killing it", entry.pid, self._stop_limit_s)
            pidfile.send_signal(entry, signal.SIGKILL)
            if not self._gone(entry, self._stop_limit_s):
                raise NotStopped(f"process {entry.pid} was killed and is still there")
        _reap()
        return True

    def _refuse_second(self) -> None:
        entry = pidfile.read(self._pid_path)
        if entry is not None and pidfile.alive(entry):
            raise AlreadyRunning(
                f"a broker already runs on {self.data_dir} (pid {entry.pid}, address {HOST}:{entry.port})"
            )

    def _refuse_full_disk(self) -> None:
        free = shutil.disk_usage(self.data_dir).free
        if free < MIN_FREE_BYTES:
            raise DiskFull(
                f"{free // 1_000_000} MB are free for {self.data_dir}, {MIN_FREE_BYTES // 1_000_000} are needed"
            )

    def _choose_port(self) -> int:
        last = pidfile.read(self._pid_path)
        wish = self._wish or (last.port if last else 0)
        if wish and loopback.is_free(wish):
            return wish
        if self._insist:
            raise PortTaken(f"port {wish} on {HOST} is in use by another process")
        if wish:
            log.info("port %d is in use; choosing another", wish)
        return _free_port()

    def _cluster(self) -> str | None:
        try:
            found = re.search(r"^cluster\.id=(\S+)$", self._meta_path.read_text(errors="replace"), re.MULTILINE)
        except FileNotFoundError:
            return None
        return found[1] if found else None

    def _formatted(self, java: list[str]) -> str:
        """Return the cluster id, formatting the directory first when it is new."""
        known = self._cluster()
        self._refuse_foreign(known)
        if known:
            return known
        fresh = self.data_dir / "log.part"
        shutil.rmtree(fresh, ignore_errors=True)
        config = self._render("format.properties", port=PORTS[0], controller_port=PORTS[1], log_dir=fresh)
        cluster = self._node.cluster or new_cluster_id()
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config), *self._node.format_options]
        command = [*(flag for flag in java if "ArchiveClassesAtExit" not in flag), *tool]
        try:
            subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
                timeout=self._start_limit_s,
            )
        except subprocess.TimeoutExpired as error:
            raise NotStarted(f"formatting {self.data_dir} for Kafka took over {error.timeout:g} s") from error
        except subprocess.CalledProcessError as error:
            kind, _ = diagnosis.cause(error.stdout)
            said = f"formatting {self.data_dir} for Kafka ended with {error.returncode}; it said:\n"
            raise kind(said + diagnosis.tail(error.stdout)) from None  # the command alone is a page of jars
        config.unlink()
        # By rename, so that a killed start never leaves half a format behind.
        fresh.rename(self._meta_path.parent)
        return cluster

    def _refuse_foreign(self, known: str | None) -> None:
        """Raise WrongData for a directory that is not this node's: Kafka would say so late, or not at all."""
        folder = self._meta_path.parent
        if known is None and folder.is_dir() and any(folder.iterdir()):
            raise WrongData(f"{folder} holds files, but no {self._meta_path.name} that names a cluster.id")
        wanted = self._node.cluster
        if known and wanted and known != wanted:
            raise WrongData(f"{folder} belongs to cluster {known}; this node is of cluster {wanted}")

    def _render(self, name: str, **values: object) -> Path:
        path = self.data_dir / name
        lines = [f"{key}={value}" for key, value in self._node.settings.items()]
        text = "\n".join([TEMPLATE.read_text(), *lines]) + "\n"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)  # a node's own settings may hold passwords
        path.write_text(Template(text).substitute(values, host=HOST))
        return path

    def _run(self, java: list[str], *, port: int, cluster: str, detached: bool) -> None:
        config = self._render(
            "server.properties", port=port, controller_port=_free_port(but=port), log_dir=self._meta_path.parent
        )
        if self._log_path.exists():
            self._log_path.replace(self._log_path.with_suffix(".log.1"))
        command = [*java, "kafka.Kafka", str(config)]
        # A session of its own: Ctrl-C at the terminal must reach the supervisor, which then ends things in order.
        with self._log_path.open("wb") as output:
            process = subprocess.Popen(
                command if detached else [*_leash(), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.data_dir,
                start_new_session=True,
            )
        try:
            pidfile.write(self._pid_path, pid=process.pid, port=port)
            self._wait_until_it_answers(process, port, cluster)
        except BaseException:  # Ctrl-C while waiting, too, must leave no process behind
            process.kill()
            process.wait(self._stop_limit_s)
            raise
        _STARTED[process.pid] = process

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes], port: int, cluster: str) -> None:
        give_up = time.monotonic() + self._start_limit_s
        while True:
            answer = probe.ask(HOST, port)
            if answer is not None and answer.cluster == cluster and answer.brokers > 0:
                return
            if process.poll() is not None:
                if "Address already in use" in self._said() and not self._insist:
                    raise _PortLost
                kind, line = diagnosis.cause(self._said())
                because = f" ({line})" if line else ""
                ended = f"the broker on {self.data_dir} ended with {process.returncode} while starting{because}"
                raise kind(f"{ended}; {self.last_words()}")
            if time.monotonic() >= give_up:
                raise NotStarted(
                    f"the broker on {self.data_dir} did not answer at {HOST}:{port} "
                    f"in {self._start_limit_s:.0f} s; {self.last_words()}"
                )
            time.sleep(_POLL_S)

    def last_words(self) -> str:
        """Return the end of the broker's log, for an error."""
        return f"the end of {self._log_path}:\n{diagnosis.tail(self._said())}"

    def ended_by_itself(self) -> NotStarted:
        """Return the error for a broker that answered and then ended: why, and what to do."""
        kind, line = diagnosis.cause(self._said())
        because = f" ({line})" if line else ""
        return kind(f"the broker on {self.data_dir} ended by itself{because}; {self.last_words()}")

    def _said(self) -> str:
        return self._log_path.read_text(errors="replace")

    @staticmethod
    def _gone(entry: pidfile.Entry, limit_s: float) -> bool:
        give_up = time.monotonic() + limit_s
        while pidfile.alive(entry):
            if time.monotonic() >= give_up:
                return False
            time.sleep(_POLL_S)
        return True


def _reap() -> None:
    """Forget the children that have ended."""
    for pid, process in list(_STARTED.items()):
        if process.poll() is not None:
            del _STARTED[pid]


def _leash() -> list[str]:
    """Return what makes a child end when its parent does, even by kill -9 (util-linux; elsewhere nothing)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def _free_port(but: int = 0) -> int:
    port = loopback.find_free({but})
    if port is None:
        raise PortTaken(loopback.NONE_FREE)
    return port


def new_cluster_id() -> str:
    """Return a fresh id in Kafka's form."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):  # Kafka's tools would take it for an option
            return text
