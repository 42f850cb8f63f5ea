"""An evaluator that plays nothing: its figures are what a test says, and it may be held, or die."""

from __future__ import annotations

import asyncio

from schemas.scores import Purpose
from trainer.evaluation import Played, scores

SUITE = {"every": 2, "tasks": {"family": "made-up", "count": 40}}
"""An `[evaluation]` for it: every second step."""


class MadeUpSuite:
    """Forty tasks, of which as many succeed as a test says for each step (`trainer.evaluation.Evaluator`)."""

    def __init__(self, successes=lambda step, version: 20, *, turns=10, valid=10, gate=20, missing=0):
        """Say what is found: successes by step and version, turns, allowed ones, mixed groups at the gate."""
        self.asked = []
        self.hold: dict[int, asyncio.Event] = {}
        """Step -> what its evaluation waits for."""
        self.dies_at: BaseException | None = None
        """What the next evaluation raises."""
        self._successes, self._turns, self._valid = successes, turns, valid
        self._gate, self._missing = gate, missing

    async def evaluate(self, version, step, purpose):
        """Return the figures of forty tasks."""
        self.asked.append((purpose, step, version))
        if step in self.hold and purpose is Purpose.EVALUATION:
            await self.hold[step].wait()
        if self.dies_at is not None:
            error, self.dies_at = self.dies_at, None
            raise error
        gate = purpose is Purpose.GATE
        count = self._gate if gate else self._successes(step, version)
        tasks = [f"t{n}" for n in range(40 - self._missing)]
        # At the gate each task has two samples, of which one fails.
        played = [self._played(task, float(n < count)) for n, task in enumerate(tasks)]
        played += [self._played(task, 0.0) for task in tasks if gate]
        played += [Played(task=f"missing {n}") for n in range(self._missing)]
        return scores(f"r.{purpose.value}.{step}.v{version}", played)

    def _played(self, task, success):
        return Played(task=task, success=success, turns=self._turns, valid=self._valid)
