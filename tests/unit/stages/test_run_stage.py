"""Episode -> Rollout: one claim, one transcript, one verdict of the same episode."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from infra.clock import SystemClock, VirtualClock, settle
from infra.envhost.client import HostAway
from infra.errors import Failure
from infra.inference.base import BadReply, PolicyOverloaded, PolicyUnreachable
from infra.inference.scripted import ScriptedPolicy
from infra.stage import Done
from schemas import transcript
from schemas.messages import Rollout
from schemas.outcome import Boundary, FailureKind, StopReason
from schemas.transcript import Sampling
from stages.handlers.registry import environment
from stages.init.stage import InitStage
from stages.run.stage import FENCED_S, MAX_CLAIMS, RunStage
from tests.away import AwayHost
from tests.fast_clock import FastClock
from tests.logs import make_task, wait_until
from tests.pools import pool_of
from tests.served import put_in_place

CLOCK = SystemClock()


class Speaker:
    """Says texts in turn, whatever it is asked, the last one again and again."""

    def __init__(self, renderer, *texts):
        self._renderer = renderer
        self._texts = list(texts)

    def __call__(self, prompt, seed):
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        return self._renderer.answer(text).tolist()


def policy_of(renderer, *texts, **changes):
    changes.setdefault("tokenizer_digest", renderer.digest)
    return ScriptedPolicy(Speaker(renderer, *texts), **changes)


def stage_of(host, policy, renderer, *, clock=CLOCK):
    return RunStage(
        hosts=host,
        policy=pool_of(clock, policy, wait_s=5.0, digest=renderer.digest),
        renderer=renderer,
        clock=clock,
        worker="run-test",
    )


async def opened(host, *, payload=None, family="toy", **changes):
    """Return an Episode as INIT leaves it in the log."""
    task = make_task(family=family, payload=payload or {"length": 2}, **changes)
    done = await InitStage(host).handle(task)
    await done.settle()
    return done.message


async def failure(stage, episode):
    with pytest.raises(Failure) as caught:
        await stage.handle(episode)
    return caught.value


async def test_an_episode_becomes_a_rollout_with_its_verdict(host, toy_renderer):
    """Transcript, verdict and stop are those of one uninterrupted claim."""
    episode = await opened(host)
    policy = policy_of(toy_renderer, "hello", "say something")
    done = await stage_of(host, policy, toy_renderer).handle(episode)
    rollout = done.message

    assert {"actions": ["hello", "say something"], "seed": 7} == rollout.verdict
    assert (StopReason.DONE, "http://engine", "run-test", toy_renderer.digest) == (
        rollout.stop,
        rollout.backend,
        rollout.worker,
        rollout.tokenizer_digest,
    )
    transcript.check(rollout.transcript)
    assert ["test/g0/0/0/0", "test/g0/0/0/1"] == [call.request_id for call in policy.calls]
    assert {toy_renderer.stop_ids} == {call.stop_token_ids for call in policy.calls}


async def test_the_ids_of_the_transcript_are_the_ids_that_were_sampled(host, toy_renderer):
    """Each prompt is everything before it; nothing is encoded again."""
    episode = await opened(host, payload={"length": 3})
    policy = policy_of(toy_renderer, "hello hello", "say", "something else")
    record = (await stage_of(host, policy, toy_renderer).handle(episode)).message.transcript

    answers = [toy_renderer.answer(text) for text in ("hello hello", "say", "something else")]
    assert np.concatenate(answers).tolist() == record.token_ids[record.mask_array == 1].tolist()
    for call, turn in zip(policy.calls, record.turns, strict=True):
        assert call.prompt.tolist() == record.token_ids[: turn.sampled].tolist()


async def test_the_lease_is_closed_only_after_the_rollout_is_in_the_log(host, toy_renderer):
    """A crash before that leaves the environment to the next claimant."""
    episode = await opened(host)
    done = await stage_of(host, policy_of(toy_renderer, "hello"), toy_renderer).handle(episode)
    before = (await host.counts()).leases
    await done.settle()

    assert (1, 0) == (before["claimed"], before["closed"])
    assert (await host.counts()).leases["closed"] == 1


async def test_a_closed_lease_commits_without_output(host, toy_renderer):
    """A rollout of this attempt is in the log already; the engine is not asked."""
    episode, policy = await opened(host), policy_of(toy_renderer, "hello")
    stage = stage_of(host, policy, toy_renderer)
    await (await stage.handle(episode)).settle()
    asked = len(policy.calls)

    assert await stage.handle(episode) is None
    assert len(policy.calls) == asked


async def test_a_rollout_that_was_not_published_is_made_again_from_the_start(host, toy_renderer):
    """The second claim resets the environment, so no rollout mixes the actions of two workers."""
    episode = await opened(host)
    await stage_of(host, policy_of(toy_renderer, "hello"), toy_renderer).handle(episode)
    again = await stage_of(host, policy_of(toy_renderer, "say"), toy_renderer).handle(episode)

    assert ["say", "say"] == again.message.verdict["actions"]


class NotedClock(VirtualClock):
    """A clock that stands still and notes who waits for it."""

    def __init__(self):
        super().__init__()
        self.waits = []

    async def sleep(self, seconds):
        """Note the wait, and wait."""
        self.waits.append(seconds)
        await super().sleep(seconds)


def claimed_meanwhile(host, episode, renderer):
    """Return a policy during whose answer another worker claims the environment, and where its claim comes."""
    claimed = []

    def claim(prompt, seed):
        claimed.append(asyncio.ensure_future(host.claim(episode.lease)))
        return [*renderer.answer("hello").tolist()]

    return ScriptedPolicy(claim, tokenizer_digest=renderer.digest), claimed


async def test_a_worker_that_was_fenced_waits_to_be_told_that_the_record_is_anothers(host, toy_renderer):
    """The rollout is the other's work now: nothing is published, nothing failed, and it may go on."""
    episode, clock = await opened(host), NotedClock()
    policy, claimed = claimed_meanwhile(host, episode, toy_renderer)
    giving_up = asyncio.create_task(stage_of(host, policy, toy_renderer, clock=clock).handle(episode))
    await wait_until(lambda: FENCED_S in clock.waits, True)

    giving_up.cancel()  # as the worker does once its partition is another's
    with pytest.raises(asyncio.CancelledError):
        await giving_up

    assert (await host.step(episode.lease, claimed[0].result().token, {"text": "mine"})).observation == "1"


