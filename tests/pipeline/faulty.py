"""What a test breaks around the pipeline: an expert that plays, an engine that fails, a host that restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from infra.clock import Clock
from infra.envhost.host import EnvHost
from infra.envhost.local import LocalEnvHost
from infra.inference.base import BadReply, PolicyOverloaded, PolicyUnreachable
from infra.inference.scripted import ScriptedPolicy
from stages.handlers.registry import environment
from stages.run.render import Renderer


class Expert:
    """Plays the shortest hunt by the hint alone, and speaks to toys; a script of the scripted policy."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __call__(self, prompt, seed):
        """Answer the last message of the prompt."""
        last = self._renderer.display(prompt).rsplit("<|user|>", 1)[1]
        return self._renderer.answer(self.action(last.split("<|end|>")[0].split())).tolist()

    @staticmethod
    def action(hint):
        """Return what the expert says to a hint."""
        match hint:
            case ["find", "key", direction, *_] | ["door", ("north" | "south" | "east" | "west") as direction, *_]:
                return f"go {direction}"
            case ["key", "at"]:
                return "take"
            case ["door", "at"]:
                return "open"
            case _:
                return "hello"


class FaultyPolicy(ScriptedPolicy):
    """An engine that fails as a seed says, and lets things happen at given calls."""

    def __init__(self, renderer: Renderer, *, seed: int = 0, garbage: float = 0.0, busy: float = 0.0) -> None:
        super().__init__(Expert(renderer), tokenizer_digest=renderer.digest)
        self.at: dict[int, Callable[[], object]] = {}
        """Number of a call -> what happens then."""
        self.away: range = range(0)
        """Calls that reach nobody."""
        self.garbage_at: set[int] = set()
        """Calls that are answered with garbage."""
        self.stuck: set[int] = set()
        """Calls that are not answered before `release`."""
        self.held: list[str] = []
        """Names of the generations that were."""
        self.garbled_names: list[str] = []
        """Names of the generations that were answered with garbage."""
        self.asked_away = 0
        """How often it was asked what it serves while it was gone."""
        self._gone = False
        self._released = asyncio.Event()
        self._dice = random.Random(seed)
        self._garbage, self._busy = garbage, busy
        self._count = 0

    @property
    def garbled(self) -> int:
        """Answers that were garbage."""
        return len(self.garbled_names)

    @property
    def asked(self) -> int:
        """Calls of `generate`, answered or not."""
        return self._count

    def leave(self) -> None:
        """Be gone: no call reaches it until `come_back`."""
        self._gone = True

    def come_back(self) -> None:
        """Be there again."""
        self._gone = False

    def release(self) -> None:
        """Answer what is stuck."""
        self._released.set()

    async def info(self):
        """Say what is served, unless it is gone."""
        if self._gone:
            self.asked_away += 1
            raise PolicyUnreachable("connection refused")
        return await super().info()

    async def generate(self, *arguments, **settings):
        """Fail, or answer as the expert."""
        number, roll = self._count, self._dice.random()
        self._count += 1
        self.at.pop(number, lambda: None)()
        if self._gone or number in self.away:
            raise PolicyUnreachable("connection refused")
        if number in self.stuck:
            self.held.append(settings["request_id"])
            await self._released.wait()
        if roll < self._garbage or number in self.garbage_at:
            self.garbled_names.append(settings["request_id"])
            raise BadReply("3 ids came with 2 log-probs")
        if roll < self._garbage + self._busy:
            raise PolicyOverloaded("429")
        return await super().generate(*arguments, **settings)


class RestartingHost(LocalEnvHost):
    """An environment host that can be killed and started again: all its leases are lost."""

    def __init__(self, clock: Clock, *, threads: ThreadPoolExecutor | None = None) -> None:
        super().__init__(environment, clock=clock, threads=threads)
        self._its_clock, self._its_threads = clock, threads
        self._ending: list[asyncio.Task[None]] = []

    def restart(self) -> None:
        """Lose everything and be there again."""
        old, self.host = self.host, EnvHost(environment, clock=self._its_clock, threads=self._its_threads)
        self._ending.append(asyncio.ensure_future(old.stop()))
