"""Warm start: supervised training on demonstrations, before there is a reward to learn from.

Examples are token ids with a mask; the loss is the mean negative log-likelihood of the tokens with mask 1 over the
whole batch. AdamW with a linear rise and a cosine decay. Where examples come from, and what they mean, is the
caller's; the result is a model directory like the one it began with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from infra.errors import ConfigError
from trainer.batching import MicroBatch, TokenSequence, micro_batches
from trainer.config_types import Count, Frozen, NonNegative, Positive
from trainer.forward import sampled_logprobs
from trainer.weights import load_model, weight_bytes, weights_digest, write_model_directory


class SftConfig(Frozen):
    """How the warm start trains."""

    steps: Count = 300
    """Optimizer steps."""
    batch: Count = 8
    """Examples per step."""
    lr: Positive = 1.5e-3
    """Highest learning rate."""
    warmup: int = 20
    """Steps over which the rate rises."""
    final: NonNegative = 0.1
    """Share of the highest rate that is left at the end."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Momenta of AdamW."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    clip_norm: Positive = 1.0
    """Largest norm of the gradient."""
    micro_tokens: Count = 4096
    """Padded tokens of one forward pass."""
    threads: Count = 1
    """Torch threads."""
    device: str = "cpu"
    """Torch device."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A demonstration."""

    tokens: npt.ArrayLike
    """Ids, (T,)."""
    mask: npt.ArrayLike
    """1 where the token is to be learnt, (T,); the first token has nothing before it and cannot be."""


@dataclass(frozen=True, kw_only=True)
class SftProgress:
    """One step of the warm start."""

    step: int
    """Steps made."""
    steps: int
    """Steps to make."""
    loss: float
    """Mean negative log-likelihood of the step's tokens, nats."""


@dataclass(frozen=True, kw_only=True)
class SftResult:
    """What the warm start came to."""

    steps: int
    """Steps made."""
    tokens: int
    """Tokens learnt from."""
    first_loss: float
    """Loss of the first step."""
    last_loss: float
    """Mean loss of the last tenth of the steps."""
    digest: str
    """SHA-256 of the weight file."""


def warm_start(
    model: Path,
    target: Path,
    examples: Iterable[Example],
    config: SftConfig,
    on_step: Callable[[SftProgress], None] = lambda _: None,
) -> SftResult:
    """Train a model on demonstrations and write the result to a model directory.

    Args:
        model: the model directory to begin with.
        target: the model directory to write; must not exist.
        examples: at least `steps * batch` of them, in the order they are used; may be endless.
        config: how to train.
        on_step: told about each step.

    Raises:
        ConfigError: the target exists, or the examples ran out.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists: the warm start writes a new directory; remove it or name another")
    torch.set_num_threads(config.threads)
    network = load_model(model, config.device)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    source = iter(examples)
    losses: list[float] = []
    tokens = 0
    for step in range(config.steps):
        batch = _take(source, config.batch, step, config.steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        losses.append(_step(network, optimizer, batch, config))
        tokens += sum(len(sequence.positions) for sequence in batch)
        on_step(SftProgress(step=step + 1, steps=config.steps, loss=losses[-1]))
    weights = weight_bytes(network)
    write_model_directory(target, weights, model)
    tail = losses[-max(1, config.steps // 10) :]
    return SftResult(
        steps=config.steps,
        tokens=tokens,
        first_loss=losses[0],
        last_loss=float(np.mean(tail)),
        digest=weights_digest(weights),
    )


def learning_rate(step: int, config: SftConfig) -> float:
    """Return the rate of a step, counted from 0."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.final + (1 - config.final) * (1 + math.cos(math.pi * share)) / 2)


def _step(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[TokenSequence], config: SftConfig
) -> float:
    denominator = sum(len(sequence.positions) for sequence in batch)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for micro in micro_batches(batch, config.micro_tokens, device=config.device):
        loss = _loss(network, micro) / denominator
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip_norm)
    optimizer.step()
    return total


def _loss(network: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
    logprobs, _ = sampled_logprobs(network, micro)
    return -logprobs.sum()


def _take(source: Iterator[Example], count: int, step: int, steps: int) -> list[TokenSequence]:
    batch = [sequence for example in islice(source, count) if (sequence := _sequence(example)) is not None]
    if not batch:
        raise ConfigError(f"the demonstrations ran out at step {step} of {steps}: give more, or fewer steps")
    return batch


def _sequence(example: Example) -> TokenSequence | None:
    tokens = np.asarray(example.tokens, dtype=np.int64)
    positions = np.flatnonzero(np.asarray(example.mask)[1:]).astype(np.int64) + 1
    if not len(positions):
        return None
    ones = np.ones(len(positions), dtype=np.float32)
    return TokenSequence(
        tokens=tokens[: int(positions[-1]) + 1],
        positions=positions,
        rollout=np.zeros_like(ones),
        temperature=ones,
        lag=np.zeros(len(positions), dtype=np.int64),
        trained=ones,
        advantage=0.0,
    )
