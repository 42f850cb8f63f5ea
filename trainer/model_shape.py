"""The shape of a decoder-only transformer, from `config.json` or from the `[plan.model]` section of RUN.toml.

What a model costs follows from a few numbers; no weight is read, and no tensor library is needed. Only dense models
are known: of a mixture of experts a token passes through a part, which these numbers do not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from infra.errors import ConfigError
from infra.settings import explain
from trainer.config_types import Count, Frozen

CONFIG_KEYS: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
    "context": "max_position_embeddings",
}
"""Key here -> key in `config.json`."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys by which a `config.json` says that the model is a mixture of experts."""


class ModelShape(Frozen):
    """What the memory and the work of a model follow from."""

    layers: Count
    """Blocks."""
    hidden: Count
    """Width of the residual stream."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values; as many as `heads` unless given (fewer: grouped-query attention)."""
    head_dim: Count | None = None
    """Width of a head; `hidden / heads` unless given."""
    intermediate: Count
    """Width of the gated feed-forward part."""
    vocabulary: Count
    """Token ids."""
    tied: bool = False
    """Input and output embedding are one matrix."""
    context: Count | None = None
    """Longest sequence, tokens; not checked unless given."""
    parameters: Count | None = None
    """Parameters, where they are known better than the shape tells."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not share out a width of {self.hidden}: give head_dim")
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads do not share {self.key_heads} heads of keys and values")
        return self

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.query_width // self.heads * self.key_heads

    @property
    def count(self) -> int:
        """Parameters.

        The matrices and norms of a Llama-like block: queries and output, keys and values, gate, up and down, two norms;
        a last norm, and the embedding once or twice. Biases and norms of queries and keys, which some have, are left
        out: 0.002 % of Qwen2.5-7B.
        """
        if self.parameters is not None:
            return self.parameters
        block = 2 * self.hidden * (self.query_width + self.key_width) + 3 * self.hidden * self.intermediate
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (block + 2 * self.hidden) + self.hidden + embeddings


def shape_of(model: Path, section: Mapping[str, Any] | None) -> tuple[ModelShape, str]:
    """Return the shape of a run's model and where it was found.

    Args:
        model: the run's model directory; its `config.json` counts, if it is there.
        section: `[plan.model]`, for where it is not.

    Raises:
        ConfigError: neither says it, or what is said cannot be.
    """
    file = model / "config.json"
    if file.is_file():
        return _checked(_from_config(file), str(file)), str(file)
    if section is not None:
        return _checked(section, "[plan.model]"), "[plan.model]"
    raise ConfigError(
        f"the model's shape is not known: there is no {file}, and RUN.toml has no [plan.model]. Give layers, hidden, "
        "heads, kv_heads, head_dim, intermediate and vocabulary there; the model's own config.json has them as "
        + ", ".join(CONFIG_KEYS[key] for key in ("layers", "hidden", "heads", "kv_heads", "head_dim"))
        + ", ..."
    )


def _from_config(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model's shape from {file}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"cannot read the model's shape from {file}: it holds no JSON object")
    text = values.get("text_config")
    if isinstance(text, dict):  # a model that also sees keeps its language part there
        values = {**values, **text}
    if experts := [key for key in EXPERTS if values.get(key)]:
        raise ConfigError(
            f"{file} is of a mixture of experts ({experts[0]} = {values[experts[0]]}): only dense models can be planned"
        )
    return {ours: values[theirs] for ours, theirs in CONFIG_KEYS.items() if values.get(theirs) is not None}


def _checked(values: Mapping[str, Any], origin: str) -> ModelShape:
    try:
        return ModelShape.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(explain(error, origin, ModelShape)) from error
