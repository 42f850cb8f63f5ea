"""A run's configuration: one TOML file, `--set a.b=c` over it, checked once, frozen.

Every limit has a name, a unit and a sentence. Batch and mini-batch count groups, lag counts trainer steps. Paths in
the file are relative to the file. What is written here is copied into `TrainerStarted`, so that replay needs no file.
This module does not know torch, and imports nothing slow: the command line reads a configuration before anything
else starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from infra.errors import ConfigError
from infra.settings import Given, apply_override, explain, given_by, plain_texts, read_toml
from schemas.decisions import Action
from schemas.identity import RUN_CHARS, run_name
from trainer import presets

MOST = 2**31 - 1
"""Largest number of anything that is counted."""

INT64 = 2**63 - 1
"""Largest number that a record holds."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Name = Annotated[str, AfterValidator(run_name)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]

RUN_SET = "--run-set"
"""Option that overrides a value of RUN.toml."""

PLAN = "plan"
"""Section of RUN.toml that is not part of a run's configuration (`plan_config.py`)."""


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


class OnNoVariance(StrEnum):
    """What happens after `max_dropped` groups in a row without a step."""

    STOP = "stop"
    """The run ends."""
    RAISE = "raise"
    """The trainer ends with an error; the run waits for `--resume`, its feeder for credit."""
    FEWER = "fewer"
    """The step is made of the groups that are there; without any the run ends."""


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


class Frozen(BaseModel):
    """A part of the configuration: no unknown keys, no changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _texts(cls, values: Any) -> Any:
        return plain_texts(values)


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

    temperature: Positive = 1.0
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


Weights = dict[str, Annotated[float, Field(allow_inf_nan=False)]]
"""Component of the reward -> its factor."""


class RewardsConfig(Frozen):
    """How much the parts of a reward count, stamped on groups at admission; as the family gives them unless given."""

    weights: Weights = {}
    """Factor of a component; 1 unless named. `repeated_actions` and `long_actions` are minus the number of such turns,
    for any family, and count only where they are named; `process` is the factor of the turns' rewards."""
    long_action: Annotated[int, Field(ge=0)] = 0
    """Sampled tokens above which an action is over-long; 0: only if the engine cut it off."""
    once_per_state: bool = False
    """Pay a turn's process reward only if it led to what was not seen before in its episode."""


class DifficultyConfig(Frozen):
    """Rows of a source that is passed again are chosen by what they achieved (`producers/difficulty.py`)."""

    floor: Annotated[float, Field(ge=0.01, le=1)] = 0.1
    """Chance that a row is taken again whose siblings all succeeded or all failed; where half did it always is."""


class CurriculumConfig(Frozen):
    """What changes from phase to phase (`curriculum.py` says how); without it `algorithm` holds throughout."""

    horizons: tuple[Count, ...] = ()
    """Most turns of an episode, one phase after the other; the last one stays. In the place of `algorithm.horizon`."""
    temperatures: tuple[Positive, ...] = ()
    """Sampling temperatures in the same way, in the place of `algorithm.temperature`."""
    weights: tuple[Weights, ...] = ()
    """Weights of the reward's components in the same way, over `rewards.weights`."""
    every: Count | None = None
    """Trainer steps of one phase; with `success` the most that it has."""
    success: Annotated[float, Field(gt=0, le=1)] | None = None
    """A phase ends with the step at which the mean success of its last `success_groups` groups reaches this."""
    success_groups: Count = 64
    """Groups in that mean: complete ones that were admitted in the phase, kept and dropped alike."""
    difficulty: DifficultyConfig | None = None
    """Choose rows by their success; the source is passed as it is unless given."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        changes, ends = self.horizons or self.temperatures or self.weights, self.every or self.success
        if changes and not ends:
            raise ValueError(
                "`every` is missing: after how many trainer steps does the next phase begin? Or, with `success`, at "
                "which mean success?"
            )
        if ends and not changes:
            raise ValueError("`every` or `success` without `horizons`, `temperatures` or `weights`: nothing to change")
        return self


class StopConfig(Frozen):
    """When the run has ended; the stop itself is written down, so no clock decides what is trained on."""

    max_steps: Count = 100
    """Trainer steps."""
    min_steps: Whole = 0
    """Trainer steps before `success` or `time_limit_s` may end the run."""
    success: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop when the mean success of the last `success_groups` complete groups reaches this; off unless given."""
    success_groups: Count = 64
    """Groups in that mean, kept and dropped ones alike."""
    max_dropped: Count = 10_000
    """Groups dropped in a row without a step: then the task is too easy or too hard to learn from."""
    on_no_variance: OnNoVariance = OnNoVariance.STOP
    """What happens then."""
    time_limit_s: Positive | None = None
    """Seconds from the trainer's start after which the run ends; off unless given."""


