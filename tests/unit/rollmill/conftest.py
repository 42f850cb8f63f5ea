import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.supervisor import Event, Service, What
from rollmill.supervisor.readiness import says

LIMIT_S = 20.0
"""Longest wait of a test for something that takes milliseconds."""

STEADY = "import signal; print('ready'); signal.pause()"


class Events:
    """What a supervisor said, in order, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._more = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.all.append(event)
        self._more.set()
        self._more = asyncio.Event()

    def of(self, what: What, service: str | None = None) -> list[Event]:
        return [event for event in self.all if event.what is what and service in (None, event.service)]

    async def nth(self, count: int, what: What, service: str | None = None) -> Event:
        """Return the count-th event of this kind, waiting for it."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.of(what, service)) < count:
                await self._more.wait()
        return self.of(what, service)[count - 1]

    def order(self, what: What) -> list[str]:
        return [event.service for event in self.of(what)]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def python() -> Callable[..., Service]:
    """Make a service of a few lines of Python; by default one that says `ready` and stays."""

    def make(name: str, code: str = STEADY, **options: object) -> Service:
        options.setdefault("ready", says("^ready$", limit_s=LIMIT_S))
        return Service(name=name, argv=(sys.executable, "-I", "-S", "-u", "-c", code), **options)

    return make


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
