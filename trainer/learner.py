"""One trainer step on the model: what it says at step start, then epochs of mini-batches with AdamW.

At step start are made the old log-probs, and where advantages need the model its values and the advantages.

Deterministic on the CPU for one number of threads: the mini-batches of an epoch follow from (seed, step, epoch), not
from a running random state, so a step gives the same weights whether or not the process was restarted before it. The
denominator of the loss is the number of trained tokens of the whole mini-batch, over all passes and all ranks. Blocking
and heavy: the loop runs it in a thread of its own. It does not know the log, checkpoints or versions, nor who else is
at work: `ranks.py` says which passes are its own, and merges and sums what all have found.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.errors import ConfigError, RollmillError
from infra.inference.canary import canary_of, canary_prompt
from schemas.control import Canary
from trainer.adapters import AdaptedPolicy
from trainer.algorithm_config import AlgorithmConfig, LossLevel
from trainer.batching import MicroBatch, TokenSequence, micro_batches
from trainer.forward import SampledTokens, require_apart
from trainer.importance import ImportanceRule, importance_weights
from trainer.loss import LossRules, TokenBatch, policy_loss
from trainer.optimizer_state import put_state, whole_state
from trainer.policy import Policy
from trainer.ranks import ALONE, Ranks
from trainer.step_batch import StepBatch
from trainer.step_metrics import StepMetrics, StepSums, TokenFigures
from trainer.value import Critic, Judgement


class Diverged(RollmillError):
    """A gradient is not finite."""


class Interrupted(Exception):
    """A step was given up half-way; the model is no longer that of any step."""


@dataclass(frozen=True, kw_only=True)
class _AtStart:
    """Per sequence: log-probs under the weights at step start and under the reference, and what follows from them."""

    sequences: list[TokenSequence]
    """What is trained on, with its advantages."""
    now: list[torch.Tensor]
    """Under the weights at step start."""
    old: list[torch.Tensor]
    """The denominator of the ratio: the same, or what the engine reported."""
    weight: list[torch.Tensor]
    reference: list[torch.Tensor] | None
    entropy: float
    """Nats per sampled token."""
    judgement: Judgement | None
    """What the value head said, where there is one."""


class Learner:
    """Model and optimizer."""

    def __init__(
        self,
        directory: Path,
        config: AlgorithmConfig,
        *,
        seed: int,
        threads: int,
        device: str,
        ranks: Ranks = ALONE,
    ) -> None:
        """Load the model a run begins with.

        Args:
            directory: the model directory.
            config: how to train.
            seed: decides the mini-batches.
            threads: torch threads; changing them changes float sums.
            device: torch device.
            ranks: among which passes and weights are shared out.
        """
        torch.set_num_threads(threads)
        self._config = config
        self._seed = seed
        self._device = device
        self._importance = ImportanceRule.of(config)
        self._ranks = ranks
        self.policy = _policy(directory, config, seed, device, ranks)
        if config.batching == "packing":
            require_apart(self.policy.model, self.policy.vocabulary, device)
        self._critic = Critic.of(self.policy.model, config, ranks) if config.estimator.needs_model else None
        self.optimizer = torch.optim.AdamW(
            self._parameter_groups(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.optimizer_steps = 0
        self.lr_scale = 1.0
        """Factor on the learning rate."""

    @property
    def model(self) -> torch.nn.Module:
        """The policy's model, with its adapters where it has any."""
        return self.policy.model

    @property
    def vocabulary(self) -> int:
        """Number of ids the model knows."""
        return self.policy.vocabulary

    def step(self, batch: StepBatch, cancelled: Callable[[], bool] = lambda: False) -> StepMetrics:
        """Train on one batch and return what it was like.

        Args:
            batch: the step's groups.
            cancelled: asked between passes.

        Raises:
            Interrupted: `cancelled` said so; this learner must not be used again.
            Diverged: a gradient is not finite; nothing was moved by it.
        """
        sums = StepSums()
        start = self._at_start(batch, cancelled)
        rules = self._loss_rules(start.entropy)
        for epoch in range(self._config.epochs):
            for chosen in self.minibatches(batch, epoch):
                self._optimizer_step(chosen, start, rules, sums, cancelled)
        self._reset_reference(batch.step)
        sums.over(self._ranks)
        return self._metrics(start, rules, sums)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Return what is trained: the policy, and apart from it the value head."""
        groups: list[dict[str, Any]] = [{"params": self.policy.trained()}]
        if self._critic is not None:
            groups.append({"params": list(self._critic.head.parameters())})
        return groups

    def _loss_rules(self, entropy: float) -> LossRules:
        """Return the coefficients of a step that begins at an entropy, nats per sampled token."""
        config, floor = self._config, self._config.entropy_floor
        below = max(0.0, 1 - entropy / floor) if floor is not None else 0.0
        return LossRules(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            kl=config.kl,
            kl_kind=config.kl_kind,
            entropy=config.entropy_weight * below,
        )

    def minibatches(self, batch: StepBatch, epoch: int) -> list[list[int]]:
        """Return the sequence indices of each mini-batch: whole groups, shuffled by (seed, step, epoch)."""
        order = np.random.default_rng([abs(self._seed), batch.step, epoch]).permutation(len(batch.groups))
        ends = np.cumsum([len(group) for group in batch.groups])
        spans = [range(int(end) - len(group), int(end)) for group, end in zip(batch.groups, ends, strict=True)]
        parts = np.array_split(order, min(self._config.minibatches, len(batch.groups)))
        return [[i for g in sorted(part.tolist()) for i in spans[g]] for part in parts]

    def _at_start(self, batch: StepBatch, cancelled: Callable[[], bool]) -> _AtStart:
        flat = [sequence for group in batch.groups for sequence in group]
        now: dict[int, torch.Tensor] = {}
        reference: dict[int, torch.Tensor] = {}
        entropy = 0.0
        with torch.no_grad():
            for micro, counts in self._passes(flat, range(len(flat))):
                _check(cancelled)
                found = self.policy.look(micro, states=self._critic is not None)
                entropy += float(found.entropy.sum()) if counts else 0.0
                now |= micro.by_member(found.logprobs)
                if self._critic is not None:
                    self._critic.look(found, micro)
                other = self.policy.reference_logprobs(micro)
                if other is not None:
                    reference |= micro.by_member(other)
        (entropy,) = self._ranks.sum([entropy])
        now, reference = self._ranks.merge(now), self._ranks.merge(reference)
        at_start = [now[i] for i in range(len(flat))]
        old = at_start
        if self._config.old == "rollout":
            old = [torch.from_numpy(s.rollout).to(a.device) for s, a in zip(flat, at_start, strict=True)]
        tokens = sum(len(sequence.positions) for sequence in flat)
        judgement = self._critic.judge(flat, batch.episodes) if self._critic is not None else None
        return _AtStart(
            sequences=flat if judgement is None else judgement.sequences,
            now=at_start,
            old=old,
            weight=[self._weights(sequence, old[i]) for i, sequence in enumerate(flat)],
            reference=[reference[i] for i in range(len(flat))] if reference else None,
            entropy=entropy / tokens if tokens else 0.0,
            judgement=judgement,
        )

    def _passes(self, sequences: Sequence[TokenSequence], chosen: Iterable[int]) -> list[tuple[MicroBatch, bool]]:
        """Return this rank's passes over some sequences, and whether each counts."""
        packed = self._config.batching == "packing"
        passes = micro_batches(sequences, self._config.micro_tokens, chosen, packed=packed, device=self._device)
        return self._ranks.share(passes)

    def _weights(self, sequence: TokenSequence, old: torch.Tensor) -> torch.Tensor:
        rollout, trained = (torch.from_numpy(a).to(old.device) for a in (sequence.rollout, sequence.trained))
        return importance_weights(old, rollout, trained, self._importance)

    def _optimizer_step(
        self,
        chosen: Sequence[int],
        start: _AtStart,
        rules: LossRules,
        sums: StepSums,
        cancelled: Callable[[], bool],
    ) -> None:
        denominator = self._denominator([start.sequences[i] for i in chosen])
        if not denominator:
            return
        self.optimizer.zero_grad(set_to_none=True)
        loss = value_loss = 0.0
        for micro, counts in self._passes(start.sequences, chosen):
            _check(cancelled)
            found = self.policy.look(micro, entropy_gradient=rules.entropy > 0, states=self._critic is not None)
            parts = policy_loss(self._tokens(found, micro, start, rules), rules, denominator)
            total = parts.loss
            if self._critic is not None and start.judgement is not None:
                value = self._critic.loss(found, micro, start.judgement, chosen)
                total = total + self._config.value_coefficient * value
                value_loss += counts * float(value.detach())
            (counts * total).backward()  # type: ignore[no-untyped-call]
            if counts:
                loss += float(parts.loss.detach())
                sums.add(parts)
        self._move(sums)
        sums.losses.append(loss)
        sums.value_losses.append(value_loss)

    def _move(self, sums: StepSums) -> None:
        """Let the optimizer make its step."""
        groups = self.optimizer.param_groups
        norm = float(torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], self._config.clip_norm))
        if not math.isfinite(norm):
            raise Diverged(
                f"optimizer step {self.optimizer_steps + 1} has a gradient of norm {norm}: nothing is moved, and the "
                "last checkpoint is sound. Go on from it with --resume and a smaller algorithm.lr, or with "
                "algorithm.precision = 'float32'; --rollback STEP leaves out the samples of later steps"
            )
        sums.learning_rate = self.learning_rate()
        for group in groups:
            group["lr"] = sums.learning_rate
        if self._critic is not None and self._config.value_lr is not None:
            groups[-1]["lr"] = sums.learning_rate * self._config.value_lr / self._config.lr
        self.optimizer.step()
        self.optimizer_steps += 1
        sums.norms.append(norm)

    def _denominator(self, sequences: Sequence[TokenSequence]) -> float:
        """Return what the shares of a mini-batch's trained tokens sum to."""
        if self._config.level is LossLevel.SAMPLE:
            return sum(sequence.share for sequence in sequences if sequence.trained_count)
        return sum(sequence.trained_count for sequence in sequences)

    def _tokens(self, found: SampledTokens, micro: MicroBatch, start: _AtStart, rules: LossRules) -> TokenBatch:
        reference = torch.cat([start.reference[i] for i in micro.members]) if start.reference else None
        return TokenBatch(
            logprobs=found.logprobs,
            old=torch.cat([start.old[i] for i in micro.members]),
            advantages=micro.advantages,
            weight=torch.cat([start.weight[i] for i in micro.members]),
            share=micro.equal if self._config.level is LossLevel.SAMPLE else micro.trained,
            reference=reference,
            entropy=found.entropy if rules.entropy else None,
        )

    def learning_rate(self) -> float:
        """Return the rate of the next optimizer step: a linear rise, then constant or a cosine down to the floor."""
        config, step = self._config, self.optimizer_steps
        lr = config.lr * self.lr_scale
        if step < config.warmup:
            return lr * (step + 1) / config.warmup
        if config.decay is None:
            return lr
        done = min(1.0, (step - config.warmup) / config.decay)
        return lr * (config.lr_floor + (1 - config.lr_floor) * (1 + math.cos(math.pi * done)) / 2)

    def _reset_reference(self, step: int) -> None:
        """Let the policy be the reference from now on, if this step is one of those that do so."""
        every = self._config.ref_reset
        if every is None or step % every:
            return
        self.policy.move_reference()
        self.optimizer.state.clear()

    def _metrics(self, start: _AtStart, rules: LossRules, sums: StepSums) -> StepMetrics:
        tokens = TokenFigures.of(start.sequences, start.now)
        return StepMetrics(
            loss=float(np.mean(sums.losses)) if sums.losses else 0.0,
            grad_norm=float(np.mean(sums.norms)) if sums.norms else 0.0,
            entropy=start.entropy,
            clip_share=sums.per_token(sums.clipped),
            kl=sums.per_token(sums.kl),
            weight=sums.per_token(sums.weight),
            distrusted_share=sums.per_token(sums.distrusted),
            learning_rate=sums.learning_rate,
            entropy_weight=rules.entropy,
            mismatch=tokens.mismatch,
            lag_mean=tokens.lag_mean,
            lag_max=tokens.lag_max,
            tokens=tokens.count,
            masked_share=tokens.masked_share,
            value_loss=float(np.mean(sums.value_losses)) if sums.value_losses else 0.0,
            value_explained=start.judgement.explained if start.judgement else 0.0,
            optimizer_steps=self.optimizer_steps,
        )

    def canary(self) -> Canary:
        """Return what an engine that has the weights as they are now must say to a fixed prompt."""
        prompt = canary_prompt(self.vocabulary, self.policy.context)
        count = len(prompt) - 1
        asked = TokenSequence(
            tokens=prompt.astype(np.int64),
            positions=np.arange(1, count + 1),
            rollout=np.zeros(count, np.float32),
            temperature=np.ones(count, np.float32),
            lag=np.zeros(count, np.int64),
            trained=np.ones(count, np.float32),
            advantage=0.0,
        )
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for micro, _ in self._passes([asked], [0]):
                found |= micro.by_member(self.policy.look(micro).logprobs)
        return canary_of(prompt, self._ranks.merge(found)[0].cpu().numpy())

    def weights(self) -> bytes:
        """Return the weight file of the model as it is now: a whole one, adapters merged."""
        return self.policy.published()

    def trained_weights(self) -> bytes:
        """Return a weight file for a checkpoint: of what is trained, the whole model or its adapters."""
        return self.policy.trained_bytes()

    def optimizer_bytes(self) -> bytes:
        """Return everything but the weights that the next step depends on."""
        state: dict[str, Any] = {
            "optimizer": whole_state(self.optimizer, self._ranks),
            "optimizer_steps": self.optimizer_steps,
            "torch_random": torch.get_rng_state(),
        }
        if self._critic is not None:
            state["value_head"] = self._critic.state()
        if self._config.lora is not None:
            state["lora"] = self._config.lora.model_dump(mode="json")
        if moved := self.policy.moved_reference():
            state["reference"] = moved
        stream = io.BytesIO()
        torch.save(state, stream)
        return stream.getvalue()

    def restore(self, weights: Path, optimizer: bytes) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it was written with a value head or adapters that this learner has not, or the other way round.
        """
        state: dict[str, Any] = torch.load(io.BytesIO(optimizer), map_location="cpu", weights_only=True)
        self._refuse(state)
        self.policy.restore(weights)
        if self._critic is not None:
            self._critic.restore(state["value_head"])
        put_state(self.optimizer, state["optimizer"], self._ranks)
        self.optimizer_steps = int(state["optimizer_steps"])
        torch.set_rng_state(state["torch_random"])
        if "reference" in state:
            self.policy.restore_reference(state["reference"])

    def _refuse(self, state: dict[str, Any]) -> None:
        """Raise ConfigError unless a checkpoint's parts are those of this learner."""
        if ("value_head" in state) != (self._critic is not None):
            raise ConfigError(
                f"the checkpoint {'holds a' if 'value_head' in state else 'has no'} value head, and the estimator is "
                f"{self._config.estimator.value!r}: a run cannot change to or from 'gae'; set the estimator it began "
                f"with, or start a new run from its last weights"
            )
        lora = self._config.lora.model_dump(mode="json") if self._config.lora else None
        if state.get("lora") != lora:
            raise ConfigError(
                f"the checkpoint was written with algorithm.lora = {state.get('lora')}, now it is {lora}: a run cannot "
                f"change its adapters; set those it began with, or start a new run from its last version"
            )


def _policy(directory: Path, config: AlgorithmConfig, seed: int, device: str, ranks: Ranks) -> Policy:
    if config.lora is None:
        return Policy(directory, config, device=device, ranks=ranks)
    return AdaptedPolicy(directory, config, config.lora, seed=seed, device=device, ranks=ranks)


def _check(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Interrupted
