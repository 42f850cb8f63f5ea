"""The `[algorithm]` section of RUN.toml: what is trained on, and how.

Batch and mini-batch count groups, lag counts trainer steps. Like all of the configuration it does not know torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.transcript import LOWEST_TEMPERATURE
from trainer.config_types import Count, Frozen, NonNegative, Positive, Share, Whole


class Filter(StrEnum):
    """What must differ between siblings for a group to be trained on."""

    SUCCESS = "success"
    """The unshaped success: groups that all fail or all succeed teach nothing."""
    REWARD = "reward"
    """The shaped reward."""
    OFF = "off"
    """Nothing: every complete group is kept."""


class Estimator(StrEnum):
    """How rewards become advantages."""

    GRPO = "grpo"
    """Reward less the group's mean, over its standard deviation; without the latter it is Dr. GRPO."""
    RLOO = "rloo"
    """Reward less the mean of the other siblings."""
    REINFORCE_PLUS_PLUS = "reinforce++"
    """Reward less the mean of the step's samples, over their standard deviation: no group is needed, and a
    `filter` other than `off` only decides what is worth its tokens."""
    GAE = "gae"
    """Rewards beside a value head's estimates (PPO): no siblings are needed (`samples = 1` wants `filter = "off"`), but
    the model is."""

    @property
    def needs_model(self) -> bool:
        """Tell whether advantages come from more than rewards, so that replay cannot make them again."""
        return self is Estimator.GAE


class Late(StrEnum):
    """What becomes of tokens that lag more than `max_lag`."""

    MASK = "mask"
    """They are left out of the loss; their sample stays in its group's baseline."""
    WAIT = "wait"
    """There are none: a step waits while it would leave a group behind that could not be used in time."""
    DROP = "drop"
    """Their whole group is dropped; slow tasks are dropped most, which the metrics show by family and length."""


class Correction(StrEnum):
    """How the difference between engine and trainer weighs a token's loss (`importance.py` says what each is)."""

    TOKEN = "token"  # noqa: S105 - of a language model
    """Truncated importance sampling, token by token."""
    SEQUENCE = "sequence"
    """The same with one ratio per sequence."""
    SEQUENCE_MASK = "sequence_mask"
    """Sequences whose ratio exceeds the cap are left out."""
    ICEPOP = "icepop"
    """Tokens whose ratio lies outside two bounds are left out."""
    OFF = "off"
    """No weight."""


class LossLevel(StrEnum):
    """What counts the same in the loss."""

    TOKEN = "token"  # noqa: S105 - of a language model
    """Every trained token of the mini-batch: long samples weigh more (DAPO)."""
    SAMPLE = "sample"
    """Every sample: its tokens share its weight (GRPO as first published)."""


class Overlong(Frozen):
    """Soft punishment of long answers, added to the shaped reward."""

    max_tokens: Count
    """Sampled tokens of an episode at which the punishment reaches -1."""
    cache_tokens: Count
    """The punishment begins this many tokens before `max_tokens`."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise ValueError("cache_tokens must not exceed max_tokens")
        return self


class Lora(Frozen):
    """Low-rank adapters: the model stays as it is; what is trained is a product of two narrow matrices beside it."""

    rank: Count = 16
    """Width of the product."""
    alpha: Count = 32
    """The product counts alpha / rank times."""
    dropout: Annotated[float, Field(ge=0, le=0)] = 0.0
    """Only 0: with dropout the ratio would compare two different functions."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Layers with an adapter, by the end of their names; or all linear ones but the output layer."""


