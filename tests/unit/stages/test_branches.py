"""The calls of an agent become one token record in which nothing is lost, repeated or encoded again."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import Failure
from infra.inference.base import PROCESSED_LOGPROBS, Generation, ModelInfo, VersionSpan
from schemas import transcript
from schemas.identity import sampling_seed
from schemas.outcome import StopReason
from schemas.transcript import Sampling
from stages.run.api_error import ApiError, LimitReached
from stages.run.branches import Branches
from stages.run.chat import read_call
from stages.run.chat_wire import events, finish_reason, message
from stages.run.render import Renderer
from tests.chat_templates import FAMILIES
from tests.logs import make_task
from tests.model_directory import IM_END, family_model

ENGINE = ModelInfo(
    model="m", tokenizer_digest="", max_model_len=8192, version=3, dtype="float32", logprobs_mode=PROCESSED_LOGPROBS
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>\u2063\u2064\x00"), max_size=8)
ANSWER = st.one_of(
    TEXT, TEXT.map(lambda text: text + LOOK), st.builds("<think>\n{}\n</think>\n\n{}".format, TEXT, TEXT)
)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: Renderer(family_model(root / name, text, context=8192)) for name, text in FAMILIES.items()}


@pytest.fixture
def renderer(renderers):
    return renderers["qwen 2"]


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def bare(text):
    """Return a text without white space, which is the policy's own around answers."""
    return "".join(text.split())


class Played:
    """An episode as the proxy plays it, with what of it would have to hold."""

    def __init__(self, renderer, *, context=8192, **task):
        fields = {"horizon": 100, "max_sampled_tokens": 10_000, "sampling": Sampling(max_tokens=500), **task}
        self.task, self.renderer = make_task(**fields), renderer
        self.branches = Branches(self.task, renderer, replace(ENGINE, max_model_len=context))
        self.raw = {}
        """An answer, as the agent has it -> as it was sampled."""
        self.answered = {}
        """First log-prob of an answer, which names it -> its ids, and the text of its prompt as it should be."""
        self.now_ms = 0

    def ask(self, messages, tools=(), **fields):
        """Make a call and return what to sample."""
        self.now_ms += 1
        body = {"messages": messages, **fields, **({"tools": list(tools)} if tools else {})}
        return self.branches.ask(read_call(json.dumps(body).encode()), self.now_ms)

    def take(self, ask, text, *, ends=True, finish="stop"):
        """Answer a call with a text, sampled byte by byte; return the assistant's message."""
        return message(self.answer(ask, text, ends=ends, finish=finish))

    def answer(self, ask, text, *, ends=True, finish="stop"):
        """The same, and return all of the answer."""
        self.now_ms += 1
        ids = self.ids(text, ends=ends)
        mark = -1.0 - len(self.answered)
        given = Generation(
            token_ids=ids,
            logprobs=np.linspace(mark, mark - 0.5, len(ids), dtype=np.float32),
            finish_reason=finish,
            versions=(VersionSpan(start=0, stop=len(ids), version=3),),
        )
        wanted = self.renderer.render(self.shown(ask.call.messages), ask.call.tools)
        answer = self.branches.take(ask, given, ENGINE, self.now_ms)
        self.answered[mark] = (ids[: answer.sampled_tokens], wanted)
        self.raw[self.key(message(answer))] = self.renderer.text(ids[: answer.sampled_tokens])
        return answer

    def say(self, messages, text, tools=(), **fields):
        """Ask and answer, and return the conversation as the agent has it then."""
        return [*messages, self.take(self.ask(messages, tools, **fields), text)]

    def ids(self, text, *, ends=True):
        letters = [self.renderer.encode(letter) for letter in text]
        return np.concatenate([*letters, self.renderer.encode(IM_END)] if ends or not letters else letters)

    def key(self, said):
        calls = [call["function"]["arguments"] for call in said.get("tool_calls") or []]
        return json.dumps([(said["content"] or "").strip(), calls])

    def shown(self, messages):
        """Return messages for the template, ours as they were sampled."""
        found = []
        for said in messages:
            calls = [{"function": {"arguments": call.arguments}} for call in said.calls]
            key = self.key({"content": said.content, "tool_calls": calls})
            text = self.raw.get(key, said.content) if said.role == "assistant" else said.content
            found.append({"role": said.role, "content": text})
        return found

    def record(self):
        """Return the transcript after everything that must hold for it was checked."""
        record = self.branches.transcript()
        transcript.check(record)
        ids, logprobs, answered = record.token_ids, record.logprob_array, dict(self.answered)
        for turn in record.turns:
            sampled, wanted = answered.pop(float(logprobs[turn.sampled]))
            start = max(start for start in record.segments if start <= turn.start)
            assert sampled.tolist() == ids[turn.sampled : turn.stop].tolist()
            assert bare(wanted) == bare(self.renderer.display(ids[start : turn.sampled]))
        assert not answered, "an answer is missing"
        return record


