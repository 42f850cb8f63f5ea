"""The service around the host: addresses, refusals, a host that is down."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import msgspec
import pytest

from infra.clock import SystemClock
from infra.envhost import server as server_module
from infra.envhost.address import Address
from infra.envhost.client import ClientLimits, HostAway, HttpEnvHost, HttpEnvHosts
from infra.envhost.environment import StepResult
from infra.envhost.patient import PatientHost
from infra.envhost.protocol import Create, Created
from infra.envhost.scripted import ScriptedFactory
from infra.envhost.server import EnvHostServer, serve
from infra.errors import ConfigError, Failure
from infra.guard import unguarded
from schemas.outcome import FailureKind

CLOCK = SystemClock()


def request_for(wait_s: float = 5.0) -> Create:
    return Create(
        run="run",
        group="group",
        sample=0,
        attempt=0,
        family="scripted",
        payload={},
        seed=1,
        reap_at_ms=SystemClock().now_ms() + 600_000,
        wait_s=wait_s,
    )


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/host.sock"


@pytest.mark.parametrize("text", ["unix:/run/host.sock", "http://127.0.0.1:8100", "http://[::1]:8100"])
def test_an_address_reads_as_it_is_written(text):
    """What goes into an Episode comes out again."""
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "unix:relative", "unix:/" + 120 * "x", "http://127.0.0.1", "https://a:1", "tcp:1", "http://a:99999"]
)
def test_a_bad_address_is_a_configuration_error(text):
    """The error names the address and the two forms, or the limit of a socket's path."""
    with pytest.raises(ConfigError, match="environment host address"):
        Address.parse(text)


async def post(address: str, operation: str, body: bytes) -> tuple[int, dict]:
    connector = aiohttp.UnixConnector(address.removeprefix("unix:"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"http://environment-host/{operation}", data=body) as response,
    ):
        return response.status, msgspec.msgpack.decode(await response.read())


async def test_an_unknown_operation_is_refused(address):
    """The refusal names the operations that there are."""
    async with EnvHostServer(address, ScriptedFactory()):
        status, answer = await post(address, "explode", b"")

    assert status == 404
    assert answer["reason"] == "bad_request"
    assert "known: create, renew, ready, claim, step, verdict, close, withdraw" in answer["text"]


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"lease": 5})])
async def test_a_body_that_does_not_fit_is_refused(address, body):
    """Nonsense is answered, and the host goes on."""
    async with EnvHostServer(address, ScriptedFactory()):
        status, answer = await post(address, "step", body)
        created = await _create_once(address)

    assert (status, answer["reason"]) == (400, "bad_request")
    assert isinstance(created, Created)


async def test_an_oversize_body_is_refused(address, monkeypatch):
    """A payload beyond the limit is not read into memory."""
    monkeypatch.setattr(server_module, "BODY_BYTES", 1000)
    async with EnvHostServer(address, ScriptedFactory()):
        status, answer = await post(address, "create", bytes(5000))

    assert status == 413
    assert "exceeds 1000 bytes" in answer["text"]


async def _create_once(address: str) -> object:
    client = HttpEnvHost(address)
    try:
        return await client.create(request_for())
    finally:
        await client.disconnect()


async def test_a_second_host_does_not_steal_a_socket(address):
    """Two hosts on one address would split the leases; the second one says so."""
    async with EnvHostServer(address, ScriptedFactory()):
        with pytest.raises(ConfigError, match=r"cannot listen on unix:.*somebody listens there already"):
            await EnvHostServer(address, ScriptedFactory()).__aenter__()


async def test_a_socket_file_left_by_a_crash_is_taken_over(address, tmp_path):
    """A killed host leaves its socket file; the next one listens there all the same."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/host.sock")
    async with EnvHostServer(address, ScriptedFactory()):
        assert isinstance(await _create_once(address), Created)


async def test_serving_ends_when_told_and_closes_the_environments(tmp_path):
    """The service's own entry: says where it listens, stops cleanly, leaves no socket file."""
    factory, stop = ScriptedFactory(), asyncio.Event()
    started: asyncio.Queue[str] = asyncio.Queue()
    service = asyncio.create_task(serve(f"unix:{tmp_path}/host.sock", factory, stop=stop, started=started.put_nowait))
    address = await asyncio.wait_for(started.get(), 5)
    await _create_once(address)
    stop.set()
    await asyncio.wait_for(service, 5)

    assert [environment.closes for environment in factory.built] == [1]
    assert not (tmp_path / "host.sock").exists()