class AlgorithmConfig(Frozen):
    """What is trained on, and how."""

    groups: Count = 8
    """Groups in one trainer step, exactly."""
    samples: Count = 8
    """Siblings per group."""
    max_lag: Whole = 1
    """Most trainer steps between the weights that sampled a token and those it trains; 0 is synchronous."""
    replayed: bool = False
    """Train on what another run's weights sampled (`rollmill replay --into`): it counts as `max_lag` steps old."""
    late: Late = Late.MASK
    """What becomes of tokens beyond `max_lag`. A synchronous run always waits."""
    filter: Filter = Filter.SUCCESS
    """What must differ between siblings."""
    keep_solved: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the groups without variance whose siblings all succeeded that is kept all the same: they have no
    advantage and serve the KL term. Which ones follows from their ids."""
    min_siblings: Count | None = None
    """Fewest completed siblings of a group that is trained on; all of them unless given."""
    estimator: Estimator = Estimator.GRPO
    """How rewards become advantages."""
    std: bool = True
    """Divide by the standard deviation (off with `grpo` is Dr. GRPO); `rloo` never does."""
    credit: Literal["turn", "token"] = "turn"
    """With `gae`: what has an advantage of its own, turns or sampled tokens."""
    gamma: Share = 1.0
    """With `gae`: discount per turn."""
    gae_lambda: Share = 0.95
    """With `gae`: weight of what comes later, per turn; 1 has little bias and much variance."""
    bootstrap_truncated: bool = True
    """With `gae`: an episode that a limit cut off goes on with the value of its last state; otherwise it ends there."""
    value_coefficient: NonNegative = 0.1
    """With `gae`: weight of the value head's loss beside the policy's."""
    value_clip: NonNegative = 0.2
    """With `gae`: farthest from its value at step start that the loss rewards a value to move; 0 is any distance."""
    value_lr: Positive | None = None
    """With `gae`: learning rate of the value head; it rises and decays as `lr` does, and is `lr` unless given."""
    overlong: Overlong | None = None
    """Soft punishment of long answers; off unless given."""
    shuffle_seed: int | None = None
    """A control: siblings trade their shaped rewards, by this seed, before anything is made of them, and there is
    nothing to learn; off unless given."""

    epochs: Count = 2
    """Passes over a step's batch."""
    minibatches: Count = 2
    """Optimizer steps per pass."""
    clip_low: Positive = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Positive = 0.28
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the loss of bad actions that became much likelier; off unless given (10 is customary)."""
    old: Literal["trainer", "rollout"] = "trainer"
    """Where the ratio's denominator comes from: recomputed at step start, or as recorded (then `tis_cap` is unused)."""
    correction: Correction = Correction.TOKEN
    """How the difference between engine and trainer weighs a token's loss."""
    tis_cap: NonNegative = 2.0
    """Cap of the importance weight between trainer and engine; 0 is off."""
    icepop: tuple[Positive, Positive] = (0.5, 5.0)
    """Ratios between trainer and engine that `correction = "icepop"` keeps: the smallest and the largest."""
    level: LossLevel = LossLevel.TOKEN
    """What counts the same in the loss: tokens or samples."""
    overlong_filter: bool = False
    """Truncated samples count in their group's baseline, but none of their tokens is trained on."""
    entropy_floor: Positive | None = None
    """Nats per sampled token: below it the loss rewards entropy, the more the further below; off unless given."""
    entropy_weight: NonNegative = 0.01
    """Weight of the entropy term where the policy has no entropy left; it falls to 0 at `entropy_floor`."""
    kl: NonNegative = 0.0
    """Weight of the KL term to the model the run began with; 0 is off and loads no second model."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term."""
    ref_reset: Count | None = None
    """Every so many trainer steps the KL term's model becomes the policy of that step, and the optimizer forgets its
    momenta (ProRL); never unless given."""

    lora: Lora | None = None
    """Train adapters instead of the model's own weights; the whole model unless given."""
    lr: Positive = 3e-4
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Momenta of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    warmup: Whole = 0
    """Optimizer steps over which the learning rate rises to `lr`."""
    decay: Count | None = None
    """Optimizer steps after the rise over which the rate falls to `lr_floor` along a cosine; constant unless given."""
    lr_floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of `lr` at which the decay ends."""
    clip_norm: Positive = 1.0
    """Largest norm of the gradient."""
    micro_tokens: Count = 4096
    """Tokens of one forward pass, padding included: bounds memory, never changes the gradient."""
    batching: Literal["buckets", "packing"] = "buckets"
    """How a pass is filled, which never changes the gradient either: with sequences of like length, padded; or with
    any, one behind the other. Packing pads nothing, and its attention costs the square of a whole pass."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward and backward pass; weights, optimizer, log-probs and losses stay float32."""
    activation_checkpointing: bool = False
    """Keep no activations of the layers but compute them again on the way back: less memory, a third more time."""

    temperature: float = Field(1.0, ge=LOWEST_TEMPERATURE)
    """Sampling temperature, stamped on groups at admission."""
    horizon: Count = 16
    """Most turns of an episode, stamped on groups at admission."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.minibatches > self.groups:
            raise ValueError(f"{self.groups} groups cannot be split into {self.minibatches} mini-batches")
        if self.min_siblings is not None and self.min_siblings > self.samples:
            raise ValueError(f"min_siblings = {self.min_siblings} exceeds samples = {self.samples}")
        if self.icepop[0] >= self.icepop[1]:
            raise ValueError(f"icepop = {list(self.icepop)} keeps nothing: the first bound must be the smaller one")
        if self.ref_reset is not None and not self.kl:
            raise ValueError("ref_reset without kl: there is no reference to reset")
        return self

    @property
    def siblings_needed(self) -> int:
        """Fewest completed siblings of a group that is trained on."""
        return self.samples if self.min_siblings is None else self.min_siblings


def synchronous(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return rules under which a run without lag waits, whatever they say of late groups."""
    return algorithm if algorithm.max_lag else algorithm.model_copy(update={"late": Late.WAIT})
