"""One crash in 64, at every seam: 63 results are kept as they are, and one sample is tried again."""

from __future__ import annotations

from collections import Counter

import pytest

from infra.errors import Failure
from infra.inference.base import BadReply
from infra.trajectories import TrajectoryReader
from schemas.outcome import Boundary, Completed, Failed, FailureKind
from stages import pipeline as stages
from stages.handlers.keydoor import WORDS, KeyDoor
from stages.run.render import Renderer
from tests.fast_clock import FastClock
from tests.model_directory import word_model
from tests.pipeline.test_pipeline import hunted, rulings, working, world_of

GROUPS, SAMPLES = 32, 64

BREAKS = Failure(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, "it fell over")
GONE = Failure(FailureKind.ENVIRONMENT_LOST, Boundary.ENVIRONMENT, "its host was started again")

SEAMS = {
    "INIT creates": ("create", BREAKS, 1),
    "RUN claims": ("claim", GONE, 1),
    "an environment steps": ("step", BREAKS, 1),
    "an environment is lost between turns": ("step", GONE, 1),
    "the verdict is taken": ("verdict", BREAKS, 1),
    "the engine answers": ("generate", BadReply("3 ids came with 2 log-probs"), 1),
    "EVAL grades": ("grade", Failure(FailureKind.INFRASTRUCTURE, Boundary.HANDLER_GRADE, "no sandbox"), 0),
}
"""Where -> (the call that breaks, how, attempts that it costs: a rollout that cannot be graded is not made again)."""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(word_model(tmp_path_factory.mktemp("model"), WORDS))


def breaking_once(call, error, at=20):
    """Return a call that raises at one of its calls, and the list of those that did."""
    made, broken = [], []

    async def breaking(*arguments, **settings):
        made.append(arguments)
        if len(made) == at:
            broken.append(arguments)
            raise error
        return await call(*arguments, **settings)

    return breaking, broken


@pytest.mark.parametrize("where", SEAMS)
async def test_one_crash_in_64_at_any_seam_keeps_63_results_and_every_group(renderer, monkeypatch, where):
    """The sample alone is tried again, no group lacks a sibling, and nothing gets a reward for it."""
    name, error, attempts = SEAMS[where]
    # Slow enough that no lease runs out on a busy machine, which would cost an attempt too.
    async with world_of(renderer, clock=FastClock(factor=5)) as world:
        owner = {"generate": world.policy, "grade": stages}.get(name, world.host)
        breaking, broken = breaking_once(getattr(owner, name), error)
        monkeypatch.setattr(owner, name, breaking)
        await world.publish(GROUPS)
        async with working(world.pipeline()):
            found = await world.ended()
        async with TrajectoryReader.on(world.bus, world.clock, "r") as reader:
            groups = [group async for group in reader.groups(follow=False)]

        assert 1 == len(broken)
        assert Counter({0: SAMPLES - attempts, 1: attempts}) == Counter(one.task.attempt for one in hunted(found))
        assert ([2] * GROUPS, SAMPLES) == ([len(group.graded) for group in groups], len(found))
        assert Counter({"accepted": SAMPLES}) == await rulings(world.bus)
        assert {"unread": SAMPLES} == await world.books()


@pytest.mark.parametrize("method", ["init", "act", "grade"])
async def test_a_bug_that_one_sample_of_64_meets_keeps_the_other_63(renderer, monkeypatch, method):
    """What would raise again is not tried again: one failure with its cause, and its sibling is kept."""
    sound, calls = getattr(KeyDoor, method), []

    def buggy(handler, *arguments):
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyError("colour")
        return sound(handler, *arguments)

    monkeypatch.setattr(KeyDoor, method, buggy)
    async with world_of(renderer, clock=FastClock(factor=5)) as world:
        await world.publish(GROUPS)
        async with working(world.pipeline()):
            found = await world.ended()
        (lost,) = [one for one in found if not isinstance(one.outcome, Completed)]

        assert SAMPLES - 1 == len(hunted(found))
        assert isinstance(lost.outcome, Failed)
        assert (FailureKind.HANDLER, f"handler.{method}") == (lost.outcome.kind, lost.outcome.boundary)
        assert "colour" in lost.outcome.cause
        assert {"unread": SAMPLES - 1, "failed": 1} == await world.books()
