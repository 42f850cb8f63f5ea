"""The value head of PPO: what a state is worth, read off the policy's last hidden state by one linear layer.

    loss = sum(share * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2) / N        (Schulman et al. 2017)

N is the number of trained values of the whole mini-batch: turns, or tokens, as `gae.py` says. The gradient reaches the
policy's layers, as in the paper's shared network; `value_coefficient` weighs it. The head begins at zero, so that the
first step's advantages are plain returns. It is part of the checkpoint and of nothing else: a published model is a
policy. This file does not know how advantages are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.algorithm_config import AlgorithmConfig
from trainer.batching import MicroBatch, TokenSequence
from trainer.forward import SampledTokens
from trainer.gae import Episode, GaeRules, token_credit
from trainer.ranks import ALONE, Ranks

Tensor = torch.Tensor


class ValueHead(torch.nn.Module):
    """Hidden states -> values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Nothing is drawn for what begins at zero: a checkpoint must not tell how many learners its process has made.
        self.linear = torch.nn.Linear(width, 1, device="meta").to_empty(device="cpu")
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the value of each state, (N, H) -> (N,)."""
        values: Tensor = self.linear(states)
        return values.squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a value head made of a step at its start; the lists have one entry per sequence."""

    sequences: list[TokenSequence]
    """The sequences with their advantages."""
    old: list[Tensor]
    """Value before each sampled token, (P,)."""
    returns: list[Tensor]
    """What it is trained towards, (P,)."""
    share: list[Tensor]
    """1.0 where it is trained, else 0.0, (P,)."""

    @property
    def explained(self) -> float:
        """Share of the variance of returns that the values explain; 0 without variance."""
        if not self.old:
            return 0.0
        chosen = torch.cat(self.share) > 0
        returns = torch.cat(self.returns)[chosen]
        spread = float(returns.var(correction=0)) if len(returns) else 0.0
        return 1 - float((returns - torch.cat(self.old)[chosen]).var(correction=0)) / spread if spread else 0.0


class Critic:
    """A value head at work: it looks at all sequences of a step, judges them, and is trained beside the policy."""

    def __init__(self, width: int, config: AlgorithmConfig, device: str | torch.device, ranks: Ranks = ALONE) -> None:
        self.head = ValueHead(width).to(device)
        ranks.shard(self.head)
        self._ranks = ranks
        self._rules = GaeRules.of(config)
        self._clip = config.value_clip
        self._values: dict[int, Tensor] = {}
        self._ends: dict[int, Tensor] = {}

    @classmethod
    def of(cls, model: torch.nn.Module, config: AlgorithmConfig, ranks: Ranks = ALONE) -> Critic:
        """Return a critic for the hidden states of a model."""
        weight = model.get_output_embeddings().weight  # type: ignore[operator]
        return cls(int(weight.shape[1]), config, weight.device, ranks)

    def look(self, found: SampledTokens, micro: MicroBatch) -> None:
        """Keep the values of some sequences until the step is judged."""
        with torch.no_grad():
            values = self.head(_asked_for(found.before))
            ends = self.head(_asked_for(found.ends))
        self._values |= micro.by_member(values)
        self._ends |= dict(zip(micro.members, ends, strict=True))

    def judge(self, flat: Sequence[TokenSequence], episodes: Sequence[Episode]) -> Judgement:
        """Return what the values that were seen make of a step, and forget them.

        Args:
            flat: all sequences of the step.
            episodes: which of them belong together, and what they earned.
        """
        seen, ends = self._ranks.merge(self._values), self._ranks.merge(self._ends)
        self._values, self._ends = {}, {}
        judged, old = list(flat), [seen[i] for i in range(len(flat))]
        returns, share = ([torch.zeros_like(values) for values in old] for _ in range(2))
        for episode in episodes:
            own = episode.sequences
            turns = np.concatenate([flat[i].turns for i in own])
            values = torch.cat([old[i] for i in own]).cpu().numpy()
            found = token_credit(episode, turns, values, float(ends[own[-1]]), self._rules)
            cuts = np.cumsum([len(old[i]) for i in own])[:-1]
            pieces = (np.split(piece, cuts) for piece in (found.advantages, found.returns, found.valued))
            for i, advantage, target, valued in zip(own, *pieces, strict=True):
                judged[i] = replace(flat[i], advantage=advantage)
                returns[i] = torch.from_numpy(target).to(old[i])
                share[i] = torch.from_numpy(valued * flat[i].trained).to(old[i])
        return Judgement(sequences=judged, old=old, returns=returns, share=share)

    def state(self) -> dict[str, Tensor]:
        """Return the head, whole; all ranks have to ask."""
        return {name: self._ranks.whole(tensor) for name, tensor in self.head.state_dict().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned in place."""
        for name, tensor in self.head.state_dict().items():
            tensor.copy_(self._ranks.part(state[name], tensor))

    def loss(self, found: SampledTokens, micro: MicroBatch, judgement: Judgement, chosen: Sequence[int]) -> Tensor:
        """Return the loss of some sequences of a mini-batch.

        Args:
            found: what the model says about them.
            micro: which they are.
            judgement: of the step.
            chosen: all sequences of the mini-batch.
        """
        old, returns, share = (
            torch.cat([part[i] for i in micro.members]) for part in (judgement.old, judgement.returns, judgement.share)
        )
        error = clipped_error(self.head(_asked_for(found.before)), old, returns, self._clip)
        count = sum(float(judgement.share[i].sum()) for i in chosen)
        return (share * error).sum() / max(count, 1.0)


def clipped_error(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return half the squared error, of the value or of the value within `clip` of the old one, whichever is larger."""
    error = (values - returns).square()
    if clip:
        within = torch.maximum(torch.minimum(values, old + clip), old - clip)
        error = torch.maximum(error, (within - returns).square())
    return error / 2


def _asked_for(states: Tensor | None) -> Tensor:
    if states is None:
        raise ValueError("a value head needs hidden states: call `sampled_tokens` with `states`")
    return states
