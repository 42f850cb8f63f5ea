"""LoRA: low-rank adapters beside the linear layers of a model that stays as it is (Hu et al. 2021), by `peft`.

    y = W x + (alpha / rank) * B A x     A: (rank, in), random;  B: (out, rank), 0 at first;  only A, B are trained

The reference of the KL term is the same model with its adapters off, or with the ones it had when the reference was
moved: no second model is in memory. What is published has W + (alpha / rank) * B A in place of W, made anew from W each
time: adding and subtracting in place would change W bit by bit. A checkpoint keeps A and B alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from infra.errors import ConfigError
from trainer.algorithm_config import AlgorithmConfig, Lora
from trainer.batching import MicroBatch
from trainer.forward import sampled_logprobs
from trainer.policy import Policy, Tensors
from trainer.ranks import ALONE, Ranks
from trainer.weights import file_bytes, stored_names

_BASE = ".base_layer."
"""In the name of what stays as it is."""

_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""Ends of the names of A and B."""


class AdaptedPolicy(Policy):
    """A model of which only adapters are trained."""

    def __init__(
        self,
        directory: Path,
        config: AlgorithmConfig,
        lora: Lora,
        *,
        seed: int,
        device: str,
        ranks: Ranks = ALONE,
    ) -> None:
        """Load a model and put adapters beside it.

        Args:
            directory: the model directory.
            config: how to train.
            lora: which adapters.
            seed: decides A.
            device: torch device.
            ranks: among which it is shared out.

        Raises:
            ConfigError: the model has no such layers, or they cannot have an adapter.
        """
        self._lora = lora
        self._seed = seed
        self._reference_state: Tensors = {}
        super().__init__(directory, config, device=device, ranks=ranks)

    def _prepare(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            put_adapters(self.model, self._lora)

    def _names(self) -> list[str]:
        self._whole = stored_names(self.model)
        return [name for name in self._whole if name.endswith((_DOWN, _UP))]

    def _second(self, directory: Path, device: str) -> None:
        return None

    def reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        """Return the log-probs under the reference, (P,); None without a KL term."""
        if not self._config.kl:
            return None
        with self._as_reference():
            return sampled_logprobs(self.model, micro, precision=self._config.precision)[0]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Let the model be the reference for a while."""
        if not self._reference_state:
            with without_adapters(self.model):
                yield
            return
        now = self._adapters()
        self._put(self.model, self._reference_state)
        try:
            yield
        finally:
            self._put(self.model, now)

    def _adapters(self) -> Tensors:
        """Return a copy of the adapters as they are now; of this rank's part."""
        tensors = self.model.state_dict()
        return {name: tensors[name].clone() for name in self.kept}

    def move_reference(self) -> None:
        """Make the policy as it is now the reference."""
        self._reference_state = self._adapters()

    def published(self) -> bytes:
        """Return the weight file of the policy as a whole model, without adapters."""
        # On the CPU, as from a checkpoint: a GPU rounds otherwise, and the two would have different digests.
        tensors = {name: tensor.cpu() for name, tensor in self._gather(self.model, self._whole).items()}
        return file_bytes(merged(tensors, self._lora.alpha / self._lora.rank))

    def moved_reference(self) -> Tensors:
        """Return what a checkpoint keeps of a reference that was moved; nothing while the model directory tells it."""
        return {name: self._ranks.whole(tensor) for name, tensor in self._reference_state.items()}

    def restore_reference(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put what `moved_reference` returned in place."""
        tensors = self.model.state_dict()
        self._reference_state = {name: self._ranks.part(tensor, tensors[name]) for name, tensor in state.items()}


def whole_weights(model: Path, file: Path, lora: Lora | None) -> bytes:
    """Return the weights of a checkpoint as those of a whole model: it keeps adapters alone where those are trained.

    Args:
        model: the model directory that the run began with.
        file: weights of a checkpoint.
        lora: the run's adapters, if it has any.

    Raises:
        ConfigError: the adapters are of another model.
    """
    if lora is None:
        return file.read_bytes()
    policy = AdaptedPolicy(model, AlgorithmConfig(lora=lora), lora, seed=0, device="cpu")
    try:
        policy.restore(file)
    except RuntimeError as error:  # torch's word for tensors of another shape
        raise ConfigError(f"{file} holds adapters of another model than {model}: {error}") from error
    return policy.published()


def put_adapters(model: torch.nn.Module, lora: Lora) -> None:
    """Put adapters beside layers of a model; nothing else of it can be trained after that.

    Raises:
        ConfigError: the model has no such layers, or they cannot have an adapter.
    """
    # Takes seconds to import, and most runs train the whole model.
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415

    _check_targets(model, lora)
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets, bias="none")
    inject_adapter_in_model(settings, model)


def _check_targets(model: torch.nn.Module, lora: Lora) -> None:
    if isinstance(lora.targets, str):
        return
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    for target in lora.targets:
        found = {name: module for name, module in modules.items() if f".{name}".endswith(f".{target}")}
        odd = [name for name, module in found.items() if type(module) is not torch.nn.Linear]
        tied = [name for name, module in found.items() if any(uses[id(p)] > 1 for p in module.parameters())]
        if not found or odd or tied:
            linear = sorted({n.rpartition(".")[2] for n, m in modules.items() if type(m) is torch.nn.Linear})
            why = (
                f"{odd[0]} is no linear layer"
                if odd
                else f"{tied[0]} shares its weights with another layer, which would change too"
                if tied
                else "no layer of the model ends with it"
            )
            raise ConfigError(f"algorithm.lora.targets: {target!r}: {why}; the model has {linear}")


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Let a model be what it was before it had adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def merged(tensors: Mapping[str, torch.Tensor], scale: float) -> Tensors:
    """Return the tensors of the model that computes the same without adapters.

    Args:
        tensors: of a model with adapters, by name.
        scale: alpha / rank.
    """
    whole: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith((_DOWN, _UP)):
            continue
        layer, base, rest = name.rpartition(_BASE)
        if base and rest == "weight":
            change = (tensors[layer + _UP] @ tensors[layer + _DOWN]) * scale
            # -0.0 + 0.0 is 0.0: a model whose adapters are still empty keeps its very bytes, and its digest.
            whole[f"{layer}.weight"] = torch.where(change == 0, tensor, tensor + change)
        else:
            whole[f"{layer}.{rest}" if base else name] = tensor
    return whole
