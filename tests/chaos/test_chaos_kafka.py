"""kill -9 of every service of a training run on a real Kafka: it trains on the same samples as without a kill."""

from __future__ import annotations

import asyncio
import os

import pytest

from schemas.retries import RETRIES
from tests.chaos.kill_plan import draw, show
from tests.chaos.system import GROUPS, RUN_WORKERS, SAMPLES, STEPS, Books, System, played

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SEEDS = (1, 2)
"""ROLLMILL_CHAOS_SEED=N adds one of your own."""

KILLED = {"broker": 1, "envhost": 1, "init": 1, "run": RUN_WORKERS, "eval": 1, "trainer": 1, "policy": 1, "reaper": 1}
"""Each of these services is killed once at least; how many instances it has."""

LATE = ("trainer",)
"""These are killed when steps have been made."""

AGAIN = ("init", "run", "eval")
"""These may be killed again. Not the host: each of its deaths costs all its episodes an attempt."""

MORE = 3
"""Kills beyond those."""

WINDOW_S = 45.0
"""From the first task to the last kill."""

SLOW_TOKEN_S, FAST_TOKEN_S = 0.3, 0.01
"""Slowly enough that work is in flight at every kill, and as fast as it goes where nothing is killed."""

LIMIT_S = 240.0
"""Longest time from the first task to the end of a run."""

ALL = STEPS * GROUPS * SAMPLES
MOST_ATTEMPTS = 1 + max(len(delays) for delays in RETRIES.values())


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """What the log says about the run when nothing is killed."""
    system = System(tmp_path_factory.mktemp("calm"), token_s=FAST_TOKEN_S)
    return asyncio.run(system.train([], limit_s=LIMIT_S))


@pytest.mark.parametrize("seed", [*SEEDS, *filter(None, [os.environ.get("ROLLMILL_CHAOS_SEED")])])
async def test_whatever_is_killed_the_same_samples_are_trained_on(calm, tmp_path, seed):
    """INIT, RUN, EVAL, host, policy, trainer, reaper and broker die at seeded times.

    The same set of samples is trained on, each once and token by token the same; every sample has one outcome that
    counts; the books balance, and each step can be made again.
    """
    kills = draw(int(seed), KILLED, late=LATE, again=AGAIN, more=MORE, window_s=WINDOW_S)
    show(f"seed {seed}, logs in {tmp_path}", *kills)
    books = await System(tmp_path, token_s=SLOW_TOKEN_S, on_event=show).train(kills, limit_s=LIMIT_S)

    holds(books)
    assert calm.trained == books.trained
    assert calm.tokens == books.tokens
    assert await played(list(books.dispatched.values()), tmp_path / "model") == books.lengths()


def test_without_a_kill_the_run_trains_on_what_was_dispatched(calm):
    """What the runs with kills are compared with is sound itself."""
    holds(calm)


def holds(books: Books) -> None:
    """Check what no kill may break."""
    assert books.trained == dict.fromkeys(books.dispatched, 1)
    assert len(books.trained) == ALL
    assert [GROUPS * SAMPLES] * STEPS == [len(members) for members in books.steps]
    assert dict.fromkeys(books.dispatched, 1) == {key: len(found) for key, found in books.accepted.items()}
    assert max(one.task.attempt for found in books.accepted.values() for one in found) < MOST_ATTEMPTS
    assert [] == books.ledger.violations
    assert {"trained": ALL} == books.ledger.counts()
    assert books.replayed.all_equal
    assert len(books.replayed.steps) == STEPS