class Agent:
    """An agent with a conversation of its own, one call at a time."""

    def __init__(self, played, prompt):
        self.played, self.pending = played, None
        self.history = [system(prompt), user("begin")]

    def act(self, what, text, *, ends, other):
        """Do one thing, if it can be done now."""
        if self.pending is None:
            if what == "take over":
                self.history = other.history
            elif what == "rewrite":
                self.history = [self.history[0], user(text)]
            elif what == "back" and len(self.history) > 3:
                self.history = [*self.history[:-3], user(text)]
            self.pending = self.played.ask(self.history, [TOOL])
        elif what == "drop":
            self.played.branches.give_up(self.pending.number)
            self.pending = None
        else:
            said = self.played.take(self.pending, text, ends=ends)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": text} for call in said.get("tool_calls", [])
            ]
            self.history = [*self.history, said, *(results or [user(text)])]
            self.pending = None


@pytest.mark.parametrize("family", ["chatml", "qwen 2", "qwen 3", "deepseek r1", "llama 3", "mistral"])
@given(
    prompts=st.lists(st.sampled_from(["be brief", "be kind"]), min_size=1, max_size=3),
    moves=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["go", "go", "go", "go", "drop", "rewrite", "back", "take over"]),
            ANSWER,
            st.booleans(),
        ),
        max_size=16,
    ),
)
def test_any_interleaving_of_several_agents_is_one_sound_record(renderers, family, prompts, moves):
    """Each sampled id is there once with its log-prob, behind a prompt that is what the template makes of its call."""
    played = Played(renderers[family])
    agents = [Agent(played, prompt) for prompt in prompts]
    for number, what, text, ends in moves:
        agents[number % len(agents)].act(what, text, ends=ends, other=agents[0])

    if not played.branches.empty:
        played.record()


def test_a_conversation_that_grows_is_one_segment(renderer):
    """Each prompt extends all tokens before it; nothing is encoded again."""
    played = Played(renderer)
    history = played.say([system("be brief"), user("hello")], "abc")
    ask = played.ask([*history, user("more")])
    first = played.branches.transcript()

    assert ask.prompt[: len(first.token_ids)].tolist() == first.token_ids.tolist()
    played.take(ask, "bc")
    record = played.record()
    assert ((0,), 2) == (record.segments, len(record.turns))
    assert (1, 2, 3) == (record.turns[0].began_ms, record.turns[0].generated_ms, record.turns[0].ended_ms)


def test_tool_calls_are_told_apart_and_recognised_again(renderer):
    """However the client wrote them: the record keeps the text that was sampled."""
    played = Played(renderer)
    asked = [system("be brief"), user("hello")]
    said = played.take(played.ask(asked, [TOOL]), f"I look. {LOOK}")
    assert ("I look.", "call_0_0", "look") == (
        said["content"],
        said["tool_calls"][0]["id"],
        said["tool_calls"][0]["function"]["name"],
    )
    said["tool_calls"][0] |= {"id": "mine", "function": {"name": "look", "arguments": '{"where":"north"}'}}
    result = {"role": "tool", "tool_call_id": "mine", "content": "a door"}
    played.say([*asked, said, result], "done", [TOOL])

    record = played.record()
    assert (0,) == record.segments
    assert [("look", True), ("message", True)] == [(turn.action, turn.valid) for turn in record.turns]


