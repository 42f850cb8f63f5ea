import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trainer.models import END, SPECIAL_TOKENS, create_debug_model, create_wordlevel_model  # noqa: E402

WORDS = ("go", "north", "key", "at", "take")
MESSAGES = [
    {"role": "system", "content": "key at"},
    {"role": "user", "content": "key  north"},
    {"role": "assistant", "content": "go north"},
    {"role": "user", "content": "key at"},
]


def render(tokenizer, messages, *, prompt=False):
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=prompt, return_dict=False)


@pytest.fixture(scope="module", params=["wordlevel", "debug"])
def directory(request, tmp_path_factory):
    """A model directory of each kind."""
    path = tmp_path_factory.mktemp(request.param) / "model"
    if request.param == "wordlevel":
        create_wordlevel_model(path, seed=7, words=WORDS)
    else:
        create_debug_model(path, seed=7)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_transformers_loads_what_was_written(directory, tokenizer):
    """Model and tokenizer load by their auto classes and agree on the vocabulary and the stop token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids(END) == tokenizer.eos_token_id
    ids = torch.tensor([render(tokenizer, MESSAGES, prompt=True)])
    assert torch.isfinite(model(ids).logits).all()


def test_special_tokens_are_single_ids(tokenizer):
    """Each special token is one id, and text around it does not change it."""
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]


def test_a_longer_conversation_extends_the_tokens_of_a_shorter_one(tokenizer):
    """The renderer only ever appends, so that sampled tokens stay where they were sampled."""
    shorter = render(tokenizer, MESSAGES[:2], prompt=True)
    longer = render(tokenizer, MESSAGES, prompt=True)
    assert longer[: len(shorter)] == shorter


def test_a_sampled_answer_reads_back_as_it_is_rendered(tokenizer):
    """Prompt, answer and the end token are exactly the rendered message, and decode to its text."""
    prompt = render(tokenizer, MESSAGES[:2], prompt=True)
    whole = render(tokenizer, MESSAGES[:3])
    answer = whole[len(prompt) :]
    assert tokenizer.decode(answer[:-1]).strip() == "go north"
    assert tokenizer.decode(answer[-1:]) == END


def test_unknown_words_are_one_visible_token(tmp_path):
    """A word outside the vocabulary neither disappears nor fails."""
    create_wordlevel_model(tmp_path, seed=0, words=WORDS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode("go home", add_special_tokens=False)) == "go <|unknown|>"


def test_bytes_survive_the_debug_tokenizer(tmp_path):
    """The debug model reads and writes any text."""
    create_debug_model(tmp_path, seed=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "  two\n lines, ünïcode 字\t!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path):
    """The same seed writes the same bytes; the caller's random state is neither used nor moved."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    create_wordlevel_model(tmp_path / "a", seed=3, words=WORDS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    create_wordlevel_model(tmp_path / "b", seed=3, words=reversed(WORDS))
    create_wordlevel_model(tmp_path / "c", seed=4, words=WORDS)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("words", [[], ["go north"], [""], [END]])
def test_words_that_cannot_be_tokens_are_refused(tmp_path, words):
    """White space, nothing and special tokens are no words; nothing is written."""
    with pytest.raises(ValueError, match="word-level vocabulary"):
        create_wordlevel_model(tmp_path / "model", seed=0, words=words)
    assert not (tmp_path / "model").exists()


def test_the_template_is_in_the_tokenizer_config(directory):
    """A reader without transformers finds the chat template in one file."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert "<|assistant|>" in config["chat_template"]
