"""Random messages for property tests: any Struct from its field types, and transcripts that keep their invariants."""

from __future__ import annotations

import enum
import functools
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from schemas.control import LARGEST_WEIGHT, SMALLEST_WEIGHT, Backend, Canary
from schemas.decisions import TrainerStarted
from schemas.identity import RUN_NAME
from schemas.message import Message
from schemas.messages import LONGEST_BUDGET_S, TASK_RANGES, Budgets, Rollout, Shaping, Task
from schemas.topics import TABLE
from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, pack_logprobs, pack_tokens

MESSAGE_TYPES: tuple[type[Message], ...] = tuple({kind: None for topic in TABLE for kind in topic.carries})
"""Every type that may appear on a topic, once."""

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
FLOATS = st.floats(allow_nan=False)

FREE_FORM: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | INT64 | FLOATS | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
"""What a payload, a verdict or a configuration may hold."""

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Any: FREE_FORM,
    bool: st.booleans(),
    int: INT64,
    float: FLOATS,
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
    type(None): st.none(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of an annotation, as message fields use them."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    raise TypeError(f"no strategy for {hint!r}: teach tests/strategies.py about it")


@functools.cache
def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return random instances of a Struct; its fields are independent of each other."""
    hints = typing.get_type_hints(kind)
    fields = {name: values(hints[name]) for name in kind.__struct_fields__}
    if kind is Task:
        fields |= {name: st.integers(low, high) for name, (low, high) in TASK_RANGES.items()}
        fields["admission"] |= st.none()
        fields["run"] = st.from_regex(RUN_NAME, fullmatch=True)
        fields["weights_of"] = st.none() | fields["run"]
        return st.builds(kind, **fields).map(_within_its_group)
    if kind is Canary:
        prompts = st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=4)
        return prompts.map(lambda ids: Canary(tokens=pack_tokens(ids), logprobs=pack_logprobs([-0.5] * (len(ids) - 1))))
    if kind is Backend:
        names = st.from_regex(RUN_NAME, fullmatch=True)
        fields |= {"name": names, "run": st.just("") | names, "url": st.just("http://127.0.0.1:8000")}
        fields["weight"] = st.floats(SMALLEST_WEIGHT, LARGEST_WEIGHT)
    if kind is TrainerStarted:
        fields["start"] = fields["step"] = st.integers(0, 2**53)
    if kind is Rollout:
        fields["gradings"] = st.integers(0, 2**31 - 1)
    if kind is Budgets:
        fields = {name: st.floats(0, LONGEST_BUDGET_S) for name in fields}
    if kind is Shaping:
        finite = st.floats(allow_nan=False, allow_infinity=False)
        fields["weights"] = st.dictionaries(st.text(max_size=12), finite, max_size=3)
        fields["long_action"] = st.integers(0, 2**31 - 1)
    return st.builds(kind, **fields)


def _within_its_group(task: Task) -> Task:
    """Return a task whose sibling number is one that its group has."""
    return msgspec.structs.replace(task, sample=task.sample % task.samples)


def messages(*kinds: type[Message]) -> st.SearchStrategy[Any]:
    """Return random messages of these types, or of every type."""
    return st.sampled_from(kinds or MESSAGE_TYPES).flatmap(structs)


@st.composite
def transcripts(draw: st.DrawFn) -> Transcript:
    """Return transcripts that keep every invariant: turns of prompt and answer, and what follows the last answer."""
    turns: list[Turn] = []
    spans: list[SampledSpan] = []
    segments: list[int] = [0]
    mask: list[int] = []
    for number in range(draw(st.integers(0, 4))):
        start = len(mask)
        if number and draw(st.booleans()):
            segments.append(start)
        mask += [0] * draw(st.integers(1, 4))
        sampled = len(mask)
        for version in range(draw(st.integers(0, 2))):  # new weights may arrive within a turn
            mask += [1] * draw(st.integers(1, 3))
            spans.append(_span(spans[-1].stop if spans and spans[-1].stop > sampled else sampled, len(mask), version))
        turns.append(_turn(start, sampled, len(mask)))
    if turns:
        mask += [0] * draw(st.integers(0, 2))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    probable = draw(st.lists(st.floats(-30.0, 0.0, width=32), min_size=len(mask), max_size=len(mask)))
    return Transcript(
        tokens=pack_tokens(ids),
        mask=bytes(mask),
        logprobs=pack_logprobs([value if sampled else 0.0 for value, sampled in zip(probable, mask, strict=True)]),
        spans=tuple(spans),
        turns=tuple(turns),
        segments=tuple(segments),
    )


def _span(start: int, stop: int, version: int) -> SampledSpan:
    return SampledSpan(
        start=start,
        stop=stop,
        version=version,
        sampling=Sampling(),
        dtype="float32",
        logprobs_mode="processed_logprobs",
    )


def _turn(start: int, sampled: int, stop: int) -> Turn:
    return Turn(
        start=start,
        sampled=sampled,
        stop=stop,
        valid=True,
        action="go north",
        finish="stop",
        began_ms=1,
        generated_ms=2,
        ended_ms=3,
    )
