"""Model directories made from nothing: the demo's word-level policy and the debug model.

Each is what `save_pretrained` would have written (`config.json`, `model.safetensors`, `tokenizer.json`,
`tokenizer_config.json` with the chat template), so every loader that reads a model directory reads these.

Invariants: a seed and the arguments decide every byte of the weights; rendering a longer conversation extends the
tokens of the shorter one; all special tokens are single ids, and `<|end|>` ends a turn. It does not know any task:
the words of a vocabulary are an argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

PAD: Final = "<|pad|>"
UNKNOWN: Final = "<|unknown|>"
END: Final = "<|end|>"
"""Ends every message, the policy's too: the stop token of generation."""
ROLES: Final = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS: Final[tuple[str, ...]] = (PAD, UNKNOWN, END, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + space + (message['content'] | trim) + space + '<|end|>' + space }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""Renders `<|user|> key at <|end|> <|assistant|> take <|end|>`; `space` is what stands between the parts.

Content is trimmed, so that what the policy sampled and what is rendered for it later are the same tokens.
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a decoder-only transformer."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Attention heads of a block; they share out the width."""
    intermediate: int
    """Width of the feed-forward part."""
    context: int
    """Longest sequence, in tokens."""
    spread: float = 0.02
    """Standard deviation of the initial weights."""


WORDLEVEL_SHAPE: Final = Shape(hidden=128, layers=4, heads=4, intermediate=512, context=1024, spread=0.06)
"""About one million parameters: learns the demo's task on one core in a minute or two.

So narrow a model starts slowly from the usual spread of 0.02; three times that halves its warm start.
"""

DEBUG_SHAPE: Final = Shape(hidden=64, layers=2, heads=2, intermediate=128, context=8192)
"""Just enough to exercise every path of a real model."""


def create_wordlevel_model(directory: Path, *, seed: int, words: Iterable[str], shape: Shape = WORDLEVEL_SHAPE) -> None:
    """Write a randomly initialised model whose tokens are whole *words*.

    Words outside the vocabulary become `<|unknown|>`; white space only separates and is not kept.
    """
    vocabulary = sorted(set(words))
    broken = [word for word in vocabulary if not word or word.split() != [word] or word in SPECIAL_TOKENS]
    if broken or not vocabulary:
        raise ValueError(f"a word-level vocabulary needs non-empty words without white space, got {broken or 'none'}")
    ids = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *vocabulary])}
    tokenizer = Tokenizer(WordLevel(vocab=ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([_special(token) for token in SPECIAL_TOKENS])
    # White space separates word-level tokens, and the tokenizer drops it again.
    _write(directory, tokenizer, "{%- set space = ' ' -%}" + CHAT_TEMPLATE, shape, seed)


def create_debug_model(directory: Path, *, seed: int, shape: Shape = DEBUG_SHAPE) -> None:
    """Write a byte-level model of two layers and random weights: it answers noise, and earns nothing, honestly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_special(token) for token in SPECIAL_TOKENS])
    # Bytes are all kept, so the template adds none of its own.
    _write(directory, tokenizer, "{%- set space = '' -%}" + CHAT_TEMPLATE, shape, seed)


def _special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False, lstrip=False, rstrip=False)


def _write(directory: Path, tokenizer: Tokenizer, template: str, shape: Shape, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(template, shape))
    config = _model_config(tokenizer, shape)
    # The caller's own random state is not touched: a model is its seed's, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # A bar for one small file would only break the progress that the caller shows.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


def _tokenizer_config(template: str, shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "chat_template": template,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }


def _model_config(tokenizer: Tokenizer, shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        initializer_range=shape.spread,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.token_to_id(PAD),
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        dtype="float32",
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
