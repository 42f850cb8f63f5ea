"""An episode whose agent is a program of its own: it is started, and its calls are answered until it has ended.

The environment starts the agent, or hands the address to a system that lives already:

    step {"name": "open", "arguments": {...}, "text": ""}    first, once; the arguments are those of `Address`
    step {"name": "wait", "arguments": {}, "text": ""}       every ASK_EVERY_S, until done

Both answer at once: a step that lasts holds one of the host's threads, and the host gives up one of two minutes.
`done` means that the agent has ended. An environment that nobody tells of the end never says so, and `POST /outcome`
ends the episode; either way the stage's budget bounds it. `reset` and `close` end an agent that still runs.

What was posted is in the verdict under `outcome`. No HTTP and no tokens here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from infra.envhost.client import EnvHostClient
from infra.envhost.protocol import Claimed
from infra.waiting import waits_for
from stages.run.open_episode import OpenEpisode

ASK_EVERY_S = 0.5
"""An environment is asked this often whether its agent has ended, seconds."""

OUTCOME = "outcome"
"""Where the verdict holds what was posted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What an agent is told, and all that it has to know."""

    base_url: str
    """Of the chat API."""
    api_key: str = field(repr=False)
    """Opens this episode, and no other; who reads it may speak for the agent."""
    model: str
    """Name of the model."""
    outcome_url: str
    """Where the outcome is posted, with the same key, if somebody does."""


async def play(opened: OpenEpisode, address: Address, host: EnvHostClient, claim: Claimed) -> None:
    """Start the agent, and return when the episode is over."""
    stepped = await host.step(claim.lease, claim.token, _action("open", asdict(address)))
    while not stepped.done:
        waits_for("its agent, or an outcome that is posted")
        if await opened.until_over(ASK_EVERY_S):
            break
        stepped = await host.step(claim.lease, claim.token, _action("wait", {}))
    waits_for("")


def with_outcome(verdict: dict[str, Any], outcome: dict[str, Any] | None) -> dict[str, Any]:
    """Return the environment's verdict with what was posted, if something was."""
    return verdict if outcome is None else {**verdict, OUTCOME: outcome}


def _action(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": dict(arguments), "text": ""}
