"""Episodes whose agents drive themselves: claimed, published and ended like all others."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from infra.clock import SystemClock
from infra.config import Config
from infra.envhost.client import HostAway
from infra.envhost.local import LocalEnvHost
from infra.errors import Failure
from infra.inference.base import BadReply
from infra.inference.scripted import ScriptedPolicy
from infra.memory import MemoryBus
from infra.wire import Publisher
from producers.collect import outcomes
from producers.publish import ensure_manifest, publish_tasks
from schemas import transcript
from schemas.control import RunManifest
from schemas.messages import Budgets
from schemas.outcome import Boundary, Completed, Expired, FailureKind, StopReason
from schemas.topics import TABLE
from stages.handlers.registry import environment
from stages.init.stage import InitStage
from stages.pipeline import Outside, Pipeline
from stages.run.proxy import Proxy
from stages.run.stage import RunStage
from tests.fast_clock import FastClock
from tests.harness_toys import STARTED, Refused, talk
from tests.logs import make_task, wait_until
from tests.pools import pool_of

CLOCK = SystemClock()


@pytest.fixture(autouse=True)
def _started():
    """Environments of this test alone."""
    STARTED.clear()


def policy_of(renderer, text="say", **changes):
    return ScriptedPolicy(
        lambda prompt, seed: renderer.answer(text).tolist(), tokenizer_digest=renderer.digest, **changes
    )


@asynccontextmanager
async def stage_of(host, policy, renderer, *, clock=CLOCK):
    pool = pool_of(clock, policy, wait_s=5.0, digest=renderer.digest)
    async with Proxy(policy=pool, renderer=renderer, clock=clock) as proxy:
        yield RunStage(hosts=host, policy=pool, renderer=renderer, clock=clock, worker="run-test", proxy=proxy)


async def opened(host, agent, *, stays=False, **changes):
    """Return an Episode as INIT leaves it in the log."""
    task = make_task(family="harness_toy", payload={"agent": agent, "stays": stays}, **changes)
    done = await InitStage(host).handle(task)
    await done.settle()
    return done.message


async def played(host, renderer, agent, *, clock=CLOCK, text="say", **changes):
    async with stage_of(host, policy_of(renderer, text), renderer, clock=clock) as stage:
        return (await stage.handle(await opened(host, agent, **changes))).message


async def refused_now(address):
    with pytest.raises(Refused) as caught:
        await asyncio.to_thread(talk, address)
    return caught.value.status


async def test_an_agent_that_only_knows_an_address_becomes_a_rollout(host, toy_renderer):
    """Verdict and transcript are those of one claim, and each call is a turn."""
    rollout = await played(host, toy_renderer, "talk")

    assert ({"returned": ["say", "say"]}, StopReason.DONE, "http://engine") == (
        rollout.verdict,
        rollout.stop,
        rollout.backend,
    )
    transcript.check(rollout.transcript)
    assert ((0,), 2) == (rollout.transcript.segments, len(rollout.transcript.turns))
    said = rollout.transcript.token_ids[rollout.transcript.mask_array == 1]
    assert toy_renderer.answer("say").tolist() * 2 == said.tolist()


async def test_two_sub_agents_that_speak_at_once_are_segments_of_their_own(host, toy_renderer):
    """Each with its whole conversation; nothing of one is in the prompt of the other."""
    rollout = await played(host, toy_renderer, "team")

    transcript.check(rollout.transcript)
    assert (2, 4) == (len(rollout.transcript.segments), len(rollout.transcript.turns))


async def test_the_key_of_an_episode_opens_nothing_once_it_is_over(host, toy_renderer):
    """And it was never that of another episode, nor of another claim."""
    async with stage_of(host, policy_of(toy_renderer), toy_renderer) as stage:
        await stage.handle(await opened(host, "talk"))
        episode = await opened(host, "talk", group="g1")
        await stage.handle(episode)
        await stage.handle(episode)  # its rollout never reached the log

        addresses = [address for started in STARTED for address in started.addresses]
        assert 3 == len({address["api_key"] for address in addresses})
        assert [401] * 3 == [await refused_now(address) for address in addresses]


async def test_an_outcome_that_is_posted_later_closes_the_episode_and_is_in_the_verdict(host, toy_renderer):
    """Who posted it is answered once the rollout is in the log."""
    async with stage_of(host, policy_of(toy_renderer), toy_renderer) as stage:
        done = await stage.handle(await opened(host, "judged", stays=True))
        assert {"returned": None, "outcome": {"success": 1.0, "detail": {"ticket": 17}}} == done.message.verdict
        await done.settle()

        assert {"recorded": True} == await asyncio.to_thread(STARTED[0].join)


async def test_who_posted_an_outcome_that_was_lost_is_told_so(families, toy_renderer):
    """The episode is made once more; a verdict that must not be lost is posted again for that one."""

    class NoVerdict(LocalEnvHost):
        async def verdict(self, lease, token):
            raise Failure(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, "gone")

    async with (
        NoVerdict(environment, clock=CLOCK) as host,
        stage_of(host, policy_of(toy_renderer), toy_renderer) as stage,
    ):
        with pytest.raises(Failure, match="gone"):
            await stage.handle(await opened(host, "judged", stays=True))
        assert 503 == await asyncio.to_thread(STARTED[0].join)


async def test_a_worker_that_is_cancelled_ends_the_generation_and_the_key(host, toy_renderer):
    """The agent is left to its environment, which is reset or closed by whoever has the record next."""
    policy = policy_of(toy_renderer)
    await policy.pause()
    async with stage_of(host, policy, toy_renderer) as stage:
        running = asyncio.create_task(stage.handle(await opened(host, "talk")))
        await wait_until(lambda: len(policy.calls), 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert ["test/g0/0/0/0"] == policy.cancelled
        assert 401 == await asyncio.to_thread(STARTED[0].join)


async def test_an_agent_that_reached_a_limit_is_ended_after_a_while(host, toy_renderer):
    """It counts as truncated by that limit; the budget of the stage need not run out."""
    async with stage_of(host, policy_of(toy_renderer), toy_renderer, clock=FastClock(factor=100.0)) as stage:
        rollout = (await stage.handle(await opened(host, "stubborn", stays=True, horizon=3))).message
        refused = await asyncio.to_thread(STARTED[0].join)

    assert (StopReason.TURNS, 3) == (rollout.stop, len(rollout.transcript.turns))
    assert {400, 401} == set(refused)


async def test_an_agent_that_ends_by_itself_after_a_limit_is_truncated_at_once(host, toy_renderer):
    """Nobody waits for the grace of one that has gone."""
    rollout = await played(host, toy_renderer, "talk", max_sampled_tokens=3)

    assert (StopReason.TOKENS, 3) == (rollout.stop, rollout.transcript.sampled_count)


async def test_an_agent_that_never_calls_is_a_failure_and_no_reward(host, toy_renderer):
    """There is nothing to grade; another attempt may find it working. What its environment says of it is told."""
    with pytest.raises(Failure, match=r"without an answer of the policy.*its environment says \{\"") as caught:
        await played(host, toy_renderer, "silent")

    assert (FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT) == (caught.value.kind, caught.value.boundary)


async def test_an_engine_that_fails_a_call_fails_the_episode(host, toy_renderer):
    """The agent may do anything without its policy, and none of it may be graded."""
    policy = policy_of(toy_renderer)
    policy.fail_next(BadReply("3 ids came with 2 log-probs"))
    async with stage_of(host, policy, toy_renderer) as stage:
        with pytest.raises(Failure, match="3 ids came") as caught:
            await stage.handle(await opened(host, "talk", stays=True))

    assert FailureKind.ENGINE is caught.value.kind


async def test_a_worker_without_a_proxy_says_so(host, toy_renderer):
    """Whoever built it has left it out."""
    stage = RunStage(
        hosts=host,
        policy=pool_of(CLOCK, policy_of(toy_renderer)),
        renderer=toy_renderer,
        clock=CLOCK,
        worker="run-test",
    )
    with pytest.raises(Failure, match="no proxy"):
        await stage.handle(await opened(host, "talk"))


async def test_an_environment_whose_host_was_away_is_opened_again_with_another_key(families, toy_renderer):
    """The rollout is of the second claim alone."""

    class Unsteady(LocalEnvHost):
        times = 1

        async def verdict(self, lease, token):
            if self.times:
                self.times -= 1
                raise HostAway("connection reset")
            return await super().verdict(lease, token)

    async with Unsteady(environment, clock=CLOCK) as host:
        rollout = await played(host, toy_renderer, "talk")

    assert 2 == len(rollout.transcript.turns)
    assert 2 == len({address["api_key"] for address in STARTED[0].addresses})


@asynccontextmanager
async def pipeline_of(renderer):
    """Run the three stages over a log in memory; yields how to publish one task and wait for its trajectory."""
    clock = FastClock()
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    manifest = RunManifest(run="test", seed=5, samples=1)
    publisher = Publisher(bus, clock, "producer")
    await ensure_manifest(bus, clock, publisher, manifest)

    async def ended(agent, **changes):
        payload = {"agent": agent, "stays": changes.pop("stays", False)}
        await publish_tasks(publisher, [make_task(family="harness_toy", payload=payload, **changes)])
        return (await outcomes(bus, clock, manifest, 1, limit_s=500.0))[0]

    async with LocalEnvHost(environment, clock=clock) as host:
        pipeline = Pipeline(bus, clock, Config(), Outside(host=host, policy=policy_of(renderer), renderer=renderer))
        running = asyncio.create_task(pipeline.run())
        try:
            yield ended
        finally:
            pipeline.stop()
            await running


async def test_a_verdict_from_outside_is_graded_like_any_other(families, toy_renderer):
    """Tasks in, trajectories out; EVAL reads the rollout alone."""
    async with pipeline_of(toy_renderer) as ended:
        trajectory = await ended("judged", stays=True)

    assert isinstance(trajectory.outcome, Completed)
    assert (1.0, {"ticket": 17}) == (trajectory.outcome.success, trajectory.verdict["outcome"]["detail"])
    assert {"recorded": True} == await asyncio.to_thread(STARTED[0].join)


async def test_an_outcome_that_never_comes_is_bounded_by_the_budget(families, toy_renderer):
    """A limit on the system: no reward, and the key opens nothing."""
    async with pipeline_of(toy_renderer) as ended:
        trajectory = await ended("talk", stays=True, budgets=Budgets(run_s=0.5))
        assert isinstance(trajectory.outcome, Expired)
        assert 401 == await refused_now(STARTED[0].addresses[0])
