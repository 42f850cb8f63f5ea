"""A trainer step on heavy-tailed lengths: tokens per second of the learner, and of one padded batch per mini-batch.

Both sides train the same tiny model (the shape of the demo's) on the same groups by the same rules: log-probs at step
start, then every mini-batch of every epoch forward, backward and AdamW. Lengths are lognormal and seeded; most of a
sequence is observation. `ours` is the product's `Learner` with its default of padded tokens per pass. The rival does
what the GRPO trainer of TRL documents (`GRPOTrainer._get_per_token_logps`, 2025): a mini-batch is one batch, padded to
its longest sequence, and logits are made for all of its positions.

Weights are put back before each round, and the losses of the two sides must agree to 1e-5: they do the same work.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.result import Result
from benchmarks.rounds import interleaved
from trainer.algorithm_config import AlgorithmConfig
from trainer.batching import MicroBatch, TokenSequence, micro_batches
from trainer.importance import ImportanceRule, importance_weights
from trainer.learner import Learner
from trainer.loss import LossRules, TokenBatch, policy_loss
from trainer.models import create_wordlevel_model
from trainer.step_batch import StepBatch

SEED = 20_250_401
"""Of the lengths and the tokens."""

WORDS = 137
"""Words of the vocabulary: with the special tokens it is the demo's 144."""

MEDIAN_TOKENS = 90
"""Median length of a sequence."""

SIGMA = 0.9
"""Of the logarithm of a length: the longest of 64 is about eight times the median."""

LONGEST = 1000
"""Lengths are cut here, which is what the model's context holds."""

SAMPLED = 0.3
"""Share of the tokens that the policy sampled."""

LOSS_TOLERANCE = 1e-5
"""The two sides' mean losses differ by no more."""

ALGORITHM = AlgorithmConfig(groups=8, samples=8, epochs=1, minibatches=2)
"""The product's defaults, but for one epoch: a second one does the same again."""


@dataclass
class Work:
    """The step, a learner for each side, and what they found."""

    batch: StepBatch
    sides: dict[str, Learner]
    start: bytes
    directory: Path
    losses: dict[str, list[float]] = field(default_factory=dict)

    @property
    def flat(self) -> list[TokenSequence]:
        """All sequences."""
        return [sequence for group in self.batch.groups for sequence in group]

    @property
    def tokens(self) -> int:
        """Real tokens of the batch, whether sampled or not."""
        return sum(map(len, self.flat))

    async def measured(self, side: str, _: int = 0) -> float:
        """Return the tokens per second of one step of a side, from the same weights."""
        learner = self.sides[side]
        learner.restore(self.directory / "model.safetensors", self.start)
        began = time.perf_counter()
        loss = learner.step(self.batch).loss if side == "ours" else padded_step(learner, self.batch)
        took_s = time.perf_counter() - began
        self.losses.setdefault(side, []).append(loss)
        return self.tokens / took_s


def padded_step(learner: Learner, batch: StepBatch) -> float:
    """Make the rival's step on a learner's model and optimizer; return the mean loss of the mini-batches."""
    flat = [sequence for group in batch.groups for sequence in group]
    parts = learner.minibatches(batch, 0)
    passes = [_padded(flat, chosen) for chosen in parts]
    with torch.no_grad():
        old = [_all_logprobs(learner.model, one) for one in passes]
    losses = []
    for one, before in zip(passes, old, strict=True):
        learner.optimizer.zero_grad(set_to_none=True)
        tokens = TokenBatch(
            logprobs=_all_logprobs(learner.model, one),
            old=before,
            advantages=one.advantages,
            weight=importance_weights(before, one.rollout, one.trained, ImportanceRule.of(ALGORITHM)),
            share=one.trained,
        )
        parts_of_loss = policy_loss(tokens, LossRules(), float(one.trained.sum()))
        parts_of_loss.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learner.model.parameters(), ALGORITHM.clip_norm)
        learner.optimizer.step()
        losses.append(float(parts_of_loss.loss.detach()))
    return float(np.mean(losses))


def _padded(flat: Sequence[TokenSequence], chosen: Sequence[int]) -> MicroBatch:
    (whole,) = micro_batches(flat, len(chosen) * LONGEST, chosen)
    return whole


def _all_logprobs(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return the log-probs of the sampled tokens, made from those of all positions."""
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1].float()
    logits = logits / float(batch.temperature[0])
    picked = torch.gather(logits, -1, batch.ids[:, 1:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    return picked[batch.rows, batch.columns]


def made_batch(groups: int, siblings: int) -> StepBatch:
    """Return groups of sequences with heavy-tailed lengths."""
    draw = np.random.default_rng(SEED)
    return StepBatch(step=1, groups=tuple(tuple(made_sequence(draw) for _ in range(siblings)) for _ in range(groups)))


def made_sequence(draw: np.random.Generator) -> TokenSequence:
    """Return a sequence of random tokens."""
    length = int(np.clip(MEDIAN_TOKENS * draw.lognormal(0, SIGMA), 8, LONGEST))
    positions = np.flatnonzero(draw.random(length - 1) < SAMPLED).astype(np.int64) + 1
    positions = positions if len(positions) else np.array([1])
    count = len(positions)
    return TokenSequence(
        tokens=draw.integers(0, WORDS, length),
        positions=positions,
        rollout=draw.normal(-5.0, 0.1, count).astype(np.float32),
        temperature=np.ones(count, dtype=np.float32),
        lag=np.zeros(count, dtype=np.int64),
        trained=np.ones(count, dtype=np.float32),
        advantage=float(draw.normal()),
    )


def measure(*, quick: bool) -> Result:
    """Measure a step."""
    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        return asyncio.run(_measure(Path(folder), rounds=3 if quick else 9))


async def _measure(folder: Path, *, rounds: int) -> Result:
    work = prepared(folder, made_batch(ALGORITHM.groups, ALGORITHM.samples))
    for side in work.sides:
        await work.measured(side)
    figures = await interleaved({side: partial(work.measured, side) for side in work.sides}, rounds=rounds)
    apart = max(abs(a - b) for a, b in zip(work.losses["ours"], work.losses["rival"], strict=True))
    assert apart <= LOSS_TOLERANCE, f"the losses of the two sides are {apart} apart: they do not do the same work"
    ours, rival = figures["ours"], figures["rival"]
    lengths = sorted(map(len, work.flat))
    return Result(
        name="step",
        ours=ours.median,
        rival=rival.median,
        unit="tokens/s",
        ratio=ours.median / rival.median,
        detail={
            "spread": {"ours": ours.spread(), "rival": rival.spread()},
            "loss_difference": apart,
            "tokens": work.tokens,
            "lengths": {"median": lengths[len(lengths) // 2], "longest": lengths[-1], "sequences": len(lengths)},
            "threads": 1,
        },
    )


def prepared(folder: Path, batch: StepBatch) -> Work:
    """Return the work with a learner for each side, and where they begin."""
    create_wordlevel_model(folder / "model", seed=0, words=[f"w{i}" for i in range(WORDS)])
    sides = {side: Learner(folder / "model", ALGORITHM, seed=0, threads=1, device="cpu") for side in ("ours", "rival")}
    (folder / "model.safetensors").write_bytes(sides["ours"].weights())
    return Work(batch=batch, sides=sides, start=sides["ours"].optimizer_bytes(), directory=folder)
