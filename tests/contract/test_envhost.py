"""What every environment host promises its clients: in this process, on a Unix socket and on TCP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from infra.envhost.client import HttpEnvHost
from infra.envhost.host import HostLimits, nobody
from infra.envhost.lease import Fenced, LeaseLimits
from infra.envhost.local import LocalEnvHost
from infra.envhost.protocol import Claimed, Closed, Create, Created
from infra.envhost.scripted import FastScriptedEnvironment, ScriptedEnvironment, ScriptedFactory
from infra.envhost.server import EnvHostServer
from infra.errors import Failure
from schemas.outcome import Boundary, FailureKind

ACTION = {"name": "say", "arguments": {"word": "hello"}, "text": "hello"}


@asynccontextmanager
async def connected(kind: str, factory: ScriptedFactory, limits: HostLimits, folder, withdrawn=nobody):
    if kind == "local":
        async with LocalEnvHost(factory, limits=limits, withdrawn=withdrawn) as local:
            yield local
        return
    address = f"unix:{folder}/host.sock" if kind == "unix" else "http://127.0.0.1:0"
    async with EnvHostServer(address, factory, limits=limits, withdrawn=withdrawn) as server:
        client = HttpEnvHost(server.address)
        yield client
        await client.disconnect()


@pytest.fixture(params=["local", "unix", "tcp"])
def kind(request):
    return request.param


@pytest.fixture(params=[ScriptedEnvironment, FastScriptedEnvironment], ids=["threads", "fast"])
def factory(request):
    return ScriptedFactory(request.param)


@pytest.fixture
async def client(kind, factory, tmp_path):
    limits = HostLimits(capacity=2, create_wait_s=0.05, threads=4)
    async with connected(kind, factory, limits, tmp_path) as client:
        yield client


def request_for(sample: int = 0, attempt: int = 0, payload=None, wait_s: float = 5.0) -> Create:
    return Create(
        run="run",
        group="group",
        sample=sample,
        attempt=attempt,
        family="scripted",
        payload=payload or {},
        seed=7,
        reap_at_ms=time.time_ns() // 1_000_000 + 600_000,
        wait_s=wait_s,
    )


async def claimed(client, **kwargs) -> Claimed:
    created = await client.create(request_for(**kwargs))
    assert isinstance(created, Created)
    taken = await client.claim(created.lease)
    assert isinstance(taken, Claimed)
    return taken


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it holds, for ten seconds at most."""
    async with asyncio.timeout(10):
        while not await condition():
            pass


async def none_held(client) -> bool:
    await asyncio.sleep(0)
    return (await client.counts()).environments == 0


async def is_fenced(client, taken: Claimed) -> bool:
    await asyncio.sleep(0)
    try:
        await client.renew(taken.lease, taken.token)
    except Fenced:
        return True
    return False


async def play(client, request: Create) -> None:
    """Create, claim, step once and take the verdict."""
    created = await client.create(request)
    taken = await client.claim(created.lease)
    await client.step(created.lease, taken.token, ACTION)
    await client.verdict(created.lease, taken.token)


async def test_an_episode_goes_from_create_to_close(client, factory):
    """The whole life of an environment, as INIT and RUN see it."""
    created = await client.create(request_for(payload={"length": 2}))
    assert created == Created(lease=created.lease, observation="start 7")
    assert await client.ready(created.lease)
    taken = await client.claim(created.lease)
    assert taken == Claimed(lease=created.lease, token=1, observation="start 7", reset=False)

    first = await client.step(created.lease, taken.token, ACTION)
    await client.renew(created.lease, taken.token)
    second = await client.step(created.lease, taken.token, ACTION)
    verdict = await client.verdict(created.lease, taken.token)

    assert (first.observation, first.done, second.observation, second.done) == ("1", False, "2", True)
    assert verdict == {"actions": ["hello", "hello"], "seed": 7}
    assert await client.close(created.lease, taken.token)
    assert (await client.counts()).leases == {"created": 0, "ready": 0, "claimed": 0, "closed": 1}
    assert [environment.closes for environment in factory.built] == [1]


async def test_create_again_gives_the_same_lease(client, factory):
    """A redelivered task, even one handled twice at once, has one environment."""
    first, second = await asyncio.gather(client.create(request_for()), client.create(request_for()))
    third = await client.create(request_for())

    assert first == second == third
    assert len(factory.built) == 1


