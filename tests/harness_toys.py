"""A task family whose agents are programs of their own: threads that know a `base_url` and a key, and nothing else."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from infra.envhost.environment import Environment, StepResult
from infra.envhost.program import ProgramEnvironment
from schemas.messages import Rollout, Task
from stages.handlers.base import Action, Grade, Invalid, Opening

LIMIT_S = 60.0
"""Longest wait of an agent for an answer, seconds."""


class Refused(Exception):
    """The proxy answered with an error."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post JSON with a key. Raises Refused."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise Refused(error.code, json.load(error)) from error


def chat(address: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the policy's message."""
    body = {"model": address["model"], "messages": messages}
    answer = post(f"{address['base_url']}/chat/completions", address["api_key"], body)
    return answer["choices"][0]["message"]


def talk(address: Mapping[str, Any], system: str = "start", turns: int = 2) -> list[str]:
    """Hold a conversation of so many turns; return what the policy said."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    for _ in range(turns):
        messages += [chat(address, messages), {"role": "user", "content": "something else"}]
    return [message["content"] for message in messages if message["role"] == "assistant"]


def team(address: Mapping[str, Any]) -> list[list[str]]:
    """Let two sub-agents talk at the same time."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda number: talk(address, f"start {number}"), range(2)))


def judged(address: Mapping[str, Any]) -> dict[str, Any]:
    """Talk, and then say how it went."""
    talk(address)
    return post(address["outcome_url"], address["api_key"], {"success": True, "detail": {"ticket": 17}})


def stubborn(address: Mapping[str, Any]) -> list[int]:
    """Ask for more until the key opens nothing; return how each call was refused."""
    refused: list[int] = []
    while 401 not in refused:
        try:
            talk(address)
        except Refused as error:
            refused.append(error.status)
    return refused


AGENTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "talk": talk,
    "team": team,
    "judged": judged,
    "stubborn": stubborn,
    "silent": lambda address: "nothing was asked",
}


class AgentEnvironment:
    """Starts the `agent` that its payload names; with `stays` nobody tells it of the agent's end."""

    fast = True

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.addresses: list[Mapping[str, Any]] = []
        self._payload = payload
        self._agent: threading.Thread | None = None
        self._returned: Any = None

    def reset(self) -> str:
        """Forget the agent."""
        self._agent, self._returned = None, None
        return "start"

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Start the agent, or say whether it has ended."""
        if action["name"] == "open":
            if not self.addresses:
                STARTED.append(self)
            self.addresses.append(action["arguments"])
            self._agent = threading.Thread(target=self._run, args=(action["arguments"],), daemon=True)
            self._agent.start()
        assert self._agent is not None, "opened first"
        return StepResult("", done=not (self._agent.is_alive() or self._payload.get("stays")))

    def verdict(self) -> dict[str, Any]:
        """Return what the agent returned."""
        return {"returned": self._returned}

    def close(self) -> None:
        """Leave the thread to its end: its key opens nothing any more."""

    def join(self) -> Any:
        """Wait for the agent and return what it returned."""
        assert self._agent is not None, "opened first"
        self._agent.join(LIMIT_S)
        return self._returned

    def _run(self, address: Mapping[str, Any]) -> None:
        try:
            self._returned = AGENTS[self._payload["agent"]](address)
        except Refused as error:
            self._returned = error.status


STARTED: list[AgentEnvironment] = []
"""Environments whose agents were started, for a test to look at."""


class HarnessToy:
    """Graded by what was posted, or else by whether the agent came to an end."""

    family = "harness_toy"
    prompt_version = "harness_toy.1"
    invalid_ends = True
    harness = True

    def environment(self, payload: Mapping[str, Any], seed: int) -> Environment:
        """Build the environment."""
        return AgentEnvironment(payload)

    def init(self, task: Task, observation: str) -> Opening:
        """Open with nothing: the agent has prompts of its own."""
        return Opening(messages=())

    def act(self, text: str) -> Action | Invalid:
        """Never called."""
        raise AssertionError("an agent that drives itself carries its actions out by itself")

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """Give what was posted."""
        outcome = verdict.get("outcome", {})
        success = outcome.get("success", 1.0 if verdict["returned"] else 0.0)
        return Grade(components={"outcome": outcome.get("reward", success)}, success=success)


class ProgramToy(HarnessToy):
    """The same with the program that its payload names by `command`; graded by its exit code."""

    family = "program_toy"

    def environment(self, payload: Mapping[str, Any], seed: int) -> Environment:
        """Build the environment."""
        return ProgramEnvironment(payload["command"])

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """Give 1 for a good end."""
        success = float(verdict["exit_code"] == 0)
        return Grade(components={"ended": success}, success=success)
