"""A random Llama of a few thousand parameters, and the log-probs that plain transformers gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY = 61
CONTEXT = 256


def save_tiny_llama(directory: Path, *, seed: int, kv_heads: int = 4, tied: bool = True, hidden: int = 32) -> Path:
    """Write a model directory and return it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        # Larger than usual, so that the distributions are far from uniform.
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def tiny_llamas(folder: Path) -> dict[str, Path]:
    """Write a model, another one of its shape, and one whose heads share keys and whose ends are not tied."""
    return {
        "plain": save_tiny_llama(folder / "plain", seed=0),
        "other": save_tiny_llama(folder / "other", seed=1),
        "grouped": save_tiny_llama(folder / "grouped", seed=2, kv_heads=2, tied=False),
    }


def plain_logprobs(directory: Path, prompt: list[int], answer: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return the log-prob of each answer token by one forward pass over the whole sequence, without any cache."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    rows = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1).numpy()
