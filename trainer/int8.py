"""A model folder in a quarter of its size: the weights of linear layers as int8, each row with a scale.

Weights only, so nothing has to be measured on data; embeddings, norms and a tied output layer stay float32. torchao
does it, since transformers loads what it wrote as it is, on a CPU as well: quanto's models it cannot save, and
bitsandbytes is six times as large and computes in float16. Importing it takes seconds, so nothing else does.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from infra.errors import ConfigError
from infra.inference.weight_files import WEIGHTS_FILE


def require_int8() -> None:
    """Raise ConfigError if the package is missing."""
    if find_spec("torchao") is None:
        raise ConfigError(
            "an int8 model is made, and loaded, by the package torchao, which is not installed: "
            "pip install 'rollmill[int8]', or leave --int8 out"
        )


def to_int8(folder: Path) -> None:
    """Put int8 weights, and a config that says so, in the place of a folder's own; blocking.

    Raises:
        ConfigError: the package is missing, or the model has no weights that can be made smaller.
    """
    require_int8()
    from torchao.quantization import Int8WeightOnlyConfig  # noqa: PLC0415 - an extra
    from transformers import AutoModelForCausalLM, TorchAoConfig  # noqa: PLC0415 - beside it

    file = folder / WEIGHTS_FILE
    before = file.stat().st_size
    rule = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=rule, dtype="float32", local_files_only=True
    )
    file.unlink()
    model.save_pretrained(folder, max_shard_size="1TB")  # one file, as everywhere here
    if file.stat().st_size >= before:
        raise ConfigError("no layer of this model could be made smaller as int8: export it without --int8")
