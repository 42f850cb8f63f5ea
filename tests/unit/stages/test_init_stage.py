"""Task -> Episode: the environment is there before the Episode is."""

from __future__ import annotations

import pytest

from infra.envhost.local import LOCAL
from infra.errors import Failure
from infra.middleware.deadline import reap_at_ms
from schemas.outcome import Boundary, FailureKind
from schemas.transcript import Sampling
from stages.init.stage import InitStage
from tests.logs import make_task


def toy_task(**changes):
    payload = changes.pop("payload", {})
    return make_task(family=changes.pop("family", "toy"), payload=payload, **changes)


async def failure(host, task):
    with pytest.raises(Failure) as caught:
        await InitStage(host).handle(task)
    return caught.value


async def leases(host):
    return {state: count for state, count in (await host.counts()).leases.items() if count}


async def test_an_episode_names_its_environment_and_opens_the_conversation(host):
    """Host, lease, messages and the prompt's version travel with the task."""
    task = toy_task()
    done = await InitStage(host).handle(task)
    episode = done.message

    assert (task, LOCAL, "toy.1") == (episode.task, episode.host, episode.prompt_version)
    assert ({"role": "user", "content": "start 7"},) == episode.messages
    assert (await host.claim(episode.lease)).observation == "start 7"


async def test_the_environment_waits_for_a_worker_once_the_episode_is_in_the_log(host):
    """Until then its lease is short, so that an Episode that never came leaves nothing behind."""
    done = await InitStage(host).handle(toy_task())
    before = await leases(host)
    await done.settle()

    assert ({"created": 1}, {"ready": 1}) == (before, await leases(host))


async def test_a_task_that_is_handed_out_again_gets_the_same_environment(host):
    """One environment per attempt, however often INIT crashes."""
    stage = InitStage(host)
    first, again = await stage.handle(toy_task()), await stage.handle(toy_task())
    other = await stage.handle(toy_task(attempt=1))

    assert first.message.lease == again.message.lease != other.message.lease
    assert (await host.counts()).environments == 2


async def test_a_task_whose_rollout_is_in_the_log_gives_no_second_episode(host):
    """A closed lease: there is nothing left to do for this attempt."""
    stage = InitStage(host)
    episode = (await stage.handle(toy_task())).message
    claim = await host.claim(episode.lease)
    await host.close(claim.lease, claim.token)

    assert await stage.handle(toy_task()) is None


async def test_an_unknown_family_names_the_known_ones(host):
    """The task cannot be run here, at any attempt."""
    failed = await failure(host, toy_task(family="chess"))

    assert (FailureKind.INVALID_TASK, Boundary.TASK) == (failed.kind, failed.boundary)
    assert "unknown family 'chess'" in failed.cause
    assert "keydoor, patient_toy, program_toy, reasoning, toy" in failed.cause


@pytest.mark.parametrize(
    ("family", "kind", "says"),
    [
        ("absent_toy", FailureKind.INVALID_TASK, "cannot be imported: No module named"),
        ("unnamed_toy", FailureKind.INVALID_TASK, "cannot be imported: module 'tests.toys' has no attribute 'Nobody'"),
        ("broken_toy", FailureKind.HANDLER, "OSError: no disk"),
    ],
)
async def test_a_family_that_cannot_be_loaded_fails_its_own_tasks(host, family, kind, says):
    """Missing packages and broken constructors are the task's failure, not the stage's."""
    failed = await failure(host, toy_task(family=family))

    assert (kind, Boundary.TASK) == (failed.kind, failed.boundary)
    assert says in failed.cause


async def test_a_handler_that_raises_in_init_is_a_typed_failure(host):
    """The same task would raise again."""
    failed = await failure(host, toy_task(payload={"raise_in": "init"}))

    assert (FailureKind.HANDLER, Boundary.HANDLER_INIT) == (failed.kind, failed.boundary)
    # The record keeps the place as well: whoever wrote the handler looks for it.
    assert failed.cause.startswith("RuntimeError: init was told to fail (toys.py:")


async def test_an_environment_that_raises_is_a_failure_at_its_boundary(host):
    """Neither a retry nor a reward."""
    failed = await failure(host, toy_task(payload={"raise_in": "reset"}))

    assert (FailureKind.HANDLER, Boundary.ENVIRONMENT) == (failed.kind, failed.boundary)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"payload_digest": "ab"}, "payload_digest is 'ab'"),
        ({"sampling": Sampling(top_p=2.0)}, "sampling.top_p is 2.0"),
    ],
)
async def test_a_flaw_of_the_task_is_found_before_anything_is_made_for_it(host, changes, says):
    """No environment is left behind, and the cause is for whoever wrote the task."""
    failed = await failure(host, toy_task(**changes))

    assert (FailureKind.INVALID_TASK, Boundary.TASK, 0) == (
        failed.kind,
        failed.boundary,
        (await host.counts()).environments,
    )
    assert says in failed.cause


async def test_a_bad_payload_is_a_bad_task(host):
    """The family says what it found."""
    failed = await failure(host, make_task(payload={"size": "large"}))

    assert (FailureKind.INVALID_TASK, Boundary.TASK) == (failed.kind, failed.boundary)
    assert "size must be an integer" in failed.cause


async def test_an_environment_is_kept_for_as_long_as_an_outage_may_postpone_the_end(host):
    """The reaper gives a sample more time when a service was away; the host cannot know, so it is told beforehand."""
    task = toy_task()
    kept = []

    class Told:
        address = host.address

        async def create(self, request):
            kept.append(request.reap_at_ms)
            return await host.create(request)

    await InitStage(Told(), outage_s=1800).handle(task)

    assert [reap_at_ms(task) + 1_800_000] == kept
