"""`rollmill backends`: engines are registered, drained and removed by one record each."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from click.testing import CliRunner

from infra.clock import VirtualClock
from infra.control import control_now
from infra.errors import ConfigError
from infra.inference.base import PolicyUnreachable
from infra.inference.scripted import ScriptedPolicy
from infra.memory import MemoryBus
from rollmill import backends
from rollmill.commands import backends as command_module
from rollmill.commands.backends import command
from schemas.control import Backend
from schemas.topics import TABLE
from tests.pools import address_of, backends_of
from tests.served import put_in_place

CONFIGURED_URL = "http://configured"


class Away(ScriptedPolicy):
    """An engine that nobody answers for."""

    async def info(self):
        raise PolicyUnreachable("connection refused")


class World:
    """A log, and engines by address."""

    def __init__(self):
        self.clock = VirtualClock()
        self.bus = MemoryBus(self.clock)
        self.engines = {}

    def connect(self, url):
        return self.engines.setdefault(url, ScriptedPolicy(lambda prompt, seed: [5]))

    async def add(self, backend, *, asked=True):
        return await backends.added(self.bus, self.clock, backend, self.connect if asked else None)

    async def registered(self):
        return (await control_now(self.bus, self.clock)).all(Backend)

    async def listed(self):
        return await backends.listed(self.bus, self.clock, self.connect, url=CONFIGURED_URL)


@pytest.fixture
async def world():
    found = World()
    await found.bus.create_topics(TABLE)
    return found


async def test_what_each_engine_serves_is_told(world, tmp_path):
    """The configured one while none is registered; one that is away or drained is said to be so."""
    alone = await world.listed()
    a, b, c = backends_of("a", "b", "c")
    await put_in_place(world.connect(a.url), tmp_path, 4, "r")
    world.engines[c.url] = Away(lambda prompt, seed: [5])
    for backend in (a, b, c):
        await world.add(backend, asked=False)
    await backends.drained(world.bus, world.clock, "b")
    found = await world.listed()

    assert [(one["url"], one["registered"], one["state"]) for one in alone] == [(CONFIGURED_URL, False, "serves")]
    assert [(one["name"], one["state"]) for one in found] == [("a", "serves"), ("b", "drained"), ("c", "away")]
    assert (found[0]["serves"], found[2]["cause"]) == ("version 4 of run r", "connection refused")


async def test_an_engine_is_registered_changed_drained_and_removed(world):
    """The last record of its key is what holds."""
    (a,) = backends_of("a", weight=2.0)
    said = await world.add(a)
    first = await world.registered()
    await backends.drained(world.bus, world.clock, "a")
    (drained,) = await world.registered()
    await world.add(a)
    again = await world.registered()
    await backends.removed(world.bus, world.clock, "a")

    assert (said["state"], first, again) == ("serves", [a], [a])
    assert (drained.draining, drained.weight) == (True, 2.0)
    assert await world.registered() == []


async def test_an_engine_that_could_not_be_used_is_not_registered(world):
    """It does not answer, or no answer of it could be trained on; who insists may."""
    away, raw = backends_of("away", "raw")
    world.engines[away.url] = Away(lambda prompt, seed: [5])
    world.engines[raw.url] = Raw(lambda prompt, seed: [5])
    with pytest.raises(ConfigError, match=r"http://away cannot be used: connection refused\. --force"):
        await world.add(away)
    with pytest.raises(ConfigError, match="start vLLM with --logprobs-mode processed_logprobs"):
        await world.add(raw)
    before = await world.registered()
    await world.add(away, asked=False)

    assert (before, await world.registered()) == ([], [away])


class Raw(ScriptedPolicy):
    """An engine whose log-probs are those before temperature."""

    async def info(self):
        return replace(await super().info(), logprobs_mode="raw_logprobs")


async def test_one_engine_has_one_name(world):
    """Under two it would be given twice its share."""
    await world.add(Backend(name="a", url=address_of("x")))
    with pytest.raises(ConfigError, match="http://x is registered as a already"):
        await world.add(Backend(name="b", url=address_of("x")))


async def test_the_name_of_the_configured_engine_is_not_given_to_another(world):
    """The list could not tell them apart."""
    with pytest.raises(ConfigError, match="'configured' is what the engine in the settings is called"):
        await world.add(Backend(name="configured", url=address_of("x")))


@pytest.mark.parametrize("change", [backends.drained, backends.removed])
async def test_who_names_no_engine_is_told_which_there_are(world, change):
    """A slip of the keyboard changes nothing."""
    await world.add(*backends_of("gpu-1"))
    with pytest.raises(ConfigError, match="no backend is registered as 'gpu-2'; registered: gpu-1"):
        await change(world.bus, world.clock, "gpu-2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "a b", "http://x"), "is no name for a backend"),
        (("add", "a", "http://x", "--weight", "0"), "is not in the range"),
        (("drain", "../a"), "is no name for a backend"),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_anything_is_opened(arguments, says):
    """With what was given and what is expected."""
    result = CliRunner().invoke(command, arguments)

    assert (result.exit_code, says in result.output) == (2, True)


def test_the_list_is_a_table_for_a_person(monkeypatch):
    """Name, address, state and weights of each engine."""
    clock = VirtualClock()
    bus = MemoryBus(clock)

    @asynccontextmanager
    async def connected(*_, **__):
        await bus.create_topics(TABLE)
        yield bus

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(command_module, "connected", connected)
    monkeypatch.setattr(command_module, "VllmClient", lambda url, model: ScriptedPolicy(lambda prompt, seed: [5]))
    result = CliRunner().invoke(command, ["list"])

    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in ("configured", "serves", "version 0 of no run"))
