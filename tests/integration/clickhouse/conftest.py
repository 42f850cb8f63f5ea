"""A local ClickHouse as a process of its own, one per test module."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.clickhouse.client import Address
from infra.memory import MemoryBus
from schemas.topics import TABLE


class ServerProcess:
    """`python -m infra.clickhouse.local_server` on a free port; the port stays the same over restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self.path.parent / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "infra.clickhouse.local_server", "--path", self.path, "--port", str(self.port)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parents[3],
            )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)
        assert found, f"the server said {line!r}: {(self.path.parent / 'server.log').read_text()}"
        self.port = int(found.group(1))

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.process.stdout.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = ServerProcess(tmp_path_factory.mktemp("clickhouse") / "data")
    running.start()
    yield running
    running.stop()


@pytest.fixture
def own_server(tmp_path):
    """A server that the test may kill."""
    running = ServerProcess(tmp_path / "data")
    running.start()
    yield running
    running.stop()


@pytest.fixture
async def address(server, request):
    """A database of the test's own on the module's server."""
    name = re.sub(r"\W", "_", request.node.name)[:60]
    return Address.parse(server.url, database=name)


@pytest.fixture
async def bus():
    """A log in memory with all topics."""
    log = MemoryBus()
    await log.create_topics(TABLE)
    return log