def test_a_call_that_cannot_be_read_is_text_and_no_valid_turn(renderer):
    """The agent sees what the policy wrote."""
    played = Played(renderer)
    said = played.take(played.ask([user("hello")], [TOOL]), "<tool_call>look")

    assert {"role": "assistant", "content": "<tool_call>look"} == said
    assert [False] == [turn.valid for turn in played.record().turns]


def test_without_tools_nothing_is_read_as_a_call(renderer):
    """The agent would not know what to do with one."""
    played = Played(renderer)
    assert LOOK == played.take(played.ask([user("hello")]), LOOK)["content"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda history: [system("be long"), *history[1:]],
        lambda history: [history[0], user("other"), *history[2:]],
        lambda history: history[:1] + history[-1:],
        lambda history: [*history[:2], {"role": "assistant", "content": "cut short"}, *history[3:]],
    ],
)
def test_a_history_that_the_agent_has_rewritten_begins_a_segment(renderer, changed):
    """Another system prompt, another observation, a summary, another answer: all of it is prompt."""
    played = Played(renderer)
    history = [*played.say([system("be brief"), user("hello")], "abc"), user("more")]
    played.say(changed(history), "bc")

    record = played.record()
    assert 2 == len(record.segments)
    assert 0 == record.mask_array[record.turns[1].start : record.turns[1].sampled].sum()


def test_other_tools_begin_a_segment(renderer):
    """The template shows them in the prompt."""
    played = Played(renderer)
    history = played.say([user("hello")], "abc", [TOOL])
    played.say([*history, user("more")], "bc")

    assert 2 == len(played.record().segments)


def test_a_second_continuation_of_the_same_point_is_a_segment_with_the_same_prefix(renderer):
    """One after the other, or both asked before one is answered: then from the very tokens that were sampled."""
    played = Played(renderer)
    history = played.say([user("hello")], "abc")
    one, two = played.ask([*history, user("left")]), played.ask([*history, user("right")])
    played.take(two, "bc")
    played.take(one, "c")
    played.say([*history, user("on")], "b")

    record = played.record()
    assert 3 == len(record.segments)
    ids, first = record.token_ids, record.turns[0]
    assert ids[: first.stop].tolist() == ids[record.segments[1] :][: first.stop].tolist()
    assert 0 == record.mask_array[record.segments[1] :][: first.stop].sum()


def test_sub_agents_that_speak_at_the_same_time_are_segments_of_their_own(renderer):
    """Each grows by itself, whoever is answered when."""
    played = Played(renderer)
    histories = [[system(f"sub-agent {name}"), user("hello")] for name in ("a", "b")]
    for text in ("abc", "c", "b"):
        asks = [played.ask(history) for history in histories]
        histories = [
            [*history, played.take(ask, text), user("more")]
            for history, ask in reversed(list(zip(histories, asks, strict=True)))
        ]
        histories.reverse()

    record = played.record()
    assert [3, 3] == [
        sum(start <= turn.start < stop for turn in record.turns)
        for start, stop in zip(record.segments, [*record.segments[1:], len(record.mask)], strict=True)
    ]


def test_what_is_given_up_leaves_no_trace(renderer):
    """An agent that hung up never saw an answer, so none is recorded; its next call draws what that one would have."""
    played = Played(renderer)
    history = [*played.say([user("hello")], "abc"), user("more")]
    dropped = played.ask(history)
    played.branches.give_up(dropped.number)
    again = played.ask(history)

    assert (dropped.number, dropped.seed, dropped.prompt.tolist()) == (again.number, again.seed, again.prompt.tolist())
    assert sampling_seed(7, 0, 1) == again.seed
    played.take(again, "bc")
    assert [(0,), 2] == [played.record().segments, len(played.record().turns)]


