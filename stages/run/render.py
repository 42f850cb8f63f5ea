"""Chat messages -> text -> token ids, by the tokenizer and the chat template of one model.

Which part of a conversation is rendered and encoded when is `conversation.py`: what the policy sampled never is. An end
of turn that the policy sampled is left out of the text behind it; where the answer lacks the template's one (cut by
length, ended by another stop id) that text brings it, unsampled. Needs `tokenizers` and jinja2, no torch. It does not
know engines, environments or the token record.

Source of the chat-template convention: the `chat_template` of Hugging Face's tokenizer_config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from infra.errors import ConfigError
from infra.inference.model_digest import chat_template, tokenizer_digest
from schemas.transcript import TokenIds

Messages = Sequence[dict[str, Any]]


_SEPARATOR = "\u2064"
"""Invisible. Who writes it around a control token has written the text of one."""

_NEVER = "(?!)"
"""Matches nothing: for a tokenizer without control tokens."""

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""Special tokens that a template may name."""

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What the longest sequence is called, by different families."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for those who train on text; rendered it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 wants it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what lies inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _today(form: str) -> str:
    """Return the present time in a form: some templates tell the model the date."""
    return datetime.now(UTC).strftime(form)


class Renderer:
    """Renders the conversations of one model.

    Attributes:
        digest: digest of tokenizer and template, compared with the backend's.
        stop_ids: ids that end an answer.
        context: longest sequence of the model, in tokens.
    """

    def __init__(self, directory: Path) -> None:
        """Load tokenizer and template.

        Args:
            directory: a Hugging Face model directory.

        Raises:
            ConfigError: a file is missing or holds no chat template.
        """
        self._directory = directory
        self._tokenizer = _load_tokenizer(directory)
        special = {number: t.content for number, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._special_ids = set(special)
        longest_first = sorted(special.values(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or _NEVER)
        self._marked = re.compile(f"{_SEPARATOR}({self._special.pattern}){_SEPARATOR}")
        settings = _load_json(directory / "tokenizer_config.json")
        self._template = _compile(_default_template(directory, settings), directory)
        self._end = _token_text(settings.get("eos_token"))
        self._names = {name: _token_text(settings.get(name)) for name in NAMED_TOKENS}
        self.stop_ids = self._find_stop_ids()
        self.context = _context(directory)
        self.digest = tokenizer_digest(directory)

    def render(self, messages: Messages, tools: Messages = ()) -> str:
        """Return the text of a prompt. Raises ConfigError if the template fails."""
        try:
            return self._template.render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=True, **self._names
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template in {self._directory} failed: {error}") from error

    @cached_property
    def _literal(self) -> Tokenizer:
        """A tokenizer for text in which nothing is a control token; few conversations need it."""
        literal = _load_tokenizer(self._directory)
        literal.encode_special_tokens = True
        return literal

    @cached_property
    def longest(self) -> int:
        """Most bytes of text that one token stands for, where each stands for its own text."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab())

    def as_text(self, content: str) -> str:
        """Return somebody's text with marks around what looks like control tokens, which `encode` writes as text."""
        return self._special.sub(rf"{_SEPARATOR}\g<0>{_SEPARATOR}", content)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text, shape (T,), int32; control tokens in it are such, but for those that are marked."""
        ids: list[int] = []
        for at, part in enumerate(self._marked.split(text)):
            if at % 2:
                ids += self._as_letters(part)
            elif part:
                # As a batch, for `encode` holds the interpreter's lock: a long text would stop the event loop.
                ids += self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return np.asarray(ids, dtype=np.int32)

    def _as_letters(self, special: str) -> list[int]:
        """Return ids that are no control token for the text of one."""
        ids: list[int] = self._literal.encode(special, add_special_tokens=False).ids
        if self._special_ids.isdisjoint(ids):
            return ids
        # A vocabulary of whole words has no other way to write it at once.
        return [number for letter in special for number in self._literal.encode(letter, add_special_tokens=False).ids]

    def glue(self, text: str, last: int) -> TokenIds:
        """Return the ids of the text behind an answer, shape (T,), int32.

        Args:
            text: as the template renders it.
            last: the id that the answer ends with; the end of turn is left out if that is one.
        """
        return self.encode(self._without(last, text) if last in self.stop_ids else text)

    def answer(self, text: str) -> TokenIds:
        """Return the ids of an answer that somebody else wrote, its end of turn included: for demonstrations."""
        return self.encode(text + self._end)

    def text(self, ids: TokenIds) -> str:
        """Return the text of an answer, without its end of turn.

        Special tokens inside stay visible: an answer that holds one is not the answer without it.
        """
        said = ids.tolist()
        if said and said[-1] in self.stop_ids:
            said.pop()
        decoded: str = self._tokenizer.decode(said, skip_special_tokens=False)
        return decoded

    def display(self, ids: TokenIds) -> str:
        """Return the text of ids with special tokens, for a person."""
        decoded: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return decoded

    def _without(self, end: int, glue: str) -> str:
        """Return the glue without the end of turn that is there already, and the white space that led to it."""
        text, rest = self._tokenizer.decode([end], skip_special_tokens=False), glue.lstrip()
        return rest.removeprefix(text) if text and rest.startswith(text) else glue

    def _find_stop_ids(self) -> tuple[int, ...]:
        path = self._directory / "generation_config.json"
        declared = _load_json(path).get("eos_token_id") if path.exists() else None
        if declared is None and self._end:
            declared = self._tokenizer.token_to_id(self._end)
        if declared is None or declared == []:
            raise ConfigError(f"{self._directory} names no end-of-turn token: set `eos_token` in tokenizer_config.json")
        return tuple(declared) if isinstance(declared, list) else (int(declared),)


def _load_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ConfigError(
            f"{directory} has no tokenizer.json: point `model` at a Hugging Face model directory with a fast tokenizer"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"{path} holds no tokenizer that `tokenizers` can read: {error}") from error


def _load_json(path: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: point `model` at a complete Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return loaded


def _context(directory: Path) -> int:
    """Return the longest sequence of a model; models of several kinds of input say it of their text."""
    path = directory / "config.json"
    config = _load_json(path)
    for part in (config, config.get("text_config") or {}):
        for name in CONTEXT_NAMES:
            if isinstance(part.get(name), int):
                return int(part[name])
    raise ConfigError(f"{path} does not say how long a sequence may be: set `max_position_embeddings` in it")


def _default_template(directory: Path, settings: dict[str, Any]) -> str:
    """Return the template for chats; tokenizer_config.json may hold several by name."""
    named = settings.get("chat_template")
    if isinstance(named, list) and not (directory / "chat_template.jinja").is_file():
        return next((str(item["template"]) for item in named if item["name"] == "default"), "")
    return chat_template(directory)


def _compile(text: str, directory: Path) -> jinja2.Template:
    if not text:
        raise ConfigError(f"{directory} has no chat template: neither chat_template.jinja nor tokenizer_config.json")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _today
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template in {directory} does not parse: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    """Write JSON as the convention does: unlike jinja2's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)


def _token_text(token: Any) -> str:
    """Return a special token's text: tokenizer_config.json writes it as text or as a map with `content`."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")
