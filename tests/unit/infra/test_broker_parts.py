"""The parts of the local broker that need no Java: pid file, jars by a scripted Maven, locks, the probe."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.broker import jars, pidfile, probe
from infra.broker.errors import JarsNotResolved, JavaNotFound, LockTimeout, MavenNotFound

JAVA = """#!/bin/sh
echo 'openjdk version "{version}" 2025-04-15' >&2
"""
MAVEN = """#!/bin/sh
echo run >> "{log}"
for word in "$@"; do case "$word" in -DoutputDirectory=*) folder="${{word#*=}}";; esac; done
mkdir -p "$folder"
echo jar > "$folder/b.jar"
echo jar > "$folder/a.jar"
"""
BROKEN_MAVEN = """#!/bin/sh
printf '\\033[31m[ERROR] Could not resolve dependencies\\033[0m\\n'
exit 1
"""


class Machine:
    """A PATH and a cache of our own."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.cache = root / "cache"
        self.maven_log = root / "maven.log"
        self.bin.mkdir()
        for tool in ("mkdir", "sh"):
            (self.bin / tool).symlink_to(shutil.which(tool) or "")

    def install(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(script)
        path.chmod(0o755)

    def maven_runs(self) -> int:
        return len(self.maven_log.read_text().splitlines())


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return made


class TestJars:
    def test_no_java_names_the_package(self, machine):
        """The error says where it looked and what to install."""
        with pytest.raises(JavaNotFound, match=r"no `java` in \$JAVA_HOME.*\n.*openjdk-17-jre-headless"):
            jars.resolve()

    def test_an_old_java_is_named_with_its_version(self, machine):
        """A Java that cannot run Kafka 4 is found out before anything starts."""
        machine.install("java", JAVA.format(version="11.0.2"))
        with pytest.raises(JavaNotFound, match=r"is Java 11.0.2; Kafka 4 needs 17 or later"):
            jars.resolve()

    def test_a_java_that_does_not_run_is_an_error(self, machine):
        """Some systems have a `java` that only says that there is none."""
        machine.install("java", "#!/bin/sh\necho 'Unable to locate a Java Runtime' >&2; exit 1\n")
        with pytest.raises(JavaNotFound, match="Unable to locate a Java Runtime"):
            jars.resolve()

    def test_no_maven_names_the_package(self, machine):
        """Without Maven and without jars the error says what to install."""
        machine.install("java", JAVA.format(version="17.0.15"))
        with pytest.raises(MavenNotFound, match=r"no `mvn` on the PATH.*\n.*apt-get install maven"):
            jars.resolve()

    def test_a_failed_maven_shows_its_last_lines(self, machine):
        """The error carries Maven's words without its colours, and nothing half done stays."""
        machine.install("java", JAVA.format(version="17.0.15"))
        machine.install("mvn", BROKEN_MAVEN)
        with pytest.raises(JarsNotResolved, match=r"\n  \[ERROR\] Could not resolve dependencies\n"):
            jars.resolve()
        (folder,) = (machine.cache / "rollmill").iterdir()

        assert [path.name for path in folder.iterdir()] == ["lock"]

    def test_resolved_jars_need_no_maven(self, machine):
        """The second time only the cache is looked at; the class path has a fixed order."""
        machine.install("java", JAVA.format(version="21"))
        machine.install("mvn", MAVEN.format(log=machine.maven_log))
        jars.resolve()
        (machine.bin / "mvn").unlink()
        found = jars.resolve()

        assert [Path(jar).name for jar in found.classpath.split(os.pathsep)] == ["a.jar", "b.jar"]
        assert found.java.version == "21"

    def test_two_at_once_run_maven_once(self, machine):
        """Whoever comes second waits for the first and uses its jars."""
        machine.install("java", JAVA.format(version="17"))
        machine.install("mvn", MAVEN.format(log=machine.maven_log))
        with ThreadPoolExecutor(4) as pool:
            folders = {found.folder for found in pool.map(lambda _: jars.resolve(), range(4))}

        assert len(folders) == 1
        assert machine.maven_runs() == 1

    def test_a_lock_is_not_waited_for_without_end(self, tmp_path):
        """The error names the file that another process holds."""
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with jars.locked(tmp_path / "lock", limit_s=1.0):
                held.set()
                done.wait(10)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(hold)
            held.wait(10)
            with pytest.raises(LockTimeout, match="lock"), jars.locked(tmp_path / "lock", limit_s=0.0):
                pass
            done.set()


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


class TestPidFile:
    def test_a_running_process_is_alive(self, tmp_path, sleeper):
        """What was written is read back, and its process counts as alive."""
        written = pidfile.write(tmp_path / "p.json", pid=sleeper.pid, port=9)
        entry = pidfile.read(tmp_path / "p.json")

        assert entry == written
        assert pidfile.alive(written)

    def test_a_reused_pid_is_nobody_of_ours(self, tmp_path, sleeper):
        """A process with the same number and another start is neither alive nor signalled."""
        entry = pidfile.Entry(pid=sleeper.pid, identity="an earlier process", port=9)

        assert not pidfile.alive(entry)
        assert not pidfile.send_signal(entry, signal.SIGKILL)
        assert sleeper.poll() is None

    def test_a_zombie_is_gone(self, tmp_path, sleeper):
        """A process that ended counts as gone before its parent has asked for it."""
        entry = pidfile.write(tmp_path / "p.json", pid=sleeper.pid, port=9)
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)

        assert not pidfile.alive(entry)

    @pytest.mark.parametrize("text", ["", "{", '{"pid": 1}', "[]"])
    def test_an_unreadable_file_is_no_entry(self, tmp_path, text):
        """A file that was cut short counts as none."""
        (tmp_path / "p.json").write_text(text)

        assert pidfile.read(tmp_path / "p.json") is None


def answering(reply: bytes) -> int:
    """Listen once on a free port, answer anything with these bytes, return the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as link:
            link.recv(4096)
            link.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


class TestProbe:
    def test_nobody_there(self):
        """A closed port is no Kafka."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]

        assert probe.ask("127.0.0.1", port) is None

    @pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\0\0\0\4\0\0\0\1", b"\0\0\0\x08\0"])
    def test_somebody_else_there(self, reply):
        """A server that speaks something else, or ends in the middle, is no Kafka."""
        assert probe.ask("127.0.0.1", answering(reply)) is None

    def test_the_cluster_and_its_brokers_are_read(self):
        """The answer of a node with one broker gives its cluster id."""
        body = b"\0\0\x52\x4d" + b"\0\0\0\1" + b"\0\0\0\1" + b"\0\4host" + b"\0\0\x23\x84" + b"\xff\xff" + b"\0\3abc"
        port = answering(len(body).to_bytes(4, "big") + body)

        assert probe.ask("127.0.0.1", port) == probe.Answer(cluster="abc", brokers=1)