async def test_a_worker_that_was_fenced_and_still_owns_the_record_tries_it_anew(host, toy_renderer):
    """Who claimed was a worker that woke up without it, and may die before it publishes anything."""
    episode, clock = await opened(host), FastClock(factor=600.0)
    policy, _ = claimed_meanwhile(host, episode, toy_renderer)

    failed = await failure(stage_of(host, policy, toy_renderer, clock=clock), episode)

    assert FailureKind.ENVIRONMENT_LOST is failed.kind
    assert "out of turn" in failed.cause


async def test_a_lease_that_is_lost_is_a_failure_that_another_attempt_may_mend(host, toy_renderer):
    """The host restarted, or nobody renewed in time."""
    episode = await opened(host)
    await host.host.stop()
    failed = await failure(stage_of(host, policy_of(toy_renderer, "hello"), toy_renderer), episode)

    assert FailureKind.ENVIRONMENT_LOST is failed.kind


async def test_an_engine_with_another_tokenizer_fails_and_the_environment_is_let_go(host, toy_renderer):
    """Ids of two vocabularies are never mixed; the error says what to do. The next attempt has its own environment."""
    episode = await opened(host)
    policy = policy_of(toy_renderer, "hello", tokenizer_digest="f" * 64)
    failed = await failure(stage_of(host, policy, toy_renderer), episode)

    assert (FailureKind.ENGINE, Boundary.POLICY) == (failed.kind, failed.boundary)
    assert "give both the same model directory" in failed.cause
    leases = (await host.counts()).leases
    assert ([], 0, 1) == (policy.calls, leases["ready"], leases["claimed"]), "a claim without heartbeat runs out"


async def test_an_engine_whose_files_cannot_be_read_here_is_trusted(host, toy_renderer):
    """A remote engine names no digest."""
    policy = policy_of(toy_renderer, "hello", tokenizer_digest="")
    done = await stage_of(host, policy, toy_renderer).handle(await opened(host))

    assert isinstance(done, Done)
    assert isinstance(done.message, Rollout)


async def test_a_handler_that_raises_in_act_is_a_typed_failure(host, toy_renderer):
    """The same text would raise again: no second attempt and no reward."""
    failed = await failure(stage_of(host, policy_of(toy_renderer, "explode"), toy_renderer), await opened(host))

    assert (FailureKind.HANDLER, Boundary.HANDLER_ACT) == (failed.kind, failed.boundary)
    # The record keeps the place as well: whoever wrote the handler looks for it.
    assert failed.cause.startswith("RuntimeError: act was told to fail (toys.py:")


