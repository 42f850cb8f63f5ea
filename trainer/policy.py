"""The policy in training, and the reference that the KL term holds it against.

Here the whole model is trained, and a reference is a second one in memory; `adapters.py` trains adapters beside a
model that stays as it is, and needs no second one. What is published is always a whole model; what a checkpoint keeps
is what is trained. This file does not know losses, steps or the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from trainer.algorithm_config import AlgorithmConfig
from trainer.batching import MicroBatch
from trainer.forward import SampledTokens, sampled_logprobs, sampled_tokens
from trainer.ranks import ALONE, Ranks
from trainer.weights import checkpoint_activations, file_bytes, load_model, read_weights, stored_names

Tensors = dict[str, torch.Tensor]


class Policy:
    """A model of which everything is trained."""

    def __init__(self, directory: Path, config: AlgorithmConfig, *, device: str, ranks: Ranks = ALONE) -> None:
        """Load a model.

        Args:
            directory: the model directory.
            config: how to train.
            device: torch device.
            ranks: among which it is shared out.
        """
        self._config = config
        self._ranks = ranks
        self._moved = False
        self.model = load_model(directory, device)
        self._prepare()
        self.kept = self._names()
        """What a checkpoint keeps, by name in the model."""
        if config.activation_checkpointing:
            checkpoint_activations(self.model)
        # Which tensors are tied can only be seen while they are whole.
        ranks.shard(self.model)
        self.reference = self._second(directory, device) if config.kl else None

    def _prepare(self) -> None:
        """Decide what is trained."""

    def _names(self) -> list[str]:
        return stored_names(self.model)

    def _second(self, directory: Path, device: str) -> torch.nn.Module | None:
        model = load_model(directory, device).requires_grad_(requires_grad=False)
        self._ranks.shard(model)
        return model

    @property
    def vocabulary(self) -> int:
        """Number of ids the model knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    @property
    def context(self) -> int | None:
        """Most tokens that the model takes; None if its configuration does not say."""
        found = getattr(self.model.config, "max_position_embeddings", None)
        return int(found) if found else None

    def trained(self) -> list[torch.nn.Parameter]:
        """Return what the optimizer moves."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def look(self, micro: MicroBatch, *, entropy_gradient: bool = False, states: bool = False) -> SampledTokens:
        """Return what the policy says about the sampled tokens of a pass."""
        return sampled_tokens(
            self.model,
            micro,
            entropy_gradient=entropy_gradient,
            precision=self._config.precision,
            states=states,
        )

    def reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        """Return the log-probs under the reference, (P,); None without a KL term."""
        if self.reference is None:
            return None
        return sampled_logprobs(self.reference, micro, precision=self._config.precision)[0]

    def move_reference(self) -> None:
        """Make the policy as it is now the reference."""
        if self.reference is not None:
            self.reference.load_state_dict(self.model.state_dict())
            self._moved = True

    # ---- bytes; all ranks have to ask, and rank 0 alone has something to write

    def published(self) -> bytes:
        """Return the weight file of the policy as a whole model."""
        return file_bytes(self._gather(self.model, self.kept))

    def trained_bytes(self) -> bytes:
        """Return a weight file of what is trained."""
        return file_bytes(self._gather(self.model, self.kept))

    def restore(self, file: Path) -> None:
        """Put what `trained_bytes` returned in place."""
        self._put(self.model, read_weights(file, self.kept))

    def moved_reference(self) -> Tensors:
        """Return what a checkpoint keeps of a reference that was moved; nothing while the model directory tells it."""
        return self._gather(self.reference, self.kept) if self.reference is not None and self._moved else {}

    def restore_reference(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put what `moved_reference` returned in place."""
        if self.reference is not None:
            self._put(self.reference, state)
            self._moved = True

    def _gather(self, model: torch.nn.Module, names: Iterable[str]) -> Tensors:
        """Return tensors of a model, whole; those of other ranks would only be in their way."""
        tensors = model.state_dict()
        whole = ((name, self._ranks.whole(tensors[name])) for name in names)
        return {name: tensor for name, tensor in whole if self._ranks.rank == 0}

    def _put(self, model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
        tensors = model.state_dict()
        for name, value in values.items():
            tensors[name].copy_(self._ranks.part(value, tensors[name]))
