"""Kafka's jars and the Java that runs them: resolved once, found from then on.

Maven reads `pom.xml` and copies about 90 jars (54 MB) into the user's cache, into a folder named after the version
and the pom's digest; another pom is another folder. The folder appears by one rename when it is complete, under a
file lock, so any number of processes may ask at once and a killed one leaves nothing half done. When the folder is
there neither Maven nor a network is needed. This file starts no broker.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.broker.errors import JarsNotResolved, JavaNotFound, LockTimeout, MavenNotFound

log = logging.getLogger(__name__)

POM = Path(__file__).with_name("pom.xml")
"""Which jars."""

MIN_JAVA = 17
"""Oldest Java that runs a Kafka 4 broker."""

MAVEN_LIMIT_S = 900.0
"""Longest that Maven may take; half a minute is usual on an empty cache."""

LOCK_LIMIT_S = MAVEN_LIMIT_S + 60.0
"""Longest wait for another process that resolves the same jars."""

_TAIL_LINES = 15
"""Last lines of Maven shown when it fails."""

_LOCK_POLL_S = 0.1
"""Pause between two tries for a lock, seconds."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Java:
    """A Java runtime that is new enough."""

    command: Path
    """The `java` executable."""
    version: str
    """Its full version, such as 17.0.15."""


@dataclass(frozen=True)
class Jars:
    """A complete set of jars in the cache."""

    folder: Path
    """Holds the jars and nothing else."""
    java: Java
    """What runs them."""

    @property
    def classpath(self) -> str:
        """The jars by name, in a fixed order: a class archive is valid only for the path it was made with."""
        return os.pathsep.join(str(jar) for jar in sorted(self.folder.glob("*.jar")))


def cache_dir() -> Path:
    """Return the project's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollmill"


def find_java() -> Java:
    """Return the Java of $JAVA_HOME, else of the PATH.

    Raises:
        JavaNotFound: there is none, it does not run, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    at_home = Path(home) / "bin" / "java" if home else None
    command = str(at_home) if at_home and at_home.exists() else shutil.which("java")
    if command is None:
        raise JavaNotFound(f"no `java` in $JAVA_HOME ({home or 'not set'}) or on the PATH")
    said = subprocess.run([command, "-version"], capture_output=True, text=True, check=False, timeout=60)
    match = re.search(r'version "((\d+)[^"]*)"', said.stderr + said.stdout)
    if said.returncode != 0 or match is None:
        raise JavaNotFound(f"`{command} -version` failed: {(said.stderr or said.stdout).strip()[:300]}")
    if int(match[2]) < MIN_JAVA:
        raise JavaNotFound(f"{command} is Java {match[1]}; Kafka 4 needs {MIN_JAVA} or later")
    return Java(command=Path(command), version=match[1])


def resolve(cache: Path | None = None) -> Jars:
    """Return the jars, fetching them by Maven when the cache does not hold them yet.

    Raises:
        JavaNotFound: no Java, or one that is too old.
        MavenNotFound: the jars are not in the cache and there is no Maven to fetch them.
        JarsNotResolved: Maven failed; the error shows its last lines.
        LockTimeout: another process holds the cache for too long.
    """
    java = find_java()
    folder = (cache or cache_dir()) / _folder_name(POM.read_bytes()) / "libs"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / "lock", limit_s=LOCK_LIMIT_S):
            if not folder.exists():
                _copy_by_maven(folder)
    return Jars(folder=folder, java=java)


def _folder_name(pom: bytes) -> str:
    version = re.search(rb"<kafka\.version>(.+?)</kafka\.version>", pom)
    assert version is not None, f"{POM} names no kafka.version"
    return f"kafka-{version[1].decode()}-{hashlib.blake2b(pom, digest_size=4).hexdigest()}"


def _copy_by_maven(folder: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise MavenNotFound(f"no `mvn` on the PATH, and Kafka's jars are not in {folder} yet")
    log.info("fetching Kafka's jars by Maven into %s (once, about 54 MB)", folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="libs.part.") as part:
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={part}/libs"]
        command = [maven, "-q", "-B", "-f", str(POM), *goal]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=MAVEN_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise JarsNotResolved(f"Maven was not done after {MAVEN_LIMIT_S:.0f} s: {' '.join(command)}") from error
        if done.returncode != 0:
            raise JarsNotResolved(
                f"Maven ended with {done.returncode} ({' '.join(command)}); its last lines:\n{_tail(done.stdout)}"
            )
        (Path(part) / "libs").rename(folder)


def _tail(output: str) -> str:
    lines = [line for line in _ANSI.sub("", output).splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


@contextmanager
def locked(path: Path, *, limit_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system frees it when the process ends, however it ends.

    Raises:
        LockTimeout: another process held it for longer than the limit.
    """
    give_up = time.monotonic() + limit_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= give_up:
                    raise LockTimeout(f"another process has held {path} for more than {limit_s:.0f} s") from error
                time.sleep(_LOCK_POLL_S)
        yield
