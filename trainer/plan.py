"""A run, a model and assumptions: what follows from them in tokens, memory, time and cost.

Everything is a first estimate, made before anything runs: `plan_work.py` and `plan_memory.py` have the formulas and
where they come from, `plan_config.py` what is assumed. Of a run with a curriculum the figures are those of its last
phase; time is added up phase by phase, and memory is for the longest episode of all. Pure: no file, no model, no
family, no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.errors import ConfigError
from schemas.topics import TABLE
from trainer.config import RunConfig
from trainer.curriculum import final_stamp, phases
from trainer.model_shape import ModelShape
from trainer.plan_config import PlanConfig
from trainer.plan_memory import FLOAT32, EngineMemory, TrainerMemory, engine_memory, trained_count, trainer_memory
from trainer.plan_work import (
    PEAK_TFLOPS,
    Limits,
    StepTime,
    Tokens,
    decode_rate,
    engine_peak,
    episode_tokens,
    episodes_of_step,
    forward_flops,
    in_flight,
    step_flops,
)

HOUR_S = 3600.0
HOUR_MS = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps of a run that share one horizon."""

    steps: int
    """How many."""
    horizon: int
    """Most turns of an episode."""
    time: StepTime
    """Of each step."""

    @property
    def hours(self) -> float:
        """Of all its steps."""
        return self.steps * self.time.whole / HOUR_S


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run, a model, assumptions: what follows from them."""

    run: RunConfig
    """The run."""
    shape: ModelShape
    """Its model."""
    assumed: PlanConfig
    """The assumptions."""
    limits: Limits
    """Of the policy's tokens."""

    def __post_init__(self) -> None:
        if self.assumed.turn_tokens > self.limits.turn:
            raise ConfigError(
                f"plan.turn_tokens = {self.assumed.turn_tokens:g} exceeds tasks.max_tokens = {self.limits.turn}: the "
                "mean turn would be longer than the longest one"
            )
        if self.assumed.engine_gpus % self.assumed.engine_parallel:
            raise ConfigError(
                f"plan.engine_gpus = {self.assumed.engine_gpus} is no multiple of plan.engine_parallel = "
                f"{self.assumed.engine_parallel}: some GPUs would hold no whole copy of the weights"
            )

    @property
    def horizon(self) -> int:
        """The horizon of the last phase."""
        return final_stamp(self.run.algorithm, self.run.curriculum).horizon

    @property
    def episode(self) -> Tokens:
        """A mean episode of the last phase."""
        return episode_tokens(self.assumed, self.limits, self.horizon)

    @property
    def longest(self) -> Tokens:
        """The longest episode of the run."""
        highest = max(self.run.curriculum.horizons, default=self.horizon)
        return episode_tokens(self.assumed, self.limits, highest, longest=True)

    @property
    def copies(self) -> int:
        """Copies of the engine."""
        return self.assumed.engine_gpus // self.assumed.engine_parallel

    @property
    def trainer(self) -> TrainerMemory:
        """Bytes on each of the trainer's GPUs."""
        return trainer_memory(self.shape, self.run.algorithm, self.longest, self.assumed.trainer_gpus)

    @property
    def engine(self) -> EngineMemory:
        """Bytes of one copy of the engine."""
        return engine_memory(self.shape, self.assumed, self.longest)

    @property
    def at_once(self) -> float:
        """Sequences that one copy samples at once: what credit allows, as far as the cache holds it."""
        return min(in_flight(self.run.algorithm) / self.copies, max(self.engine.sequences, 1))

    def engine_rate(self, episode: Tokens) -> float:
        """Return the tokens per second that all engines sample, the reading of prompts and observations left out."""
        if self.assumed.engine_tokens_per_s is not None:
            return self.assumed.engine_tokens_per_s * self.assumed.engine_gpus
        flops = forward_flops(self.shape, episode.all / 2)
        reads = self.engine.read(self.at_once, episode.all)
        return self.copies * decode_rate(self.assumed, reads, flops, self.at_once)

    def time(self, horizon: int) -> StepTime:
        """Return the seconds of a step at a horizon.

        Sampling is bound by the engines' work or by how many episodes may be played at once (the asymptotic bounds of a
        closed network, Denning & Buzen 1978). With `max_lag` of at least 1 it overlaps with training.
        """
        algorithm, assumed = self.run.algorithm, self.assumed
        episode = episode_tokens(assumed, self.limits, horizon)
        wanted = episodes_of_step(algorithm, assumed)
        trained = algorithm.groups * algorithm.samples * episode.all
        return StepTime(
            engine=wanted * self._engine_s(episode),
            episodes=wanted / in_flight(algorithm) * self._alone_s(episode),
            optimizer=step_flops(self.shape, algorithm, trained, episode.all) / self._trainer_rate(),
            writing=self.written / (assumed.disk_gb_s * 1e9),
            overlap=algorithm.max_lag > 0,
        )

    @property
    def written(self) -> float:
        """Bytes that the trainer writes per step: the weights, and every so often a checkpoint."""
        kept = trained_count(self.shape, self.run.algorithm)
        return FLOAT32 * (self.shape.count + 3 * kept / self.run.checkpoints.every)

    def _engine_s(self, episode: Tokens) -> float:
        """Return the engines' seconds for an episode; each token is read once, since the prefix stays in the cache."""
        sampling = episode.sampled / self.engine_rate(episode)
        if self.assumed.engine_tokens_per_s is not None:
            return sampling  # as measured, with its prompts
        reading = episode.read * forward_flops(self.shape, episode.all / 2)
        return sampling + reading / (engine_peak(self.assumed) * self.copies)

    def _alone_s(self, episode: Tokens) -> float:
        """Return the seconds of an episode that has an engine for itself."""
        flops = forward_flops(self.shape, episode.all / 2)
        rate = decode_rate(self.assumed, self.engine.read(1, episode.all), flops, 1)
        if self.assumed.engine_tokens_per_s is not None:
            rate = min(rate, self.assumed.engine_tokens_per_s * self.assumed.engine_parallel)
        return episode.turns * self.assumed.environment_s + episode.sampled / rate

    def _trainer_rate(self) -> float:
        assumed = self.assumed
        tflops = assumed.gpu_tflops or PEAK_TFLOPS[self.run.algorithm.precision]
        return tflops * 1e12 * assumed.mfu * assumed.trainer_gpus

    @property
    def phases(self) -> list[Phase]:
        """The run's steps, by horizon."""
        algorithm, curriculum, steps = self.run.algorithm, self.run.curriculum, self.run.stop.max_steps
        return [
            Phase(steps=count, horizon=stamp.horizon, time=self.time(stamp.horizon))
            for count, stamp in phases(algorithm, curriculum, steps)
        ]

    @property
    def hours(self) -> float:
        """Of the whole run, if it makes all of its `stop.max_steps`."""
        return sum(phase.hours for phase in self.phases)

    @property
    def gpu_hours(self) -> float:
        """GPUs are paid for while they wait, too."""
        return self.hours * (self.assumed.trainer_gpus + self.assumed.engine_gpus)


def retained_bytes(per_hour: Mapping[str, float], hours: float) -> float:
    """Return the bytes that lie in the log at a run's end: each topic keeps what its retention says."""
    kept = {topic.name: (topic.retention_ms or 0) / HOUR_MS for topic in TABLE}
    return sum(rate * min(hours, kept[name]) for name, rate in per_hour.items())
