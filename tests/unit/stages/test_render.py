"""Chat messages -> token ids: what the policy sampled stays as it was, and every turn extends the one before."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from stages.run.conversation import Conversation
from stages.run.render import Renderer
from tests.model_directory import BYTE_TEMPLATE, END, SPECIAL_TOKENS, WORD_TEMPLATE, byte_model, word_model

WORDS = ("go", "north", "key", "at", "take", "find")
TEXTS = st.lists(st.sampled_from([*WORDS, "unheard", "\n", " ", "é", "🗝", "<|user|>", "<|end|>"]), max_size=6).map(
    " ".join
) | st.text(max_size=12)
TOOLS = [{"name": "grep", "parameters": {"pattern": "text"}}]


@pytest.fixture(scope="module", params=["word", "byte"])
def renderer(request, tmp_path_factory):
    """A renderer over each kind of tokenizer that our models have."""
    directory = tmp_path_factory.mktemp(request.param)
    return Renderer(word_model(directory, WORDS) if request.param == "word" else byte_model(directory))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def followed(renderer, texts):
    """Return the conversation, and its ids as RUN collects them: opening, answer, what leads to the next, ..."""
    messages = [{"role": "system", "content": texts[0]}, user(texts[1])]
    conversation = Conversation(renderer, messages)
    ids = [conversation.opening()]
    for said, seen in zip(texts[2::2], texts[3::2], strict=False):
        answer = renderer.answer(said)
        behind = conversation.followed(said, [user(seen)], last=int(answer[-1]))
        assert not behind.rewritten
        ids += [answer, behind.ids]
        messages += [assistant(said), user(seen)]
    return messages, np.concatenate(ids)


def behind(renderer, last, *, opening="x", answer="a", then="y"):
    """Return the ids that lead from an answer, which ends with an id, to the next prompt."""
    conversation = Conversation(renderer, [user(opening)])
    conversation.opening()
    return conversation.followed(answer, [user(then)], last=last).ids


@given(texts=st.lists(TEXTS.map(str.strip), min_size=2, max_size=8))
def test_followed_turns_are_the_whole_conversation(renderer, texts):
    """Opening, answers and extensions together are what the template makes of everything said."""
    messages, ids = followed(renderer, texts)

    assert Conversation(renderer, messages).opening().tolist() == ids.tolist()


@pytest.mark.integration
def test_followed_turns_are_the_whole_conversation_for_the_models_of_the_trainer(tmp_path):
    """The same for the directories that the demo and the debug policy are made of."""
    pytest.importorskip("torch")
    from trainer.models import create_debug_model, create_wordlevel_model

    create_wordlevel_model(tmp_path / "word", seed=0, words=WORDS)
    create_debug_model(tmp_path / "debug", seed=0)
    for name, twin in (("word", word_model), ("debug", byte_model)):
        renderer = Renderer(tmp_path / name)
        messages, ids = followed(renderer, ["key at", "find key", "go north", "key at", "take <|end|>", "é 🗝"])
        mine = Renderer(twin(tmp_path / f"my {name}", *([WORDS] if name == "word" else [])))

        assert Conversation(renderer, messages).opening().tolist() == ids.tolist()
        assert Conversation(mine, messages).opening().tolist() == ids.tolist()


def test_an_answer_that_was_cut_gets_its_end_of_turn_with_the_next_prompt(renderer):
    """The model sees well-formed turns even where the policy could not finish one."""
    whole = renderer.answer("go north")
    end, cut = int(whole[-1]), whole[:-1]
    finished = behind(renderer, end, answer="go north")
    unfinished = behind(renderer, int(cut[-1]), answer="go north")

    assert [end, *finished.tolist()] == unfinished.tolist()


def test_the_text_of_an_answer_has_no_special_tokens_and_a_persons_view_has(renderer):
    """Handlers read what the policy said; people see what it sampled."""
    answer = renderer.answer("go north")

    assert renderer.text(answer).strip() == "go north"
    assert END in renderer.display(answer)


def test_an_answer_that_encodes_otherwise_is_not_encoded_again(tmp_path):
    """A policy may sample `a` `b` where the tokenizer would write `ab`; the next prompt does not touch it."""
    renderer = Renderer(byte_model(tmp_path, merges=(("a", "b"),)))
    a, b, both = (int(renderer.answer(text)[0]) for text in ("a", "b", "ab"))
    extension = behind(renderer, renderer.stop_ids[0], answer="ab", then="ab")

    assert renderer.text(np.array([a, b], np.int32)) == renderer.text(np.array([both], np.int32)) == "ab"
    assert both in extension.tolist()
    assert a not in extension.tolist()


def test_an_end_of_turn_that_is_not_the_eos_token_is_not_doubled(tmp_path):
    """Some models end a turn by another token than `eos_token` (Gemma): the stop ids tell, not the name."""
    byte_model(tmp_path, eos_token="<|pad|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    renderer = Renderer(tmp_path)
    end, pad = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index("<|pad|>")

    assert renderer.stop_ids == (0, 2)
    assert end not in behind(renderer, end).tolist()[:1]
    assert behind(renderer, pad).tolist()[0] == end


def test_white_space_before_the_end_of_turn_goes_with_it(tmp_path):
    """A template may write a space before the end of turn (Llama 2); the policy that sampled the end did not."""
    renderer = Renderer(byte_model(tmp_path, chat_template=WORD_TEMPLATE))
    extension = behind(renderer, renderer.stop_ids[0])

    assert renderer.display(extension).startswith(" <|user|> y")


def test_the_stop_ids_are_those_of_the_generation_config_else_the_eos_token(tmp_path):
    """The model's own list wins; its single number and the name in the tokenizer's settings are understood."""
    byte_model(tmp_path)
    assert Renderer(tmp_path).stop_ids == (SPECIAL_TOKENS.index(END),)

    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert Renderer(tmp_path).stop_ids == (1,)


def test_tools_are_rendered_as_the_convention_writes_json(tmp_path):
    """`tojson` keeps its indent and writes text as it is, or prompts would differ from those of training."""
    template = "{{ tools | tojson(indent=4) }}" + BYTE_TEMPLATE
    renderer = Renderer(byte_model(tmp_path, chat_template=template))
    tools = [{"name": "größe <b>"}]

    assert renderer.render([user("x")], tools).startswith(json.dumps(tools, indent=4, ensure_ascii=False))


def test_the_default_of_several_templates_is_used(tmp_path):
    """tokenizer_config.json may hold templates by name."""
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": BYTE_TEMPLATE}]

    prompt = Renderer(byte_model(tmp_path, chat_template=named)).render([user("x")])

    assert Renderer(byte_model(tmp_path / "plain")).render([user("x")]) == prompt


def test_two_directories_have_one_digest_when_they_render_alike(tmp_path):
    """The digest names tokenizer and template, so that RUN and engine can tell whether they agree."""
    one, same = byte_model(tmp_path / "1"), byte_model(tmp_path / "2", pad_token=None)
    other = byte_model(tmp_path / "3", chat_template=WORD_TEMPLATE)

    assert Renderer(one).digest == Renderer(same).digest != Renderer(other).digest


def broken(tmp_path, name, text=None):
    byte_model(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_templates_use_beside_jinja_is_there(tmp_path):
    """Marks for those who train on text, the date, and any special token by its name."""
    template = "{{ unk_token }}{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}" + BYTE_TEMPLATE
    said = Renderer(byte_model(tmp_path, chat_template=template)).render([user("x")])

    assert re.match(r"<\|unknown\|>20\d\d<\|user\|>x", said)


def test_the_context_of_a_model_of_several_kinds_of_input_is_that_of_its_text(tmp_path):
    """Its settings lie one level down; other families call it by another name."""
    byte_model(tmp_path)
    for config in ({"text_config": {"max_position_embeddings": 131_072}}, {"n_positions": 131_072}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert Renderer(tmp_path).context == 131_072


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", "{}", "does not say how long a sequence may be"),
        ("tokenizer.json", None, "has no tokenizer.json: point `model` at"),
        ("tokenizer.json", "{}", "holds no tokenizer that"),
        ("tokenizer_config.json", None, "tokenizer_config.json is missing: point `model` at"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("config.json", None, "config.json is missing"),
        ("tokenizer_config.json", '{"eos_token": "<|end|>"}', "has no chat template"),
        ("chat_template.jinja", "{% if %}", "does not parse"),
        ("tokenizer_config.json", json.dumps({"chat_template": BYTE_TEMPLATE}), "names no end-of-turn token"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": BYTE_TEMPLATE, "eos_token": "<|nowhere|>"}),
            "names no end-of-turn token",
        ),
        ("generation_config.json", '{"eos_token_id": []}', "names no end-of-turn token"),
    ],
)
def test_a_directory_that_cannot_be_rendered_from_says_what_is_missing(tmp_path, name, text, says):
    """The error names the directory and what to do, before any work starts."""
    with pytest.raises(ConfigError, match=says) as caught:
        Renderer(broken(tmp_path, name, text))

    assert str(tmp_path) in str(caught.value)


def test_a_template_that_refuses_the_conversation_says_why(tmp_path):
    """`raise_exception` is part of the convention."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    renderer = Renderer(byte_model(tmp_path, chat_template=template))

    with pytest.raises(ConfigError, match="no system role"):
        renderer.render([{"role": "system", "content": "be good"}])