@pytest.mark.parametrize("method", ["step", "verdict"])
async def test_an_environment_that_raises_is_a_typed_failure(host, toy_renderer, method):
    """At the boundary of the environment, for the family's own code."""
    episode = await opened(host, payload={"length": 1, "raise_in": method})
    failed = await failure(stage_of(host, policy_of(toy_renderer, "hello"), toy_renderer), episode)

    assert (FailureKind.HANDLER, Boundary.ENVIRONMENT) == (failed.kind, failed.boundary)


async def test_an_invalid_action_never_reaches_the_environment(host, toy_renderer):
    """It ends the episode or is answered by its reason, as the family says."""
    strict, patient = await opened(host), await opened(host, family="patient_toy", group="g1")
    ended = await stage_of(host, policy_of(toy_renderer, "nonsense"), toy_renderer).handle(strict)
    went_on = await stage_of(host, policy_of(toy_renderer, "nonsense", "hello", "say"), toy_renderer).handle(patient)

    assert (StopReason.INVALID_ACTION, []) == (ended.message.stop, ended.message.verdict["actions"])
    assert (StopReason.DONE, ["hello", "say"]) == (went_on.message.stop, went_on.message.verdict["actions"])


async def test_an_engine_that_is_away_or_busy_is_waited_for(host, toy_renderer):
    """Neither costs the sample an attempt."""
    clock, policy = VirtualClock(), policy_of(toy_renderer, "hello")
    policy.fail_next(PolicyUnreachable("gone"), PolicyOverloaded("429"), PolicyUnreachable("gone"))
    running = asyncio.create_task(stage_of(host, policy, toy_renderer, clock=clock).handle(await opened(host)))
    await wait_until(lambda: len(policy.calls), 1)
    await clock.advance(3.0)

    assert (await running).message.stop is StopReason.DONE


async def test_an_answer_that_cannot_be_trained_on_is_a_failure_of_the_engine(host, toy_renderer):
    """Another attempt may get a better one; this one is published nowhere."""
    policy = policy_of(toy_renderer, "hello")
    policy.fail_next(BadReply("3 ids came with 2 log-probs"))
    failed = await failure(stage_of(host, policy, toy_renderer), await opened(host))

    assert (FailureKind.ENGINE, Boundary.POLICY) == (failed.kind, failed.boundary)
    assert "BadReply: 3 ids" in failed.cause


async def test_a_task_waits_for_the_version_that_it_was_admitted_for(host, toy_renderer):
    """`min_version` comes with the task; an engine that stays behind is an engine failure in the end."""
    clock, policy = VirtualClock(), policy_of(toy_renderer, "hello", version=4)
    stage = stage_of(host, policy, toy_renderer, clock=clock)
    assert (await stage.handle(await opened(host, min_version=4))).message.transcript.spans[0].version == 4

    waiting = asyncio.create_task(stage.handle(await opened(host, min_version=5, group="g1")))
    await settle()
    await clock.advance(6.0)
    with pytest.raises(Failure, match="waited 5 s for policy version >= 5; http://engine: it has version 4 of no run"):
        await waiting


async def test_a_task_of_a_run_in_training_waits_for_the_weights_of_that_run(host, toy_renderer, tmp_path):
    """Another run's version 7 is not its own: nothing of it is sampled."""
    clock, policy = VirtualClock(), policy_of(toy_renderer, "hello")
    await put_in_place(policy, tmp_path, 7, "other")
    stage = stage_of(host, policy, toy_renderer, clock=clock)
    waiting = asyncio.create_task(stage.handle(await opened(host, min_version=5, weights_of="mine")))
    await settle()
    await clock.advance(1.0)
    assert (waiting.done(), policy.sampled) == (False, 0)
    await put_in_place(policy, tmp_path, 5, "mine")
    await clock.advance(1.0)
    assert (await waiting).message.transcript.spans[0].version == 5

    waiting = asyncio.create_task(stage.handle(await opened(host, min_version=5, weights_of="third", group="g1")))
    await settle()
    await clock.advance(6.0)
    with pytest.raises(
        Failure, match="for policy version >= 5 of run third; http://engine: it has version 5 of run mine"
    ):
        await waiting


async def failure_after(host, renderer, directory, first, then):
    """Return the failure of a rollout whose engine has other weights, (version, run), than at the rollout before."""
    policy = policy_of(renderer, "hello")
    await put_in_place(policy, directory, *first)
    stage = stage_of(host, policy, renderer)
    await stage.handle(await opened(host, weights_of="mine"))
    await put_in_place(policy, directory, *then)
    return await failure(stage, await opened(host, weights_of="mine", group="g1"))