async def test_another_attempt_has_another_environment(client, factory):
    """A retry starts afresh."""
    first = await client.create(request_for())
    second = await client.create(request_for(attempt=1))

    assert first.lease != second.lease
    assert len(factory.built) == 2


async def test_a_second_claim_resets_what_was_stepped_and_fences_the_first(client):
    """A verdict after a takeover holds nothing that the first worker did."""
    first = await claimed(client)
    await client.step(first.lease, first.token, ACTION)
    second = await client.claim(first.lease)

    assert second == Claimed(lease=first.lease, token=2, observation="start 7", reset=True)
    for late in (
        client.step(first.lease, first.token, ACTION),
        client.verdict(first.lease, first.token),
        client.renew(first.lease, first.token),
    ):
        with pytest.raises(Fenced):
            await late
    assert not await client.close(first.lease, first.token)
    assert await client.verdict(first.lease, second.token) == {"actions": [], "seed": 7}


async def test_a_closed_lease_answers_closed_to_run_and_to_init(client):
    """After a publication neither a redelivered Episode nor a redelivered task leads to another output."""
    taken = await claimed(client)
    assert await client.close(taken.lease, taken.token)

    assert await client.claim(taken.lease) == Closed(lease=taken.lease)
    assert await client.create(request_for()) == Closed(lease=taken.lease)
    assert await client.close(taken.lease, taken.token)
    with pytest.raises(Fenced):
        await client.step(taken.lease, taken.token, ACTION)


@pytest.mark.parametrize("state", ["created", "ready", "claimed"])
async def test_a_withdrawn_lease_loses_its_environment_at_once_and_answers_as_closed(client, factory, state):
    """In every state, without a token: nobody has anything left to do for the sample."""
    lease = (await client.create(request_for())).lease
    if state == "ready":
        assert await client.ready(lease)
    token = (await client.claim(lease)).token if state == "claimed" else 1

    assert await client.withdraw(lease)
    assert [1] == [environment.closes for environment in factory.built]
    assert (await client.counts()).environments == 0
    assert await client.claim(lease) == Closed(lease=lease)
    assert await client.create(request_for()) == Closed(lease=lease)
    with pytest.raises(Fenced):
        await client.step(lease, token, ACTION)
    assert await client.withdraw(lease)


async def test_a_host_builds_nothing_for_a_withdrawn_sample(kind, factory, tmp_path):
    """It is told by a function; other samples are built."""
    async with connected(kind, factory, HostLimits(), tmp_path, lambda key: key.sample == 1) as client:
        assert await client.create(request_for(sample=1)) == Closed(lease="")
        assert isinstance(await client.create(request_for(sample=0)), Created)

    assert len(factory.built) == 1


async def test_an_unknown_lease_is_an_environment_lost(client):
    """A host that restarted, or a lease that ran out: retryable, at the environment's boundary."""
    for use in (client.claim("gone-1"), client.step("gone-1", 1, ACTION), client.verdict("gone-1", 1)):
        with pytest.raises(Failure, match="lease gone-1 is lost") as failed:
            await use
        assert (failed.value.kind, failed.value.boundary) == (FailureKind.ENVIRONMENT_LOST, Boundary.ENVIRONMENT)
    assert not await client.ready("gone-1")
    assert not await client.close("gone-1", 1)
    assert not await client.withdraw("gone-1")


async def test_a_lease_that_ran_out_is_lost_and_its_environment_closed(kind, factory, tmp_path):
    """Nobody renews, so the host takes its place back."""
    limits = HostLimits(reap_every_s=0.01, leases=LeaseLimits(created_s=0.05, claimed_s=0.05))
    async with connected(kind, factory, limits, tmp_path) as client:
        created = await client.create(request_for())
        await until(lambda: none_held(client))
        with pytest.raises(Failure) as failed:
            await client.claim(created.lease)

    assert failed.value.kind is FailureKind.ENVIRONMENT_LOST
    assert [environment.closes for environment in factory.built] == [1]


@pytest.mark.parametrize("method", ["reset", "step", "verdict", "close"])
async def test_an_environment_that_raises_fails_its_own_rollout_alone(client, method):
    """The error is a failure of the family's code, the same at another attempt; the host goes on."""
    request = request_for(payload={"raise_in": method})
    if method == "close":
        taken = await claimed(client, payload={"raise_in": "close"})
        assert await client.close(taken.lease, taken.token)
    else:
        with pytest.raises(Failure, match=f"RuntimeError: {method} was told to fail") as failed:
            await play(client, request)
        assert (failed.value.kind, failed.value.boundary) == (FailureKind.HANDLER, Boundary.ENVIRONMENT)

    other = await claimed(client, sample=1)
    assert (await client.step(other.lease, other.token, ACTION)).observation == "1"