async def test_create_waits_for_a_host_that_starts_late(address):
    """A host that restarts costs no attempt: the patient client asks until the task's limit."""
    client = HttpEnvHost(address)
    waiting = asyncio.create_task(PatientHost(client, CLOCK, unguarded(CLOCK)).create(request_for()))
    done, _ = await asyncio.wait({waiting}, timeout=0.03)
    assert not done
    async with EnvHostServer(address, ScriptedFactory()):
        assert isinstance(await waiting, Created)
        await client.disconnect()


async def test_a_host_that_is_down_is_a_failure_that_names_it(address):
    """The sample fails for a reason of the system, not of the policy."""
    client = HttpEnvHost(address)
    for call in (client.create(request_for(wait_s=0.03)), client.claim("lease"), client.counts()):
        with pytest.raises(HostAway, match=r"environment host at unix:.*is it running\?") as failed:
            await call
        assert failed.value.kind is FailureKind.INFRASTRUCTURE
    assert not await client.ready("lease")
    assert not await client.close("lease", 1)
    await client.disconnect()


async def test_an_answer_that_does_not_come_is_a_failure_that_names_the_wait(tmp_path):
    """A host that accepts and then says nothing does not hold a worker for ever."""

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/host.sock")
        silent.listen()
        client = HttpEnvHost(f"unix:{tmp_path}/host.sock", limits=ClientLimits(call_s=0.05))
        with pytest.raises(Failure, match=r"waited .* 0.05 s for the answer to step of the environment host at unix:"):
            await client.step("lease", 1, {"text": "x"})
        await client.disconnect()


async def test_clients_are_kept_by_address(address):
    """One set of connections per host, however many Episodes name it."""
    hosts = HttpEnvHosts()

    assert hosts.at(address) is hosts.at(address)
    assert hosts.at(address) is not hosts.at("http://127.0.0.1:1")
    await hosts.disconnect()


class Unpackable:
    """An environment whose answers cannot be sent."""

    def reset(self) -> str:
        return "start"

    def step(self, action) -> StepResult:
        return StepResult(observation=5, done=False) if action["text"] == "number" else "nothing"

    def verdict(self) -> dict:
        return {"state": object()}

    def close(self) -> None:
        """Nothing to release."""


async def test_an_environment_that_answers_nonsense_is_the_familys_failure(address):
    """What cannot travel is refused where it arises, with what was found."""
    async with EnvHostServer(address, lambda *_: Unpackable()):
        client = HttpEnvHost(address)
        created = await client.create(request_for())
        taken = await client.claim(created.lease)
        for call, cause in (
            (client.step(created.lease, taken.token, {"text": "number"}), "not a StepResult with a text"),
            (client.step(created.lease, taken.token, {"text": "other"}), "step returned nothing"),
            (client.verdict(created.lease, taken.token), "the verdict has no msgpack form"),
        ):
            with pytest.raises(Failure, match=cause) as failed:
                await call
            assert failed.value.kind is FailureKind.HANDLER
        await client.disconnect()


class Forgetful(Unpackable):
    """An environment that does not come back to where it began."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> str:
        self.resets += 1
        return f"start {self.resets}"

    def step(self, action) -> StepResult:
        return StepResult("next", done=False)


async def test_an_environment_that_is_not_exactly_resettable_is_given_up(address):
    """The Episode's prompt would not fit it any more, so the attempt goes back to INIT."""
    async with EnvHostServer(address, lambda *_: Forgetful()) as server:
        client = HttpEnvHost(address)
        created = await client.create(request_for())
        taken = await client.claim(created.lease)
        await client.step(created.lease, taken.token, {"text": "x"})
        with pytest.raises(Failure, match="not exactly resettable") as failed:
            await client.claim(created.lease)
        await client.disconnect()

    assert failed.value.kind is FailureKind.ENVIRONMENT_LOST
    assert server.host.counts().environments == 0
