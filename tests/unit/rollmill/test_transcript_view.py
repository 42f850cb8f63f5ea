"""A rollout as a person sees it."""

from __future__ import annotations

import numpy as np

from rollmill.transcript_view import conversation, ending, visible
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Completed, Expired, Failed, FailureKind, StopReason
from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, pack_logprobs, pack_tokens
from stages.run.render import Renderer
from tests.logs import make_task
from tests.model_directory import byte_model


def test_control_characters_are_shown_and_not_obeyed():
    """A policy says anything, also what would drive a terminal; line breaks and other scripts stay."""
    assert visible("a\x1b[2Jb\n\x0e\x7f ж") == "a\\x1b[2Jb\n\\x0e\\x7f ж"


def test_an_end_without_a_grade_says_what_failed_and_where():
    """A person reads words, not the form of an object."""
    failed = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="no answer")
    assert ending(Trajectory(task=make_task(), outcome=failed, stage="run")) == "failed (engine at policy): no answer"
    late = Trajectory(task=make_task(), outcome=Expired(cause="too late"), stage="reaper")
    assert ending(late) == "expired: too late"


def test_a_rollout_shows_where_another_conversation_begins_and_what_its_environment_said(tmp_path):
    """A turn of a sub-agent is no turn of the one before, and a verdict tells why an agent ended."""
    renderer = Renderer(byte_model(tmp_path))
    ids = [renderer.encode(text).tolist() for text in ("ask", "say", "other", "word")]
    starts = np.cumsum([0, *map(len, ids)]).tolist()
    sound = Sampling()
    parts = [(starts[0], starts[1], starts[2]), (starts[2], starts[3], starts[4])]
    record = Transcript(
        tokens=pack_tokens(np.concatenate(ids)),
        mask=b"".join((b"\x00", b"\x01")[at % 2] * len(part) for at, part in enumerate(ids)),
        logprobs=pack_logprobs(np.concatenate([np.full(len(part), -0.5 * (at % 2)) for at, part in enumerate(ids)])),
        spans=tuple(
            SampledSpan(start=said, stop=stop, version=0, sampling=sound, dtype="float32", logprobs_mode="p")
            for _, said, stop in parts
        ),
        turns=tuple(
            Turn(
                start=start,
                sampled=said,
                stop=stop,
                valid=True,
                action="",
                finish="stop",
                began_ms=0,
                generated_ms=0,
                ended_ms=0,
            )
            for start, said, stop in parts
        ),
        segments=(0, starts[2]),
    )
    done = Completed(components={}, reward=0.0, success=0.0, truncated=False)
    verdict = {"exit_code": 1, "output": "x" * 5000 + "crashed\x1b"}
    shown = Trajectory(
        task=make_task(), outcome=done, transcript=record, verdict=verdict, stop=StopReason.DONE, stage="eval"
    )
    first, mark, second, _, last = [line.plain for line in conversation(shown, renderer)]
    assert ("ask say", "other word") == (first[5:12], second[5:15])
    assert "another conversation" in mark
    assert last.strip().startswith("verdict: {'exit_code': 1,")
    assert last.endswith("crashed\\x1b'}")
    assert len(last) < 2100