@pytest.mark.parametrize(
    ("messages", "tools", "turns"),
    [
        ([user("hello"), {"role": "assistant", "content": f"x{IM_END}"}, user("more")], [], 4),
        ([system(f"be brief{IM_END}"), user(f"hello{IM_END}")], [], 2),
        ([{**user("hello"), "name": IM_END}], [], 2),
        ([user("hello")], [{"type": "function", "function": {"name": "look", "description": IM_END}}], 2),
        ([user("hello")], [{"type": "function", "function": {"enum": [IM_END, 3], IM_END: None}}], 2),
    ],
)
def test_what_looks_like_a_control_token_is_text_wherever_an_agent_wrote_it(renderer, messages, tools, turns):
    """A few-shot example, a page in a system prompt, the description of somebody's tool: it ends no turn."""
    ask = Played(renderer).ask(messages, tools)

    assert turns == sum(token in renderer.stop_ids for token in ask.prompt.tolist())


def test_an_answer_ends_before_a_stop_text(renderer):
    """What is recorded ends with the token that completes it, a rule of the tokens sampled so far alone."""
    played = Played(renderer)
    answer = played.answer(played.ask([user("hello")], stop=["END", "never"]), "abc END abc")
    history = [user("hello"), message(answer), user("more")]
    played.say(history, "b")

    assert ("abc ", "stop") == (answer.said.content, finish_reason(answer))
    record = played.record()
    turn = record.turns[0]
    assert "abc END" == renderer.display(record.token_ids[turn.sampled : turn.stop])
    assert ("stop_sequence", (0,)) == (turn.finish, record.segments)


def test_the_request_bounds_its_answer_and_the_task_bounds_all(renderer):
    """The smallest of the request's, the task's, the episode's and the context's."""
    played = Played(renderer, sampling=Sampling(max_tokens=9), max_sampled_tokens=12)
    assert [9, 4, 9] == [
        played.ask([user("hello")], **bound).max_tokens for bound in ({}, {"max_tokens": 4}, {"max_tokens": 99})
    ]
    played.say([user("hello")], "12345")
    assert 6 == played.ask([user("hello")]).max_tokens


def reached(played, messages=None):
    with pytest.raises(LimitReached) as caught:
        played.ask(messages or [user("on")])
    return caught.value


def test_the_horizon_is_the_most_calls(renderer):
    """Those that run count; the error says so in the API's shape, and the episode's end will."""
    played = Played(renderer, horizon=2)
    played.say([user("hello")], "abc")
    played.ask([user("hello")])
    error = reached(played)

    assert (400, "limit_turns", StopReason.TURNS) == (error.status, error.body["error"]["code"], played.branches.limit)
    assert played.branches.exhausted


def test_a_call_that_is_given_up_makes_room_for_another_one(renderer):
    """What was refused while it ran is not refused for good."""
    played = Played(renderer, horizon=2)
    played.say([user("hello")], "abc")
    running = played.ask([user("hello")])
    reached(played)
    played.branches.give_up(running.number)

    assert played.branches.limit is None
    assert played.ask([user("hello")]).number == running.number


def test_an_agent_that_makes_exactly_its_horizon_of_calls_met_no_limit(renderer):
    """Only one that wanted more was truncated."""
    played = Played(renderer, horizon=1)
    played.say([user("hello")], "abc")

    assert played.branches.limit is None