async def test_weights_of_another_run_that_come_in_between_fail_the_rollout(host, toy_renderer, tmp_path):
    """Two runs brought their weights into one engine: no token of the wrong policy is trained on."""
    failed = await failure_after(host, toy_renderer, tmp_path, (5, "mine"), (6, "other"))

    assert (FailureKind.ENGINE, Boundary.POLICY) == (failed.kind, failed.boundary)
    assert (
        "version 6 of run other sampled a part of it, and the task is for policy version >= 0 of run mine"
        in failed.cause
    )


async def test_a_task_that_nobody_trains_on_is_sampled_by_whatever_is_served(host, toy_renderer, tmp_path):
    """Published from any producer, or made again from a log."""
    policy = policy_of(toy_renderer, "hello")
    await put_in_place(policy, tmp_path, 6, "other")

    assert (await stage_of(host, policy, toy_renderer).handle(await opened(host))).message.stop is StopReason.DONE


async def test_an_engine_that_restarted_with_its_first_model_samples_nothing_for_a_run(host, toy_renderer, tmp_path):
    """It calls that model version 0, and so is the first one of every run: it may be another model all the same."""
    failed = await failure_after(host, toy_renderer, tmp_path, (0, "mine"), (0, ""))

    assert "version 0 of no run sampled a part of it" in failed.cause


async def test_limits_of_the_task_reach_the_engine(host, toy_renderer):
    """What is left of the episode's tokens bounds every turn."""
    policy = policy_of(toy_renderer, "hello hello")
    episode = await opened(
        host, payload={"length": 9}, max_sampled_tokens=5, sampling=Sampling(temperature=0.5, max_tokens=3)
    )
    rollout = (await stage_of(host, policy, toy_renderer).handle(episode)).message

    assert StopReason.TOKENS is rollout.stop
    assert [3, 2] == [call.max_tokens for call in policy.calls]
    assert {0.5} == {span.sampling.temperature for span in rollout.transcript.spans}


class Unsteady(AwayHost):
    """A host that is away for some of its calls of a kind."""

    def __init__(self, method, times):
        super().__init__(environment, clock=CLOCK)
        self._method, self._times = method, times
        self.claims = []
        self.meanwhile = None

    async def claim(self, lease):
        claim = await super().claim(lease)
        self.claims.append(getattr(claim, "token", None))
        return claim

    async def step(self, lease, token, action):
        return await self._unless("step", super().step(lease, token, action))

    async def verdict(self, lease, token):
        return await self._unless("verdict", super().verdict(lease, token))

    async def _unless(self, method, call):
        answer = await call  # carried out, and the answer is lost
        if method == self._method and self._times:
            self._times -= 1
            if self.meanwhile:
                await self.meanwhile()
            raise HostAway("connection reset")
        return answer


@pytest.mark.parametrize("method", ["step", "verdict"])
async def test_a_host_that_did_not_answer_is_claimed_again_and_the_episode_begun_again(families, toy_renderer, method):
    """In the same attempt: the rollout is of one claim, as if the first had never been."""
    async with Unsteady(method, 2) as host:
        episode = await opened(host)
        policy = policy_of(toy_renderer, "hello")
        done = await stage_of(host, policy, toy_renderer).handle(episode)

    assert [1, 2, 3] == host.claims
    assert {"actions": ["hello", "hello"], "seed": 7} == done.message.verdict
    transcript.check(done.message.transcript)


async def test_a_host_that_never_answers_a_step_fails_the_attempt(families, toy_renderer):
    """It is there for claims, so no breaker opens: somebody has to give up."""
    async with Unsteady("step", 99) as host:
        failed = await failure(stage_of(host, policy_of(toy_renderer, "hello"), toy_renderer), await opened(host))

    assert (MAX_CLAIMS, FailureKind.INFRASTRUCTURE) == (len(host.claims), failed.kind)


async def test_a_worker_that_was_replaced_while_its_host_was_away_does_not_claim_again(families, toy_renderer):
    """The record is another's by then, which must not be fenced by the one that lost it."""
    async with Unsteady("step", 1) as host:
        episode = await opened(host)

        async def replaced():
            await host.claim(episode.lease)

        host.meanwhile = replaced
        clock = FastClock(factor=600.0)
        await failure(stage_of(host, policy_of(toy_renderer, "hello"), toy_renderer, clock=clock), episode)

        assert [1, 2] == host.claims
        assert (await host.step(episode.lease, 2, {"text": "mine"})).observation == "1"
