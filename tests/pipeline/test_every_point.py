"""A crash at every point between a task's publication and the optimizer step: a source is trained on, whole and once.

One part of a run, or each, dies at a chosen instant: before or behind a record, in the middle of a file or of a step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from mortal import Fate
from mortal_run import CLOCK, PARTS, MortalRun
from synthetic_run import RUN, SAMPLES, live, run_config

from rollmill.ledger import ledger
from schemas.decisions import GroupDropped, StepDecided
from trainer.replay import replay

ROWS, GROUPS = 8, 2

SHARES = 24
"""A part's life is cut into so many; the default tests take some of them, the slow ones every instant."""


async def trained(tmp_path, model, fates=None):
    """Return a run that has ended; it may be one batch ahead, so that its feeder is paced by what was trained."""
    algorithm = {"groups": GROUPS, "samples": SAMPLES, "max_lag": 1, "late": "wait", "filter": "off"}
    config = run_config(tmp_path, model, algorithm=algorithm, stop={"max_steps": ROWS // GROUPS})
    run = await MortalRun(config, rows=ROWS, fates=fates).run()
    assert run.died == (fates or {}).keys()
    return run


@dataclass(frozen=True)
class Came:
    """What a run came to."""

    steps: list[int]
    times: set[int]
    """How often a sample was trained on."""
    samples: int
    dropped: list[str]
    violations: list[str]
    books: dict[str, int]
    replays: bool


WHOLE = Came(
    steps=list(range(1, ROWS // GROUPS + 1)),
    times={1},
    samples=ROWS * SAMPLES,
    dropped=[],
    violations=[],
    books={"trained": ROWS * SAMPLES},
    replays=True,
)
"""Every sample of the source was trained on, once, and none beside it."""


async def came_to(run):
    said = await live(run.bus)
    steps = [decision for decision in said if isinstance(decision, StepDecided)]
    members = Counter((member.group, member.sample) for step in steps for member in step.members)
    books = await ledger(run.bus, CLOCK, RUN)
    return Came(
        steps=[step.step for step in steps],
        times=set(members.values()),
        samples=len(members),
        dropped=[decision.group for decision in said if isinstance(decision, GroupDropped)],
        violations=books.violations,
        books=books.counts(),
        replays=(await replay(run.bus, CLOCK, RUN)).all_equal,
    )


@pytest.fixture(scope="module")
def instants(model, tmp_path_factory):
    """Return how many instants each part has in a life that nothing disturbs."""

    async def calm():
        run = await trained(tmp_path_factory.mktemp("calm"), model)
        assert await came_to(run) == WHOLE
        return {part: len(fate.passed) for part, fate in run.fates.items()}

    return asyncio.run(calm())


@pytest.mark.parametrize("share", range(0, SHARES, 4))
@pytest.mark.parametrize("part", PARTS)
async def test_a_source_is_trained_on_whole_and_once_whatever_dies_at_some_point(
    model, tmp_path, instants, part, share
):
    """No row is skipped, no sample counts twice, and nothing was thrown away."""
    fate = Fate(1 + share * instants[part] // SHARES)

    assert await came_to(await trained(tmp_path, model, {part: fate})) == WHOLE


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
async def test_a_source_is_trained_on_whole_and_once_whatever_dies_at_any_point(model, tmp_path, instants, part):
    """Each instant that this part has, one run each."""
    for instant in range(1, instants[part] + 1):
        run = await trained(tmp_path / str(instant), model, {part: Fate(instant)})
        assert await came_to(run) == WHOLE


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s else ()) for s in range(8)])
async def test_a_source_is_trained_on_whole_and_once_although_all_of_them_die(model, tmp_path, instants, seed):
    """Each at an instant of its own."""
    fates = {part: Fate(1 + (7 * seed + 5 * place) % count) for place, (part, count) in enumerate(instants.items())}

    assert await came_to(await trained(tmp_path, model, fates)) == WHOLE
