"""Who is killed when: drawn from a seed, and nothing else decides it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmill.supervisor import Supervisor, SupervisorError

LOOK_EVERY_S = 0.05
"""Pause between two looks whether what is to be killed runs again, seconds."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill -9."""

    at_s: float
    """Seconds after the work has begun."""
    service: str
    """Of what."""
    instance: int = 0
    """Which of its instances."""

    def __str__(self) -> str:
        return f"{self.at_s:5.1f} s kill -9 {self.service}[{self.instance}]"


def draw(
    seed: int, instances: Mapping[str, int], *, late: Sequence[str], again: Sequence[str], more: int, window_s: float
) -> list[Kill]:
    """Return the kills of a seed in order of time.

    Args:
        seed: decides everything.
        instances: services that are killed, and how many instances each has.
        late: of these, those that are killed in the last third, when a good part of the work is done.
        again: those that may be killed once more.
        more: how many such kills.
        window_s: from the beginning of the work to the last possible kill.
    """
    dice = random.Random(seed)
    two_thirds = window_s * 2 / 3
    times = [(name, two_thirds, window_s) if name in late else (name, 0.0, two_thirds) for name in instances]
    times += [(dice.choice(again), 0.0, window_s) for _ in range(more)]
    kills = [
        Kill(at_s=dice.uniform(first_s, last_s), service=name, instance=dice.randrange(instances[name]))
        for name, first_s, last_s in times
    ]
    return sorted(kills, key=lambda kill: kill.at_s)


async def carry_out(kills: list[Kill], supervisor: Supervisor) -> None:
    """Kill as planned; what does not run at its time is killed as soon as it does."""
    began = time.monotonic()
    for kill in kills:
        await asyncio.sleep(kill.at_s - (time.monotonic() - began))
        while True:
            try:
                supervisor.kill(kill.service, kill.instance)
            except SupervisorError:  # dead already, and not started again yet
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                break


def show(*lines: object) -> None:
    """Say it where a test that fails is looked at."""
    print(*lines, sep="\n")  # noqa: T201 - pytest shows it with the failure