class CheckpointConfig(Frozen):
    """How much is kept on disk."""

    every: Count = 1
    """Steps between checkpoints; those after the last one are executed again on resume."""
    keep: Count = 2
    """Checkpoints kept, counted in steps from the newest."""
    milestones: Count | None = None
    """Checkpoints of steps that this divides are kept too, so that a rollback far back need not begin at the start."""
    keep_versions: Count = 4
    """Published weight directories kept; the policy may still be loading the one before the last."""


class EvaluationConfig(Frozen):
    """What is played with a version while training goes on, to know how good it is; nobody trains on it."""

    tasks: dict[str, Any]
    """The suite, as `[tasks]` says tasks; finite. Limits that it does not give are those of `[tasks]`."""
    every: Count = 10
    """Trainer steps between evaluations; the model that the run begins with is evaluated too."""
    samples: Count = 1
    """Samples of each task."""
    temperature: NonNegative | None = None
    """Sampling temperature; that of training unless given."""
    start_within_s: Positive = 3600.0
    """A task of the suite that was not started so long after its publication is missing, seconds."""


class GuardRule(Frozen):
    """When a guard raises an alarm, and what follows."""

    bound: float
    """Figures beyond it are not as they should be; `guards.py` says which side that is."""
    steps: Count = 3
    """Trainer steps in a row that must be beyond it."""
    action: Action = Action.TELL
    """What follows: a record and a warning (`tell`), half the learning rate (`slow`), an earlier version with half the
    learning rate (`back`), or the run's end (`stop`)."""


class BaselineRule(Frozen):
    """What training has to beat: a policy that nobody trained."""

    bound: Share | None = None
    """Its mean success."""
    rule: str | None = None
    """Name of a scripted rule of the family; `rollmill train` plays it on the run's tasks to find the bound."""
    tasks: Count = 200
    """Tasks that the rule plays."""
    steps: Count = 50
    """Trainer steps in a row without a mean success above the bound."""
    action: Action = Action.TELL
    """What follows."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.bound is None and self.rule is None:
            raise ValueError(
                "give `bound`, a mean success, or `rule`, the name of a scripted rule that is to be played"
            )
        return self


class GuardsConfig(Frozen):
    """What is watched for a policy that goes astray; none of it unless given."""

    entropy: GuardRule | None = None
    """Entropy below the bound, nats per sampled token."""
    repetition: GuardRule | None = None
    """Share of an episode's n-grams of sampled tokens that occurred in it before, above the bound."""
    ngram: Count = 4
    """Tokens of an n-gram there."""
    farming: GuardRule | None = None
    """Mean reward of the samples that failed above the bound, process rewards included."""
    kl: GuardRule | None = None
    """KL to the reference above the bound, nats per token; measured where `algorithm.kl` is above 0."""
    baseline: BaselineRule | None = None
    """Mean success of the last `stop.success_groups` groups not above that of a rule."""


class WriterName(StrEnum):
    """A program that draws a run's figures."""

    TENSORBOARD = "tensorboard"
    """Files in `tensorboard` in the run's directory; wants the extra of that name."""
    WANDB = "wandb"
    """Weights & Biases, offline: folders in `wandb` there, for `wandb sync`; wants the extra of that name."""


class ReportConfig(Frozen):
    """What is told of a run beside its log; none of it changes what is trained."""

    rollouts_every: Count | None = None
    """Every so many steps the best, the worst, the longest and one random rollout of the step are printed, and written
    whole into `rollouts` in `directory`; never unless given."""
    writers: tuple[WriterName, ...] = ()
    """Programs that the figures of each step and evaluation are written for; they are in `metrics` anyhow."""
    project: str = "rollmill"
    """Project of the run with Weights & Biases."""


class Fork(Frozen):
    """The checkpoint of another run whose weights this run begins with; written by `rollmill train --fork`."""

    run: Name
    """That run."""
    epoch: int
    """Epoch of the trainer that wrote the checkpoint."""
    step: int
    """Steps that had been made."""
    weights: str
    """SHA-256 of its weight file."""


