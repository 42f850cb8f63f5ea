"""What `rollmill plan` assumes: the `[plan]` section of RUN.toml.

Nothing here is part of a run's configuration: it says what episodes, engines and GPUs are expected to be like, and no
trained token depends on it. The defaults are of one H100 (SXM) for the trainer and one for the engine. 1 GB is 10^9
bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from infra.errors import ConfigError
from infra.settings import Given, explain
from trainer.config_types import Count, Frozen, NonNegative, Positive

Share = Annotated[float, Field(gt=0, le=1)]


class PlanConfig(Frozen):
    """The assumptions."""

    model: dict[str, Any] | None = None
    """The model's shape, where its directory is not at hand (`model_shape.py`)."""

    turns: Positive | None = None
    """Turns of a mean episode; the whole horizon unless given, which is the most it can be."""
    prompt_tokens: NonNegative = 250
    """Tokens before the first turn. With the next two, 15 turns are the 4,000 tokens that a report on AgentGym-RL
    counts; how they split is our choice."""
    turn_tokens: Positive = 150
    """Sampled tokens of a mean turn."""
    observation_tokens: NonNegative = 100
    """Tokens of the environment's answer to a turn."""
    payload_bytes: NonNegative = 1000
    """Bytes of a task's payload; it travels in every record of its sample."""
    kept_share: Share = 0.5
    """Share of groups that dynamic sampling keeps; half at 8 siblings is what a public run of ProRL Agent's code saw.
    With `filter = "off"` every group is kept."""
    environment_s: NonNegative = 1.0
    """Seconds the environment takes for a turn; our choice (ProRL Agent: 0.4 s for a shell command)."""

    trainer_gpus: Count = 1
    """GPUs that share the trainer's states: its ranks under `torchrun`, or a trainer of yours."""
    engine_gpus: Count = 1
    """GPUs that sample."""
    engine_parallel: Count = 1
    """Engine GPUs that hold one copy of the weights together (tensor parallelism)."""
    gpu_memory_gb: Positive = 80.0
    """Memory of one GPU."""
    gpu_tflops: Positive | None = None
    """Peak of one GPU in the trainer's precision, 10^12 operations per second; an H100 (SXM) unless given: 989 in
    bfloat16, 67 in float32 (its data sheet, dense)."""
    gpu_bandwidth_gb_s: Positive = 3350.0
    """Memory bandwidth of one engine GPU, GB/s; an H100 (SXM) by its data sheet."""
    mfu: Share = 0.3
    """Share of the peak that the trainer reaches; our choice, below the 0.38 to 0.43 that Llama 3's pre-training
    reports, since sequences are of many lengths."""
    engine_tokens_per_s: Positive | None = None
    """Sampled tokens per second of one engine GPU, as measured; follows from its bandwidth unless given."""
    engine_efficiency: Share = 0.5
    """Share of bandwidth and peak that the engine reaches; our choice."""
    engine_memory_share: Share = 0.9
    """Share of a GPU's memory that the engine takes; vLLM's own default."""
    engine_bytes: Literal[1, 2, 4] = 2
    """Bytes of a weight, and of a number in the KV cache: 2 is bfloat16."""
    disk_gb_s: Positive = 1.0
    """GB per second at which weights are hashed, written and synced; our choice."""
    price_per_gpu_hour: NonNegative | None = None
    """Price of one GPU for an hour, in any currency. Prices differ too much for a default: no cost unless given."""


def make_plan_config(values: Any, origin: str, given: Given | None = None) -> PlanConfig:
    """Return a checked `[plan]` section.

    Args:
        values: the section.
        origin: the file.
        given: who gave keys of it that are not from there.

    Raises:
        ConfigError: lists every value that cannot work.
    """
    try:
        return PlanConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, f"{origin}, [plan]", PlanConfig, given)) from error
