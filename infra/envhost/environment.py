"""What an environment is: a small synchronous object with reset, step, verdict and close.

It lives only inside an environment host, is driven by one caller at a time, and must be exactly resettable: `reset`
with the same payload and seed gives the same episode again. It knows no tokens, no policy and no grading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the environment answers to one action."""

    observation: str
    """What the agent sees next."""
    done: bool
    """The task is over, solved or not."""


class Environment(Protocol):
    """One running task instance.

    An environment whose every call takes well under a millisecond may declare `fast = True`; the host then calls it on
    its event loop, which costs a twentieth of a thread.
    """

    def reset(self) -> str:
        """Return to the start and give the first observation."""
        ...

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Carry out one action: a map with `name`, `arguments` and `text`."""
        ...

    def verdict(self) -> dict[str, Any]:
        """Return what grading needs to know of the state; msgpack types only."""
        ...

    def close(self) -> None:
        """Release everything; called once, also after an error."""
        ...


EnvironmentFactory = Callable[[str, Mapping[str, Any], int], Environment]
"""(family, payload, seed) -> a new environment; raises for an unknown family or a bad payload."""
