"""Names a tokenizer and its chat template by one digest, so that RUN and engine can tell whether they agree.

The digest is SHA-256 over the bytes of `tokenizer.json`, a zero byte, and the chat template: `chat_template.jinja`
if there is one, else the `chat_template` of `tokenizer_config.json`, else nothing. It does not load a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from infra.errors import ConfigError


class TokenizerMissing(ConfigError):
    """A model directory has no `tokenizer.json`, or a configuration beside it that cannot be read."""


def tokenizer_digest(directory: Path) -> str:
    """Return the digest of a model directory's tokenizer and chat template.

    Raises:
        TokenizerMissing: the directory has no `tokenizer.json`, or its configuration cannot be read.
    """
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        raise TokenizerMissing(
            f"no tokenizer.json in {directory}: save the fast tokenizer next to the model (save_pretrained)"
        )
    return hashlib.sha256(tokenizer.read_bytes() + b"\0" + chat_template(directory).encode()).hexdigest()


def chat_template(directory: Path) -> str:
    """Return the chat template of a model directory; empty if it has none. Raises TokenizerMissing."""
    template, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    try:
        if template.is_file():
            return template.read_text(encoding="utf-8")
        settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except ValueError as error:  # neither UTF-8 nor JSON
        raise TokenizerMissing(f"the chat template in {directory} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerMissing(f"{config} holds no JSON object")
    found = settings.get("chat_template", "")
    # Several named templates come as a list of {name, template}; then all of them are part of the identity.
    return found if isinstance(found, str) else json.dumps(found, sort_keys=True)
