"""A run's configuration: one TOML file, `--set a.b=c` over it, checked once, frozen.

Every limit has a name, a unit and a sentence. The longest sections have modules of their own (`algorithm_config.py`,
`guards_config.py`). Paths in the file are relative to the file. What is written here is copied into `TrainerStarted`,
so that replay needs no file. This module does not know torch, and imports nothing slow: the command line reads a
configuration before anything else starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from infra.errors import ConfigError
from infra.settings import Given, apply_override, explain, given_by, read_toml
from schemas.identity import RUN_CHARS, run_name
from trainer import presets
from trainer.algorithm_config import AlgorithmConfig, synchronous
from trainer.config_types import INT64, Count, Frozen, NonNegative, Positive, Whole
from trainer.guards_config import GuardsConfig

Name = Annotated[str, AfterValidator(run_name)]

RUN_SET = "--run-set"
"""Option that overrides a value of RUN.toml."""

PLAN = "plan"
"""Section of RUN.toml that is not part of a run's configuration (`plan_config.py`)."""


class OnNoVariance(StrEnum):
    """What happens after `max_dropped` groups in a row without a step."""

    STOP = "stop"
    """The run ends."""
    RAISE = "raise"
    """The trainer ends with an error; the run waits for `--resume`, its feeder for credit."""
    FEWER = "fewer"
    """The step is made of the groups that are there; without any the run ends."""


Weights = dict[str, Annotated[float, Field(allow_inf_nan=False)]]
"""Component of the reward -> its factor."""


class RewardsConfig(Frozen):
    """How much the parts of a reward count, stamped on groups at admission; as the family gives them unless given."""

    weights: Weights = Field(default_factory=dict)
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
    tasks: dict[str, Any] = Field(default_factory=dict)
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
