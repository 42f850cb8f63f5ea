"""Model directories without a model: tokenizer, template and context, as `trainer/models.py` writes them, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
IM_END = "<|im_end|>"
"""Ends a turn of the other families' models."""
SPECIAL_TOKENS = (PAD, UNKNOWN, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + space + (message['content'] | trim) + space + '<|end|>' + space }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
WORD_TEMPLATE = "{%- set space = ' ' -%}" + TEMPLATE
BYTE_TEMPLATE = "{%- set space = '' -%}" + TEMPLATE


def word_model(directory: Path, words: tuple[str, ...], **changes: Any) -> Path:
    """Write a directory whose tokens are whole words."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *sorted(set(words))])}
    tokenizer = Tokenizer(WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return write_model(directory, tokenizer, **{"chat_template": WORD_TEMPLATE, **changes})


def byte_model(directory: Path, merges: tuple[tuple[str, str], ...] = (), **changes: Any) -> Path:
    """Write a directory whose tokens are bytes and the given merges of two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return write_model(directory, tokenizer, **{"chat_template": BYTE_TEMPLATE, **changes})


def family_model(directory: Path, template: str, **changes: Any) -> Path:
    """Write a directory with another family's template, and a tokenizer that writes a text in one of several ways.

    Its tokens are bytes and some merges that overlap, so what a policy sampled is not what the tokenizer would write.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("b", "c")]
    vocabulary = [IM_END, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(IM_END, special=True, normalized=False)])
    settings = {"chat_template": template, "eos_token": IM_END, "bos_token": "", "pad_token": None, **changes}
    return write_model(directory, tokenizer, **settings)


def write_model(directory: Path, tokenizer: Tokenizer, *, context: int = 1024, **settings: Any) -> Path:
    """Write a directory around a tokenizer; `settings` go to tokenizer_config.json, None leaves one out."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END, **settings}
    written = {name: value for name, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(written))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return directory
