"""Engines are registered, drained and removed over HTTP as by the commands."""

from __future__ import annotations

import aiohttp
import pytest

from infra.clock import SystemClock
from infra.control import control_now
from infra.errors import BusError, ConfigError
from infra.inference.base import PolicyUnreachable
from infra.inference.scripted import ScriptedPolicy
from infra.memory import MemoryBus
from rollmill.backends_http import BODY_BYTES, BackendsApi, serving
from schemas.control import Backend
from schemas.topics import TABLE

CLOCK = SystemClock()


class Away(ScriptedPolicy):
    async def info(self):
        raise PolicyUnreachable("connection refused")


class Served:
    """The API of a log, and what it answers."""

    def __init__(self, bus, url):
        self.bus = bus
        self._url = url

    async def call(self, method, path, body=None):
        async with aiohttp.ClientSession() as session, session.request(method, self._url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def registered(self):
        return {one.name: one for one in (await control_now(self.bus, CLOCK)).all(Backend)}


@pytest.fixture
async def served():
    bus = MemoryBus(CLOCK)
    await bus.start()
    await bus.create_topics(TABLE)
    kinds = {"http://away:1": Away}
    connect = lambda url: kinds.get(url, ScriptedPolicy)(lambda prompt, seed: [5])  # noqa: E731
    async with serving(BackendsApi(bus, CLOCK, connect, url="http://configured"), 0) as url:
        yield Served(bus, url)
    await bus.close()


async def test_an_engine_is_registered_drained_and_removed(served):
    """By one record each, and a list says what there is."""
    status, said = await served.call("PUT", "/backends/gpu-1", {"url": "http://a:8000/", "weight": 2, "run": "r"})
    assert (200, "serves") == (status, said["state"])
    assert await served.registered() == {"gpu-1": Backend(name="gpu-1", url="http://a:8000", weight=2.0, run="r")}
    _, listed = await served.call("GET", "/backends")
    assert [("gpu-1", "serves")] == [(one["name"], one["state"]) for one in listed["backends"]]

    _, said = await served.call("PUT", "/backends/gpu-1/drain")
    assert said["state"] == "drained"
    assert (await served.registered())["gpu-1"].draining
    _, said = await served.call("DELETE", "/backends/gpu-1")
    assert said["state"] == "removed"
    assert await served.registered() == {}
    _, listed = await served.call("GET", "/backends")
    assert ["configured"] == [one["name"] for one in listed["backends"]]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("PUT", "/backends/gpu-1", {"url": "http://away:1"}, 400, "connection refused"),
        ("PUT", "/backends/gpu-1", {"address": "http://a"}, 400, "unknown field `address`"),
        ("PUT", "/backends/gpu-1", {}, 400, "missing required field `url`"),
        ("PUT", "/backends/gpu-1", {"url": "a:80", "force": True}, 400, "it is http://host:port"),
        ("PUT", "/backends/gpu-1", {"url": "http://[::1:9/", "force": True}, 400, "it is http://host:port"),
        ("PUT", "/backends/gpu-1", {"url": "http://a:99999", "force": True}, 400, "it is http://host:port"),
        ("PUT", "/backends/gpu-1", {"url": "http://u:p@a:80", "force": True}, 400, "without a user"),
        ("PUT", "/backends/gpu-1", {"url": "http://a:80\n", "force": True}, 400, "it is http://host:port"),
        ("PUT", "/backends/a b", {"url": "http://a", "force": True}, 400, "is no name for a backend"),
        ("PUT", "/backends/gpu-1", {"url": "http://a", "weight": 0, "force": True}, 400, "weight is 0.0"),
        ("PUT", "/backends/gpu-1", {"url": "x" * BODY_BYTES}, 413, "Request Entity Too Large"),
        ("PUT", "/backends/gpu-9/drain", None, 400, "no backend is registered as 'gpu-9'"),
        ("DELETE", "/backends/gpu-9", None, 400, "no backend is registered as 'gpu-9'"),
        ("POST", "/backends/gpu-9/drain", None, 405, "Method Not Allowed"),
        ("GET", "/elsewhere", None, 404, "Not Found"),
    ],
)
async def test_what_cannot_be_done_says_why_and_changes_nothing(served, method, path, body, status, says):
    """In words, as an object; nothing that a page in a browser could ask for unasked changes anything."""
    found, said = await served.call(method, path, body)
    assert status == found
    assert says in said["error"]["message"]
    assert await served.registered() == {}


async def test_who_comes_by_another_name_is_refused(served):
    """A page in a browser may have a name of its own resolve to this machine; then no preflight asks."""
    body = {"url": "http://a", "force": True}
    url = f"{served._url}/backends/gpu-1"
    async with (
        aiohttp.ClientSession() as session,
        session.put(url, json=body, headers={"Host": "evil.example"}) as reply,
    ):
        assert (403, "'evil.example' is not what this is called") == (
            reply.status,
            (await reply.json())["error"]["message"].partition(":")[0],
        )
    assert await served.registered() == {}


async def test_an_engine_that_is_away_is_registered_if_told_so(served):
    """It may come up later."""
    status, _ = await served.call("PUT", "/backends/gpu-1", {"url": "http://away:1", "force": True})
    assert status == 200
    _, listed = await served.call("GET", "/backends")
    assert ["away"] == [one["state"] for one in listed["backends"]]


async def test_a_log_that_is_away_is_said_to_be(served, monkeypatch):
    """Nothing is changed then, and the service goes on."""

    async def away(*_, **__):
        raise BusError("no broker answers")

    monkeypatch.setattr("rollmill.backends.control_now", away)
    status, said = await served.call("GET", "/backends")
    assert (503, "no broker answers") == (status, said["error"]["message"])


async def test_a_port_that_is_taken_is_named(served):
    """And what to do."""
    port = int(served._url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*; give another --port"):
        async with serving(BackendsApi(served.bus, CLOCK, Away, url="http://configured"), port):
            pass
