"""What a model takes in memory: of the trainer's GPUs, of the engine's, of the trainer's machine and its disk.

Formulas alone, each with where it comes from; which model and which run is not known here. 1 GB is 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.algorithm_config import AlgorithmConfig
from trainer.model_shape import ModelShape
from trainer.plan_config import PlanConfig
from trainer.plan_work import Tokens

FLOAT32 = 4
"""Bytes of a weight, a gradient and each of AdamW's two momenta in the trainer, whatever its arithmetic."""


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Bytes on each of the trainer's GPUs."""

    weights: float
    """In float32, and in bfloat16 the copy that autocast keeps."""
    gradients: float
    """In float32."""
    optimizer: float
    """AdamW's two momenta."""
    reference: float
    """The KL term's second model; adapters need none."""
    activations: float
    """Of one pass, as configured."""
    other_activations: float
    """The same with `activation_checkpointing` the other way round."""
    logits: float
    """Of one pass, up to the log-probs."""

    @property
    def total(self) -> float:
        """As configured."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.activations + self.logits


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes of one copy of the engine, over all GPUs that hold it."""

    weights: float
    """Of the model."""
    kv_token: float
    """KV cache of one token."""
    kv_sequence: float
    """KV cache of the longest episode."""
    sequences: int
    """Longest episodes that fit at once."""

    def read(self, sequences: float, tokens: float) -> float:
        """Return the bytes that one step of the engine reads: the weights, and caches that are half full on average."""
        return self.weights + sequences * self.kv_token * tokens / 2

    @property
    def kv_full(self) -> float:
        """KV cache at so many."""
        return self.kv_sequence * self.sequences


def activation_bytes(shape: ModelShape, tokens: float, width: int, *, again: bool) -> float:
    """Return what one pass keeps for the way back.

    Counted as Korthikanti et al. 2022 do, for a block of today: two norms and what goes into the matrices behind them
    (4 h), queries and the attention's output (2 a d), keys and values (2 k d), gate, up, their product and the
    activation (4 i), each `width` bytes per token; no dropout masks, and attention that keeps no scores (Dao et al.
    2022, FlashAttention). Computed again (Chen et al. 2016), only each block's input stays, and one block's all.
    """
    block = (4 * shape.hidden + 2 * shape.query_width + 2 * shape.key_width + 4 * shape.intermediate) * width * tokens
    if again:
        return shape.layers * shape.hidden * width * tokens + block
    return shape.layers * block


def logit_bytes(shape: ModelShape, tokens: float, sampled: float, width: int) -> float:
    """Return what the last matrix and the log-probs of one pass take.

    Logits of all tokens and their gradient in the model's arithmetic; of the sampled tokens, in float32, the scaled
    logits, their log-softmax and the gradient (`trainer/forward.py`). With large vocabularies this is the largest part.
    """
    return shape.vocabulary * (2 * width * tokens + 3 * FLOAT32 * sampled)


def trained_count(shape: ModelShape, algorithm: AlgorithmConfig) -> int:
    """Return the parameters that the optimizer moves: all, or of each adapter rank x (in + out) (Hu et al. 2021)."""
    lora = algorithm.lora
    if lora is None:
        return shape.count
    sides = {
        "self_attn.q_proj": shape.hidden + shape.query_width,
        "self_attn.k_proj": shape.hidden + shape.key_width,
        "self_attn.v_proj": shape.hidden + shape.key_width,
        "self_attn.o_proj": shape.query_width + shape.hidden,
        "mlp.gate_proj": shape.hidden + shape.intermediate,
        "mlp.up_proj": shape.hidden + shape.intermediate,
        "mlp.down_proj": shape.intermediate + shape.hidden,
    }
    chosen = [
        both
        for name, both in sides.items()
        if isinstance(lora.targets, str) or any(f".{name}".endswith(f".{target}") for target in lora.targets)
    ]
    return shape.layers * lora.rank * sum(chosen)


def trainer_memory(shape: ModelShape, algorithm: AlgorithmConfig, longest: Tokens, gpus: int) -> TrainerMemory:
    """Return the bytes on each of the trainer's GPUs.

    16 bytes per parameter for weights, gradients and AdamW (Kingma & Ba 2015; Rajbhandari et al. 2020, ZeRO, section
    3.1, has the same sum for mixed precision), shared out over the GPUs as ZeRO stage 3 does; 4 more for the reference.
    Under autocast torch keeps a bfloat16 copy of each matrix during a pass. A pass has `micro_tokens` tokens, or
    one longer episode. With adapters gradients and momenta are theirs alone.
    """
    width = 2 if algorithm.precision == "bfloat16" else FLOAT32
    tokens = max(float(algorithm.micro_tokens), longest.all)
    kept = [activation_bytes(shape, tokens, width, again=again) for again in (False, True)]
    trained = trained_count(shape, algorithm) / gpus
    each = shape.count / gpus + (trained if algorithm.lora else 0.0)
    return TrainerMemory(
        weights=(FLOAT32 + (2 if width == 2 else 0)) * each,
        gradients=FLOAT32 * trained,
        optimizer=2 * FLOAT32 * trained,
        reference=FLOAT32 * each if algorithm.kl and algorithm.lora is None else 0.0,
        activations=kept[algorithm.activation_checkpointing],
        other_activations=kept[not algorithm.activation_checkpointing],
        logits=logit_bytes(shape, tokens, tokens * longest.sampled / longest.all, width),
    )


def host_bytes(shape: ModelShape, trained: int) -> float:
    """Return the trainer's peak in the machine's memory while it writes a checkpoint, or a version.

    Of a checkpoint: the weight file (4 bytes per trained parameter) and the optimizer's state (8), which lies there
    twice while its file is made (`trainer/loop.py`, `Learner.optimizer_bytes`). Of a version: the weights and the file,
    which is more where adapters are trained and merged.
    """
    return max((FLOAT32 + 2 * 2 * FLOAT32) * trained, 2 * FLOAT32 * shape.count)


def disk_bytes(shape: ModelShape, trained: int, checkpoints: int, versions: int) -> float:
    """Return the bytes of a run's directory: 12 per trained parameter and checkpoint, 4 per parameter and version."""
    return FLOAT32 * (3 * checkpoints * trained + versions * shape.count)


def engine_memory(shape: ModelShape, plan: PlanConfig, longest: Tokens) -> EngineMemory:
    """Return the bytes of one copy of the engine.

    KV cache of a token = 2 (key and value) x layers x KV heads x head width x bytes (Kwon et al. 2023, vLLM, section
    3; Ainslie et al. 2023 for grouped queries). What the weights leave of `engine_memory_share` is for it.
    """
    weights = float(plan.engine_bytes * shape.count)
    kv_token = float(2 * shape.layers * shape.key_width * plan.engine_bytes)
    room = plan.gpu_memory_gb * 1e9 * plan.engine_memory_share * plan.engine_parallel - weights
    return EngineMemory(
        weights=weights,
        kv_token=kv_token,
        kv_sequence=kv_token * longest.all,
        sequences=max(0, int(room / (kv_token * longest.all))),
    )
