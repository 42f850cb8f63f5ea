"""What a step has to do, and how fast a GPU does it: tokens, operations, seconds.

Formulas alone, each with where it comes from; which model and which run is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainer.algorithm_config import AlgorithmConfig, Filter
from trainer.model_shape import ModelShape
from trainer.plan_config import PlanConfig

PEAK_TFLOPS = {"bfloat16": 989.0, "float32": 67.0}
"""Of an H100 (SXM), by its data sheet, without sparsity."""


class Limits(NamedTuple):
    """What `[tasks]` says of a policy's tokens."""

    turn: int
    """Most sampled tokens of a turn."""
    episode: int
    """Most sampled tokens of an episode."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One episode, in tokens."""

    turns: float
    """Turns."""
    sampled: float
    """Sampled by the policy."""
    read: float
    """Prompt and observations."""

    @property
    def all(self) -> float:
        """All of them: the length of the sequence."""
        return self.sampled + self.read


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one trainer step."""

    engine: float
    """The engines' work for the episodes that the step needs."""
    episodes: float
    """The least in which those episodes can be played, with as many at once as credit allows and engines idle."""
    optimizer: float
    """The trainer's forward and backward passes."""
    writing: float
    """Weights and checkpoint to the disk."""
    overlap: bool
    """Sampling goes on during training."""

    @property
    def sampling(self) -> float:
        """Until the episodes are there."""
        return max(self.engine, self.episodes)

    @property
    def training(self) -> float:
        """Until their weights are announced."""
        return self.optimizer + self.writing

    @property
    def whole(self) -> float:
        """From step to step."""
        return max(self.sampling, self.training) if self.overlap else self.sampling + self.training

    @property
    def bottleneck(self) -> Literal["engine", "environment", "trainer"]:
        """What the step waits for most."""
        if self.training > self.sampling:
            return "trainer"
        return "engine" if self.engine >= self.episodes else "environment"


def episode_tokens(plan: PlanConfig, limits: Limits, horizon: int, *, longest: bool = False) -> Tokens:
    """Return a mean episode, or the longest that is allowed.

    A turn is `turn_tokens` sampled and one observation. An episode ends with its horizon or with
    `tasks.max_sampled_tokens`, whichever is first (`stages/run/episode.py`).
    """
    wanted = horizon if longest or plan.turns is None else min(plan.turns, horizon)
    turns = min(wanted, limits.episode / plan.turn_tokens)
    return Tokens(
        turns=turns,
        sampled=turns * plan.turn_tokens,
        read=plan.prompt_tokens + turns * plan.observation_tokens,
    )


def episodes_of_step(algorithm: AlgorithmConfig, plan: PlanConfig) -> float:
    """Return the episodes that one step needs: its own, and those of the groups that are dropped for it.

    Dynamic sampling (Yu et al. 2025, DAPO) replaces a group without variance, so kept / sampled = `kept_share`.
    """
    kept = 1.0 if algorithm.filter is Filter.OFF else plan.kept_share
    return algorithm.groups * algorithm.samples / kept


def in_flight(algorithm: AlgorithmConfig) -> int:
    """Return the episodes that may be on their way: (max_lag + 1) batches (`trainer/credit.py`)."""
    return (algorithm.max_lag + 1) * algorithm.groups * algorithm.samples


def forward_flops(shape: ModelShape, length: float) -> float:
    """Return the operations of a forward pass per token of a sequence.

    2 N for the matrices (Kaplan et al. 2020: forward and backward are 6 N, the backward pass twice the forward one) and
    4 L H Q T for the attention over T tokens (Chowdhery et al. 2022, PaLM, appendix B: 12 L H Q T for both passes).
    """
    return 2 * shape.count + 4 * shape.layers * shape.query_width * length


def step_flops(shape: ModelShape, algorithm: AlgorithmConfig, tokens: float, length: float) -> float:
    """Return the operations of one trainer step over so many tokens.

    One forward pass for pi_old, one for the reference if there is a KL term; then each epoch is forward and backward (3
    forward passes), and one more where activations are computed again (`trainer/learner.py`).
    """
    once = 1 + bool(algorithm.kl)
    epoch = 3 + algorithm.activation_checkpointing
    return tokens * forward_flops(shape, length) * (once + algorithm.epochs * epoch)


def decode_rate(plan: PlanConfig, reads: float, flops: float, sequences: float) -> float:
    """Return the tokens per second that one copy samples with so many sequences at once.

    Each step of the engine gives one token to every sequence and reads the weights and every sequence's cache (Pope et
    al. 2022, section 2: decoding is bound by memory); with very many sequences the operations bound it.

    Args:
        plan: bandwidth, peak and what of them is reached.
        reads: bytes that such a step reads.
        flops: operations per token.
        sequences: sampled at once.
    """
    reach = plan.engine_efficiency * plan.engine_parallel
    by_memory = sequences * plan.gpu_bandwidth_gb_s * 1e9 * reach / reads
    return min(by_memory, engine_peak(plan) / flops)


def engine_peak(plan: PlanConfig) -> float:
    """Return the operations per second that one copy reaches."""
    tflops = plan.gpu_tflops or PEAK_TFLOPS["float32" if plan.engine_bytes == 4 else "bfloat16"]
    return tflops * 1e12 * plan.engine_efficiency * plan.engine_parallel
