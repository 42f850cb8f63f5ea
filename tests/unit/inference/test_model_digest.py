"""One name for a tokenizer and its chat template."""

from __future__ import annotations

import json

import pytest

from infra.inference.model_digest import TokenizerMissing, chat_template, tokenizer_digest


def test_the_digest_depends_on_tokenizer_and_template_only(tmp_path):
    """Other files of the directory do not matter; a template in either place does."""
    (tmp_path / "tokenizer.json").write_text("{}")
    bare = tokenizer_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"padding_side": "left"}')
    assert tokenizer_digest(tmp_path) == bare
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "T"}))
    in_config = tokenizer_digest(tmp_path)
    assert in_config != bare
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("T")
    assert tokenizer_digest(tmp_path) == in_config


def test_the_template_file_wins_over_the_configuration(tmp_path):
    """As in transformers."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("new")
    assert chat_template(tmp_path) == "new"


def test_no_tokenizer_is_named(tmp_path):
    """The error says what to save."""
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json"):
        tokenizer_digest(tmp_path)