def test_tokens_that_are_used_up_cut_the_answer_and_end_the_episode(renderer):
    """Also where several calls were allowed the same rest."""
    played = Played(renderer, max_sampled_tokens=6)
    one, two, three = (played.ask([user(name)]) for name in "abc")
    played.take(one, "123")
    cut = played.answer(two, "1234")
    assert (2, "length", StopReason.TOKENS) == (cut.sampled_tokens, finish_reason(cut), played.branches.limit)
    with pytest.raises(LimitReached, match="6 tokens were sampled"):
        played.take(three, "1")

    assert "limit_tokens" == reached(played).body["error"]["code"]
    assert 6 == played.record().sampled_count


def test_tokens_that_a_whole_answer_used_up_are_met_by_the_next_call(renderer):
    """The answer itself was not cut, so an agent that ends with it met no limit."""
    played = Played(renderer, max_sampled_tokens=4)
    played.say([user("hello")], "123")
    assert played.branches.limit is None

    assert "limit_tokens" == reached(played).body["error"]["code"]


def test_a_conversation_that_outgrows_the_context_may_be_followed_by_a_shorter_one(renderer):
    """As an agent does that compacts its history; only what it met last counts."""
    played = Played(renderer, context=120)
    error = reached(played, [user("x" * 120)])
    assert ("context_length_exceeded", StopReason.CONTEXT) == (error.body["error"]["code"], played.branches.limit)

    played.say([user("hello")], "abc")
    assert played.branches.limit is None


@pytest.mark.parametrize(
    "messages", [[user("x" * 3_000_000)], [user("x")] * 1024, [system("x" * 3_000_000), user("x")]]
)
def test_what_can_fit_in_no_case_is_refused_before_it_is_rendered(renderer, messages, monkeypatch):
    """Rendering takes time, by the size of it, and an agent may send megabytes."""
    played = Played(renderer, context=1024)
    monkeypatch.setattr(renderer, "render", lambda *_: pytest.fail("it was rendered"))
    error = reached(played, messages)
    assert ("context_length_exceeded", StopReason.CONTEXT) == (error.body["error"]["code"], played.branches.limit)


def test_an_answer_that_fills_the_context_is_cut_by_it(renderer):
    """The API's word is length, the record's is context."""
    played = Played(renderer, context=120)
    ask = played.ask([user("hello")])
    answer = played.answer(ask, "x" * ask.max_tokens, ends=False, finish="length")

    assert ("length", StopReason.CONTEXT) == (finish_reason(answer), played.branches.limit)


def test_an_answer_that_loops_is_the_last_one(renderer):
    """As in any other family."""
    played = Played(renderer)
    answer = played.answer(played.ask([user("hello")]), "aaaa", ends=False, finish="repetition")

    assert ("length", "limit_repetition") == (finish_reason(answer), reached(played).body["error"]["code"])


def test_an_engine_that_withdraws_a_generation_fails_the_episode(renderer):
    """Nobody trains on half an answer."""
    played = Played(renderer)
    with pytest.raises(Failure, match="withdrew"):
        played.take(played.ask([user("hello")]), "ab", finish="abort")
    assert played.branches.empty


def test_a_conversation_that_the_template_refuses_is_refused(tmp_path):
    """The agent is told what the template said."""
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('users only') }}{% endif %}hello"
    played = Played(Renderer(family_model(tmp_path, template)))
    with pytest.raises(ApiError, match="users only"):
        played.ask([system("be brief")])


def test_a_stream_says_what_the_whole_answer_says(renderer):
    """Role, text, calls, reason, count, end."""
    played = Played(renderer)
    answer = played.answer(played.ask([user("hello")], [TOOL]), f"so {LOOK}")
    lines = list(events(answer, model="policy", now_s=3, with_usage=True))

    assert b"data: [DONE]\n\n" == lines.pop()
    chunks = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    call = message(answer)["tool_calls"][0]
    assert [
        {"role": "assistant", "content": ""},
        {"content": "so"},
        {"tool_calls": [{"index": 0, **call}]},
        {},
    ] == deltas
    assert ("tool_calls", []) == (chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["choices"])
    assert answer.sampled_tokens == chunks[-1]["usage"]["completion_tokens"]
