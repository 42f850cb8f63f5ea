import asyncio
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_run import RUN, memory_bus, run_config, small_model

from infra.clock import SystemClock
from infra.control import ControlView
from infra.wire import Publisher
from schemas.control import Credit, PolicyVersion
from schemas.messages import Task, Trajectory
from schemas.outcome import Completed
from schemas.topics import TRAJECTORIES
from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, pack_logprobs, pack_tokens
from trainer import loop
from trainer.weights import load_model

PROMPT, WANTED, SIBLINGS = 7, 8, 8


def answer(task, token, logprob, version):
    """Return the graded trajectory of a one-token answer: right if it is the wanted token."""
    span = SampledSpan(
        start=1, stop=2, version=version, sampling=Sampling(), dtype="float32", logprobs_mode="processed_logprobs"
    )
    turn = Turn(
        start=0,
        sampled=1,
        stop=2,
        valid=True,
        action="",
        finish="stop",
        began_ms=0,
        generated_ms=0,
        ended_ms=0,
    )
    record = Transcript(
        tokens=pack_tokens([PROMPT, token]),
        mask=bytes([0, 1]),
        logprobs=pack_logprobs([0.0, logprob]),
        spans=(span,),
        turns=(turn,),
    )
    right = float(token == WANTED)
    outcome = Completed(components={"right": right}, reward=right, success=right, truncated=False)
    return Trajectory(task=task, outcome=outcome, transcript=record, verdict={}, stage="eval")


class Policy:
    """Samples one-token answers from the weights that were announced last, as far as the credit goes."""

    def __init__(self, bus):
        self._publisher = Publisher(bus, SystemClock(), "test")
        self._control = ControlView(bus, SystemClock())
        self._draw = np.random.default_rng(0)
        self._loaded = -1
        self._admitted = 0

    async def run(self):
        await self._control.start()
        following = asyncio.create_task(self._control.follow())
        try:
            while not await self._sample():
                await self._control.changed(0.2)
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await self._control.close()

    async def _sample(self):
        credit = self._control.get(f"credit/{RUN}", Credit)
        version = self._control.get(f"policy/{RUN}", PolicyVersion)
        if credit is None or version is None or credit.closed:
            return credit is not None and credit.closed
        if version.version != self._loaded:
            with torch.no_grad():
                logits = load_model(Path(version.directory))(input_ids=torch.tensor([[PROMPT]])).logits[0, -1]
            self._logprobs, self._loaded = torch.log_softmax(logits.double(), -1).numpy(), version.version
        while self._admitted < credit.admit_up_to:
            await self._admit(self._admitted)
            self._admitted += 1
        return False

    async def _admit(self, number):
        for sample in range(SIBLINGS):
            task = Task(
                run=RUN,
                group=f"g{number}",
                sample=sample,
                samples=SIBLINGS,
                source="bandit",
                row=number,
                payload={},
                payload_digest="d",
                family="bandit",
                seed=number,
                admission=number,
                start_by_ms=0,
            )
            token = int(self._draw.choice(len(self._logprobs), p=np.exp(self._logprobs)))
            await self._publisher.publish(TRAJECTORIES, answer(task, token, float(self._logprobs[token]), self._loaded))


@pytest.mark.parametrize("changes", [{}, {"estimator": "rloo"}, {"std": False}, {"old": "rollout"}], ids=str)
async def test_a_policy_learns_what_is_rewarded(tmp_path, changes):
    """From one in twenty to nearly always, with sampling one step ahead of training, in a dozen steps."""
    small_model(tmp_path / "model")
    bus = await memory_bus()
    config = run_config(
        tmp_path,
        tmp_path / "model",
        algorithm={
            "samples": SIBLINGS,
            "groups": 4,
            "max_lag": 1,
            "lr": 2e-2,
            "epochs": 2,
            "minibatches": 2,
            "min_siblings": None,
            **changes,
        },
        stop={"max_steps": 40, "success": 0.9, "success_groups": 16},
    )

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        group.create_task(Policy(bus).run())
        result = await loop.run(config, bus, SystemClock())

    assert result.reason.startswith("success"), result.progress
    assert result.progress.last.mismatch < 1e-4
