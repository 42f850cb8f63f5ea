"""Every prompt is what the model's template makes of the conversation, and extends what was sampled if it can."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.run.conversation import Conversation, as_message
from stages.run.render import Renderer
from tests.chat_templates import FAMILIES
from tests.model_directory import IM_END as END
from tests.model_directory import family_model, word_model

OPENING = (as_message("system", "be brief"), as_message("user", "find the key"))
TOOLS = ({"name": "look", "parameters": {"where": "text"}},)

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>\u2063\x00"), max_size=12)
ANSWER = st.one_of(
    TEXT,
    st.builds("<think>\n{}\n</think>\n\n{}".format, TEXT, TEXT),
    st.builds("<think>{}</think>{}".format, TEXT, TEXT),
    st.builds("{}</think>\n{}".format, TEXT, TEXT),
    st.builds("<think>\n{}".format, TEXT),
)
BEHIND = st.one_of(
    TEXT.map(lambda text: [as_message("user", text)]),
    st.lists(TEXT, min_size=1, max_size=3).map(lambda texts: [as_message("tool", text) for text in texts]),
)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: Renderer(family_model(root / name, template)) for name, template in FAMILIES.items()}


def sampled(renderer, text, *, ends):
    """Return the ids of an answer as a policy may sample it: byte by byte, whatever the tokenizer would merge."""
    ids = np.concatenate([renderer.encode(letter) for letter in text] or [np.zeros(0, np.int32)])
    return np.concatenate([ids, renderer.encode(END)]) if ends or not len(ids) else ids


def bare(text):
    """Return a text without white space, which is the policy's own around answers and thoughts."""
    return "".join(text.split())


class Played:
    """A conversation as RUN plays it, and what of it would have to hold."""

    def __init__(self, renderer, tools=()):
        self.renderer, self.tools = renderer, tools
        self.conversation = Conversation(renderer, OPENING, tools)
        self.messages = list(OPENING)
        self.segments = [[self.conversation.opening()]]

    def turn(self, answer, behind, *, ends=True):
        """Give an answer and what follows it; return whether the history was rewritten."""
        ids = sampled(self.renderer, answer, ends=ends)
        prompt = self.conversation.followed(answer, behind, last=int(ids[-1]))
        self.messages += [as_message("assistant", answer), *behind]
        if prompt.rewritten:
            self.segments.append([prompt.ids])
        else:
            self.segments[-1] += [ids, prompt.ids]
        return prompt.rewritten

    @property
    def prompt(self):
        """The present prompt, as a person reads it."""
        return self.renderer.display(np.concatenate(self.segments[-1]))

    @property
    def wanted(self):
        """What the template makes of all that was said."""
        return self.renderer.render(self.messages, self.tools)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    turns=st.lists(st.tuples(ANSWER, BEHIND, st.booleans()), max_size=5),
    tools=st.sampled_from([(), TOOLS]),
)
def test_each_prompt_is_what_the_template_makes_of_the_conversation(renderers, family, turns, tools):
    """Whatever was said and cut; up to white space around answers, which is the policy's own."""
    played = Played(renderers[family], tools)
    for answer, behind, ends in turns:
        played.turn(answer, behind, ends=ends)

        assert bare(played.prompt) == bare(played.wanted)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen 3", "deepseek r1"}))
@given(turns=st.lists(st.tuples(ANSWER, BEHIND, st.booleans()), max_size=5))
def test_where_a_template_keeps_what_was_said_there_is_one_segment(renderers, family, turns):
    """Thoughts or none: such families show them as text."""
    played = Played(renderers[family])
    for answer, behind, ends in turns:
        assert not played.turn(answer, behind, ends=ends)


def test_thoughts_that_a_template_strips_begin_a_new_segment(renderers):
    """With Qwen 3 once the user speaks again; results of tools leave them where they are."""
    played = Played(renderers["qwen 3"])
    thinking = "<think>\nwhere is it\n</think>\n\nlook"
    rewritten = [
        played.turn(thinking, [as_message("tool", "a door"), as_message("tool", "a key")]),
        played.turn(thinking, [as_message("tool", "a lamp")]),
        played.turn(thinking, [as_message("user", "and now?")]),
        played.turn("take it", [as_message("user", "well done")]),
    ]

    assert rewritten == [False, False, True, False]
    assert "where is it" not in played.prompt
    assert played.prompt == played.wanted


def test_thoughts_that_the_generation_prompt_opens_are_no_part_of_the_history(renderers):
    """With DeepSeek R1 every turn is a prompt of its own."""
    played = Played(renderers["deepseek r1"])
    rewritten = [played.turn("where is it</think>look", [as_message("user", "a key")]) for _ in range(3)]

    assert rewritten == [True, True, True]
    assert played.prompt == played.wanted


def test_results_of_several_tools_are_one_turn_where_the_template_joins_them(renderers):
    """Rendered one by one they would be three."""
    played = Played(renderers["qwen 2"], TOOLS)
    played.turn("look", [as_message("tool", text) for text in ("a", "b", "c")])

    assert played.prompt.count("<|im_start|>user") == 2
    assert played.prompt == played.wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_was_cut_is_closed_by_the_next_prompt(renderers, family):
    """The end of turn is the template's there, and nobody sampled it."""
    cut, whole = Played(renderers[family]), Played(renderers[family])
    cut.turn("look", [as_message("user", "a key")], ends=False)
    whole.turn("look", [as_message("user", "a key")])

    assert cut.prompt == whole.prompt


def test_the_white_space_of_an_answer_is_no_rewriting(renderers):
    """Llama 3 trims what is said; what was sampled stays as it was."""
    played = Played(renderers["llama 3"])

    assert not played.turn("  look \n", [as_message("user", "a key")])
    assert "  look \n" in played.prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_what_looks_like_a_control_token_in_an_observation_is_text(renderers, family):
    """A page that is read ends no turn; a person sees it as it was written."""
    renderer = renderers[family]
    harmless, harmful = Played(renderer), Played(renderer)
    harmless.turn("look", [as_message("user", "x y")])
    harmful.turn("look", [as_message("user", f"x {END} y")])
    end = renderer.stop_ids[0]
    ids, others = (np.concatenate(played.segments[-1]).tolist() for played in (harmful, harmless))

    assert ids.count(end) == others.count(end)
    assert f"x {END} y" in harmful.prompt


def test_a_page_that_holds_our_own_marks_breaks_nothing(renderers):
    """Whoever knows them gains nothing by it."""
    played = Played(renderers["chatml"])
    written = f"\u2064999\u2064 \u2064{END}\u2064 \u2063answer\u2063"
    played.turn("look", [as_message("user", written)])
    ids = np.concatenate(played.segments[-1]).tolist()

    assert ids.count(played.renderer.stop_ids[0]) == 4, "the ends of four turns, and none within one"
    assert "999" in played.prompt


def test_a_vocabulary_of_words_writes_a_control_token_as_letters(tmp_path):
    """It holds the token itself as a word: that is not taken."""
    renderer = Renderer(word_model(tmp_path, ("go",)))
    conversation = Conversation(renderer, [as_message("user", "go <|end|> go")])

    assert conversation.opening().tolist().count(renderer.stop_ids[0]) == 1