async def test_a_bad_payload_is_an_invalid_task(client):
    """The factory's ValueError says what is wrong with the task; no place is taken by it."""
    with pytest.raises(Failure, match="refuses this payload: too odd") as failed:
        await client.create(request_for(payload={"refuse": "too odd"}))

    assert (failed.value.kind, failed.value.boundary) == (FailureKind.INVALID_TASK, Boundary.TASK)
    assert (await client.counts()).environments == 0


async def test_a_full_host_makes_create_wait_for_a_place(client):
    """Capacity is back-pressure: the waiting create goes on when an environment is closed."""
    taken = await claimed(client, sample=0)
    await claimed(client, sample=1)
    waiting = asyncio.create_task(client.create(request_for(sample=2)))
    done, _ = await asyncio.wait({waiting}, timeout=0.02)
    assert not done

    await client.close(taken.lease, taken.token)

    assert isinstance(await waiting, Created)


async def test_a_host_that_stays_full_is_a_failure_after_the_callers_limit(client):
    """The limit is the caller's, and the error names what was waited for."""
    await claimed(client, sample=0)
    await claimed(client, sample=1)

    with pytest.raises(Failure, match=r"no environment within 0.1 s.*one of 2 places") as failed:
        await client.create(request_for(sample=2, wait_s=0.1))

    assert (failed.value.kind, failed.value.boundary) == (FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT)
    assert (await client.counts()).environments == 2


async def test_a_claim_fences_a_step_that_is_still_running(kind, tmp_path):
    """The second worker waits for the first one's call, finds the start, and the first one's answer is void."""
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        entered.set()
        assert leave.wait(10)

    factory = ScriptedFactory(inside=inside)
    async with connected(kind, factory, HostLimits(), tmp_path) as client:
        first = await claimed(client)
        step = asyncio.create_task(client.step(first.lease, first.token, ACTION))
        assert await asyncio.to_thread(entered.wait, 10)
        takeover = asyncio.create_task(client.claim(first.lease))
        await until(lambda: is_fenced(client, first))
        leave.set()
        second = await takeover

        assert second.reset
        assert await client.verdict(second.lease, second.token) == {"actions": [], "seed": 7}
        with pytest.raises(Fenced):
            await step


async def test_a_caller_who_gives_up_does_not_let_another_in(kind, tmp_path):
    """A call in a thread cannot be stopped, so its environment stays locked until it ends."""
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        entered.set()
        assert leave.wait(10)

    factory = ScriptedFactory(inside=inside)
    async with connected(kind, factory, HostLimits(), tmp_path) as client:
        taken = await claimed(client)
        step = asyncio.create_task(client.step(taken.lease, taken.token, ACTION))
        assert await asyncio.to_thread(entered.wait, 10)
        step.cancel()
        judged = asyncio.create_task(client.verdict(taken.lease, taken.token))
        done, _ = await asyncio.wait({judged}, timeout=0.02)
        assert not done
        leave.set()

        assert await judged == {"actions": ["hello"], "seed": 7}


async def test_a_call_that_takes_too_long_loses_the_lease(kind, tmp_path):
    """One hanging environment costs its rollout and a thread, not the host."""
    leave = threading.Event()
    factory = ScriptedFactory(inside=lambda: bool(leave.wait(10)))  # type: ignore[arg-type, return-value]
    async with connected(kind, factory, HostLimits(call_s=0.05), tmp_path) as client:
        taken = await claimed(client)
        with pytest.raises(Failure, match=r"took more than 0.05 s") as failed:
            await client.step(taken.lease, taken.token, ACTION)
        with pytest.raises(Failure, match="is lost"):
            await client.verdict(taken.lease, taken.token)
        assert isinstance(await client.create(request_for(sample=1)), Created)
        leave.set()

    assert failed.value.kind is FailureKind.INFRASTRUCTURE
    assert [environment.closes for environment in factory.built] == [1, 1]


async def test_the_end_of_the_host_closes_all_environments(kind, factory, tmp_path):
    """A clean stop leaves nothing open, in whatever state the leases are."""
    async with connected(kind, factory, HostLimits(), tmp_path) as client:
        await client.create(request_for(sample=0))
        await claimed(client, sample=1)

    assert [environment.closes for environment in factory.built] == [1, 1]