class RunConfig(Frozen):
    """Everything the trainer needs to know."""

    run: Name
    """Name of the run; it is part of paths and keys."""
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] = 0
    """Seed of all derived seeds."""
    model: Path
    """Model directory the run begins with (weights, config, tokenizer)."""
    directory: Path
    """Where checkpoints and the lock live."""
    publish: Path | None = None
    """Where weight versions are written for the policy; `versions` in `directory` unless given."""
    start: Annotated[int, Field(ge=0, le=INT64)] = 0
    """First offset of `trajectories` that can hold a record of the run."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Torch threads; weights are reproducible for one number of them."""
    device: str = "cpu"
    """Torch device of the learner."""
    buffer_bytes: Annotated[int, Field(ge=0, le=INT64)] = 2**30
    """Most bytes of token records that wait in memory for their step; others are read from the log again then."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is trained on, and how."""
    stop: StopConfig = StopConfig()
    """When the run has ended."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """How much is kept on disk."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """What changes from phase to phase."""
    rewards: RewardsConfig = RewardsConfig()
    """How much the parts of a reward count."""
    tasks: dict[str, Any] = {}
    """For the producer of the run's tasks; the trainer only records it."""
    evaluation: EvaluationConfig | None = None
    """What is played with the versions to know how good they are; nothing unless given."""
    guards: GuardsConfig = GuardsConfig()
    """What is watched for a policy that goes astray."""
    report: ReportConfig = ReportConfig()
    """What is told of the run beside its log."""
    forked_from: Fork | None = None
    """Where the weights in `model` come from, if this run is a fork of another one."""

    @field_validator("algorithm")
    @classmethod
    def _synchronous(cls, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        # Not where AlgorithmConfig is made: what an older trainer wrote down means what it meant then.
        return synchronous(algorithm)

    @model_validator(mode="after")
    def _named(self) -> Self:
        # Refused now, and not by the first evaluation: its suite is a run of its own, named after this one.
        suite = f"{self.run}.eval.{self.stop.max_steps}.v{self.stop.max_steps}"
        if self.evaluation is not None and len(suite) > RUN_CHARS:
            more = len(suite) - RUN_CHARS
            raise ValueError(f"run is too long a name by {more} characters: its evaluations are runs named after it")
        return self

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.guards.kl is not None and not self.algorithm.kl:
            raise ValueError("guards.kl needs algorithm.kl above 0, or nobody measures it: 1e-6 is enough")
        return self

    @property
    def versions_directory(self) -> Path:
        """Where weight versions are written for the policy."""
        return self.publish or self.directory / "versions"

    @property
    def rollouts_directory(self) -> Path:
        """Where rollouts are written for a person to read."""
        return self.directory / "rollouts"

    @property
    def checkpoints_directory(self) -> Path:
        """Where checkpoints live."""
        return self.directory / "checkpoints"


def load_config(path: Path, overrides: Sequence[str] = (), preset: str | None = None) -> RunConfig:
    """Read RUN.toml, apply `a.b=c` overrides, and check the result.

    Args:
        path: the file.
        overrides: `a.b=c` each; they win over the file.
        preset: values to begin from, in the place of the file's own `preset`; the file wins over them.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or holds a value that cannot work.
    """
    values = read_run(path, overrides, preset)
    # Only `rollmill plan` reads what is assumed of machines; nothing that is trained depends on it.
    values.pop(PLAN, None)
    return make_config(values, str(path), given_by(RUN_SET, overrides))


def read_run(path: Path, overrides: Sequence[str] = (), preset: str | None = None) -> dict[str, Any]:
    """Return what RUN.toml says, unchecked, as `load_config` takes it: preset below, overrides above, paths resolved.

    Raises:
        ConfigError: the file cannot be read or is no TOML, or there is no such preset.
    """
    values = read_toml(path)
    for override in overrides:
        apply_override(values, override, option=RUN_SET)
    named = values.pop("preset", None)
    chosen = named if preset is None else preset
    if chosen is not None:
        values = presets.over(presets.read(chosen), values)
    for name in ("model", "directory", "publish"):
        if isinstance(values.get(name), str) and values[name].isprintable():  # another one is refused as it is
            values[name] = str((path.parent / values[name]).resolve())
    return values


def make_config(values: dict[str, Any], origin: str = "configuration", given: Given | None = None) -> RunConfig:
    """Check values from anywhere.

    Args:
        values: what the run is.
        origin: the file, or wherever they are from.
        given: who gave keys that are not from there.

    Raises:
        ConfigError: lists every value that cannot work, with its place.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, origin, RunConfig, given)) from error
