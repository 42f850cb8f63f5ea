"""Messages as rows: pure functions from one record to the rows of each table.

The same record always gives the same rows: the sink inserts a range again after a crash under the same token, and
ClickHouse keeps the first. A value that no column can hold is a RowError, found here and not by an insert, so that
one bad record cannot block a range. The columns are those of `schema.sql`; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from infra.bus import Record
from infra.wire import Received
from schemas.batch import content_hash
from schemas.decisions import (
    Alarm,
    Branch,
    Decision,
    Evaluated,
    GroupDropped,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
)
from schemas.dispositions import DROPPED
from schemas.messages import MAX_TIME_MS, Task, Trajectory
from schemas.outcome import Cancelled, Completed, Expired, Failed
from schemas.telemetry import Metrics, StageEvents
from schemas.transcript import SampledSpan, Transcript, TranscriptError, Turn, check

Row = tuple[Any, ...]
Rows = dict[str, list[Row]]
"""Rows by the name of their table."""

_RANGES = {
    "UInt8": (0, 2**8 - 1),
    "UInt32": (0, 2**32 - 1),
    "UInt64": (0, 2**64 - 1),
    "Nullable(UInt64)": (0, 2**64 - 1),
    "DateTime64(3)": (0, MAX_TIME_MS),
}


class RowError(ValueError):
    """A message holds a value that its column cannot."""


@dataclass(frozen=True, eq=False)
class Table:
    """A table that the sink fills; there is one object for each."""

    name: str
    columns: Mapping[str, str]
    """Name -> type, in the order of the rows. Times are given as milliseconds since the epoch."""

    @cached_property
    def bounded(self) -> tuple[tuple[int, str, int, int], ...]:
        """(index, name, lowest, highest) of the columns with a range."""
        return tuple(
            (index, name, *_RANGES[kind]) for index, (name, kind) in enumerate(self.columns.items()) if kind in _RANGES
        )

    def check(self, row: Row) -> Row:
        """Return the row.

        Raises:
            RowError: a value is out of its column's range.
        """
        for index, name, lowest, highest in self.bounded:
            value = row[index]
            if value is not None and not lowest <= value <= highest:
                raise RowError(f"{self.name}.{name} holds {lowest} to {highest}, the record says {value}")
        return row


_TEXT = "String"
_NAME = "LowCardinality(String)"
_TIME = "DateTime64(3)"
_PLACE = {"kafka_topic": _NAME, "kafka_partition": "UInt32", "kafka_offset": "UInt64"}
_SAMPLE = {"run": _NAME, "group": _TEXT, "sample": "UInt32"}

TASKS = Table(
    "tasks",
    {
        **_SAMPLE,
        "samples": "UInt32",
        "attempt": "UInt32",
        "source": _NAME,
        "visit": "UInt32",
        "row": "UInt64",
        "payload": _TEXT,
        "payload_digest": _TEXT,
        "family": _NAME,
        "seed": "UInt64",
        "admission": "Nullable(UInt64)",
        "start_by": _TIME,
        "due_at": _TIME,
        "horizon": "UInt32",
        "temperature": "Float64",
        "min_version": "UInt64",
        "redrive_of": _TEXT,
        "published_at": _TIME,
        **_PLACE,
    },
)
TRAJECTORIES = Table(
    "trajectories",
    {
        **_SAMPLE,
        "samples": "UInt32",
        "attempt": "UInt32",
        "source": _NAME,
        "visit": "UInt32",
        "row": "UInt64",
        "payload_digest": _TEXT,
        "family": _NAME,
        "seed": "UInt64",
        "admission": "Nullable(UInt64)",
        "outcome": _NAME,
        "reward": "Float64",
        "success": "Float64",
        "truncated": "UInt8",
        "components": "Map(LowCardinality(String), Float64)",
        "failure_kind": _NAME,
        "boundary": _NAME,
        "cause": _TEXT,
        "stop": _NAME,
        "stage": _NAME,
        "backend": _NAME,
        "tokenizer_digest": _NAME,
        "verdict": _TEXT,
        "turns": "UInt32",
        "invalid_turns": "UInt32",
        "tokens": "UInt64",
        "sampled_tokens": "UInt64",
        "segments": "UInt32",
        "min_version": "UInt64",
        "max_version": "UInt64",
        "began_at": _TIME,
        "ended_at": _TIME,
        "tail": "Array(Int32)",
        "content": _TEXT,
        "published_at": _TIME,
        **_PLACE,
    },
)
TURNS = Table(
    "turns",
    {
        **_SAMPLE,
        "attempt": "UInt32",
        "turn": "UInt32",
        "sampled": "UInt32",
        "segment": "UInt32",
        "valid": "UInt8",
        "action": _TEXT,
        "turn_reward": "Float64",
        "finish": _NAME,
        "version": "UInt64",
        "temperature": "Float64",
        "began_at": _TIME,
        "generated_at": _TIME,
        "ended_at": _TIME,
        "tokens": "Array(Int32)",
        "mask": "Array(UInt8)",
        "logprobs": "Array(Float32)",
        **_PLACE,
    },
)
EVENTS = Table(
    "events",
    {
        **_SAMPLE,
        "attempt": "UInt32",
        "stage": _NAME,
        "kind": _NAME,
        "at": _TIME,
        "took_ms": "UInt64",
        "waited_ms": "UInt64",
        "detail": _TEXT,
        "worker": _NAME,
        **_PLACE,
    },
)
DECISIONS = Table(
    "decisions",
    {
        "run": _NAME,
        "kind": _NAME,
        "epoch": "UInt64",
        "step": "UInt64",
        "position": "UInt64",
        "group": _TEXT,
        "reason": _NAME,
        "version": "UInt64",
        "members": "UInt32",
        "digest": _TEXT,
        "advantage_digest": _TEXT,
        "body": _TEXT,
        "published_at": _TIME,
        **_PLACE,
    },
)
DECISION_SAMPLES = Table(
    "decision_samples",
    {
        "run": _NAME,
        "epoch": "UInt64",
        "step": "UInt64",
        "place": _NAME,
        "group": _TEXT,
        "sample": "UInt32",
        "trajectory_offset": "UInt64",
        "reward": "Float64",
        "content": _TEXT,
        **_PLACE,
    },
)
METRICS = Table(
    "metrics",
    {
        "run": _NAME,
        "service": _NAME,
        "name": _NAME,
        "value": "Float64",
        "at": _TIME,
        "step": "UInt64",
        "labels": "Map(LowCardinality(String), String)",
        **_PLACE,
    },
)
DEAD = Table(
    "dead",
    {
        "source_topic": _NAME,
        "source_partition": "UInt32",
        "source_offset": "UInt64",
        "stage": _NAME,
        "kind": _NAME,
        "cause": _TEXT,
        "subject": _TEXT,
        "key": _TEXT,
        "value": _TEXT,
        "headers": "Map(String, String)",
        "published_at": _TIME,
        **_PLACE,
    },
)
TABLES = (TASKS, TRAJECTORIES, TURNS, EVENTS, DECISIONS, DECISION_SAMPLES, METRICS, DEAD)


def task_rows(received: Received[Task]) -> Rows:
    """Return the row of a task."""
    task, record = received.message, received.record
    row = (
        *_sample(task),
        task.samples,
        task.attempt,
        task.source,
        task.visit,
        task.row,
        _json(task.payload),
        task.payload_digest,
        task.family,
        task.seed,
        task.admission,
        task.start_by_ms,
        _due_ms(task),
        task.horizon,
        task.sampling.temperature,
        task.min_version,
        task.redrive_of or "",
        _when(record.timestamp_ms),
        *_place(record),
    )
    return _checked({TASKS: [row]})


def trajectory_rows(received: Received[Trajectory]) -> Rows:
    """Return the row of a terminal record and one for each of its turns.

    Every terminal record that decodes has them: what the trainer counts must be found here. A token record that breaks
    its invariants is left out; the outcome says so (`Trajectory.as_read`).
    """
    trajectory, record = received.message, received.record
    transcript = _readable(trajectory)
    task = trajectory.task
    versions = [span.version for span in transcript.spans] or [0]
    turns = transcript.turns
    tail_start = turns[-1].stop if turns else 0
    row = (
        *_sample(task),
        task.samples,
        task.attempt,
        task.source,
        task.visit,
        task.row,
        task.payload_digest,
        task.family,
        task.seed,
        task.admission,
        *_outcome(trajectory),
        trajectory.stop.value if trajectory.stop else "",
        trajectory.stage,
        trajectory.backend,
        trajectory.tokenizer_digest,
        _json(trajectory.verdict) if trajectory.verdict is not None else "",
        len(turns),
        sum(not turn.valid for turn in turns),
        len(transcript.mask),
        transcript.sampled_count,
        len(transcript.segments) if turns else 0,
        min(versions),
        max(versions),
        # Turns stand in the order of their segments, which may have grown side by side.
        _when(min(turn.began_ms for turn in turns)) if turns else 0,
        _when(max(turn.ended_ms for turn in turns)) if turns else 0,
        transcript.token_ids[tail_start:].tolist(),
        content_hash(received.raw),
        _when(record.timestamp_ms),
        *_place(record),
    )
    return _checked({TRAJECTORIES: [row], TURNS: _turn_rows(trajectory, transcript, record)})


def event_rows(received: Received[StageEvents]) -> Rows:
    """Return one row per event."""
    place = _place(received.record)
    rows = [
        (
            event.run,
            event.group,
            event.sample,
            event.attempt,
            event.stage,
            event.kind.value,
            event.at_ms,
            event.took_ms,
            event.waited_ms,
            event.detail,
            received.message.worker,
            *place,
        )
        for event in received.message.events
    ]
    return _checked({EVENTS: rows})


def metric_rows(received: Received[Metrics]) -> Rows:
    """Return one row per point."""
    message, place = received.message, _place(received.record)
    rows = [
        (message.run, message.service, point.name, point.value, point.at_ms, point.step, point.labels, *place)
        for point in message.points
    ]
    return _checked({METRICS: rows})


def decision_rows(received: Received[Decision]) -> Rows:
    """Return the row of a decision and one for each sample that it names."""
    decision, record = received.message, received.record
    named = list(_named_samples(decision))
    settled = sum(place not in {"buffered", "unused"} for place, *_ in named)
    step = decision.from_step if isinstance(decision, Branch) else getattr(decision, "step", 0)
    # A trainer's start has no epoch in it: its own offset is the epoch.
    epoch = record.offset if isinstance(decision, TrainerStarted) else decision.epoch
    row = (
        decision.run,
        _KINDS[type(decision)],
        epoch,
        step,
        getattr(decision, "position", 0),
        getattr(decision, "group", ""),
        _decision_reason(decision),
        getattr(decision, "version", 0),
        settled,
        getattr(decision, "digest", ""),
        getattr(decision, "advantage_digest", ""),
        _decision_body(decision),
        _when(record.timestamp_ms),
        *_place(record),
    )
    samples = [(decision.run, epoch, step, *sample, *_place(record)) for sample in named]
    return _checked({DECISIONS: [row], DECISION_SAMPLES: samples})


def dead_rows(record: Record) -> Rows:
    """Return the row of a dead letter; nothing in it needs to be readable, so this never fails."""
    headers = {name: data.decode(errors="replace") for name, data in record.headers}
    row = (
        headers.get("x-orig-topic", ""),
        _number(headers.get("x-orig-partition", ""), 2**32 - 1),
        _number(headers.get("x-orig-offset", ""), 2**64 - 1),
        headers.get("x-stage", ""),
        headers.get("x-kind", ""),
        headers.get("x-cause", ""),
        headers.get("ce_subject", ""),
        record.key or b"",
        record.value or b"",
        headers,
        _when(record.timestamp_ms),
        *_place(record),
    )
    return _checked({DEAD: [row]})


def _checked(rows: Mapping[Table, list[Row]]) -> Rows:
    return {table.name: [table.check(row) for row in found] for table, found in rows.items() if found}


def _sample(task: Task) -> tuple[str, str, int]:
    return task.run, task.group, task.sample


def _due_ms(task: Task) -> int:
    """When the task's own limits have run out; a budget without an end is due at the end of time."""
    budget_ms = task.budgets.total_s * 1000
    if not budget_ms >= 0:  # NaN is neither more nor less
        raise RowError(f"tasks.due_at: the budgets sum to {task.budgets.total_s} s")
    return min(task.start_by_ms + int(min(budget_ms, MAX_TIME_MS)), MAX_TIME_MS)


def _place(record: Record) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def _when(at_ms: int) -> int:
    """Return a time as near as a column can hold it: nobody counts by it, and a mad clock must not hide an outcome."""
    return max(0, min(at_ms, MAX_TIME_MS))


def _json(value: Any) -> str:
    with suppress(TypeError):
        return msgspec.json.encode(value).decode()
    try:
        # Maps may have keys that JSON has not, nil and booleans: they are written as they look.
        return msgspec.json.encode(_with_text_keys(value)).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"a free-form field has no JSON form: {error}") from error


def _with_text_keys(value: Any) -> Any:
    """Return a free-form value whose maps have keys that JSON can write."""
    if isinstance(value, dict):
        return {_text_key(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return value


def _text_key(key: Any) -> Any:
    return msgspec.json.encode(key).decode() if key is None or isinstance(key, bool) else key


def _number(text: str, highest: int) -> int:
    """A header's number, 0 if it is none: a foreign producer may have written anything."""
    return min(int(text), highest) if text.isascii() and text.isdigit() and len(text) < 20 else 0


_NO_TRANSCRIPT = Transcript(tokens=b"", mask=b"", logprobs=b"", spans=(), turns=())


def _readable(trajectory: Trajectory) -> Transcript:
    """Return the token record, or an empty one in the place of one that breaks its invariants."""
    transcript = trajectory.transcript
    if transcript is None:
        return _NO_TRANSCRIPT
    if isinstance(trajectory.outcome, Completed):
        return transcript  # or it would not be completed: it was checked when it was read
    try:
        check(transcript)
    except TranscriptError:
        return _NO_TRANSCRIPT
    return transcript


def _outcome(trajectory: Trajectory) -> Row:
    """Return outcome, reward, success, truncated, components, failure_kind, boundary, cause."""
    match trajectory.outcome:
        case Completed() as done:
            return ("completed", done.reward, done.success, done.truncated, done.components, "", "", "")
        case Failed() as failed:
            return ("failed", 0.0, 0.0, 0, {}, failed.kind.value, failed.boundary.value, failed.cause)
        case Cancelled() as cancelled:
            return ("cancelled", 0.0, 0.0, 0, {}, "", "", cancelled.cause)
        case Expired() as expired:
            return ("expired", 0.0, 0.0, 0, {}, "", "", expired.cause)


def _turn_rows(trajectory: Trajectory, transcript: Transcript, record: Record) -> list[Row]:
    task, earned = trajectory.task, _turn_rewards(trajectory)
    ids, mask, logprobs = transcript.token_ids, transcript.mask_array, transcript.logprob_array
    rows: list[Row] = []
    for number, turn in enumerate(transcript.turns):
        spans = [span for span in transcript.spans if _overlap(span, turn)]
        part = slice(turn.start, turn.stop)
        rows.append(
            (
                *_sample(task),
                task.attempt,
                number,
                turn.sampled - turn.start,
                sum(start <= turn.start for start in transcript.segments) - 1,
                turn.valid,
                turn.action,
                earned[number] if earned else 0.0,
                turn.finish,
                max((span.version for span in spans), default=0),
                spans[0].sampling.temperature if spans else 0.0,
                _when(turn.began_ms),
                _when(turn.generated_ms),
                _when(turn.ended_ms),
                ids[part].tolist(),
                mask[part].tolist(),
                logprobs[part].tolist(),
                *_place(record),
            )
        )
    return rows


def _turn_rewards(trajectory: Trajectory) -> tuple[float, ...]:
    """Return the process reward of each turn; a record that was read has as many as turns, or none (`grade_flaw`)."""
    return trajectory.outcome.turn_rewards if isinstance(trajectory.outcome, Completed) else ()


def _overlap(span: SampledSpan, turn: Turn) -> bool:
    return span.start < turn.stop and turn.sampled < span.stop


_KINDS: Mapping[type[Decision], str] = {
    TrainerStarted: "started",
    StepDecided: "step",
    GroupDropped: "dropped",
    VersionPublished: "version",
    RunEnded: "ended",
    Branch: "branch",
    Evaluated: "evaluated",
    Alarm: "alarm",
}
"""What the `decisions` table calls a decision."""


def _decision_body(decision: Decision) -> str:
    match decision:
        case TrainerStarted():
            return _json(decision.config)
        case Evaluated():
            return _json(decision.scores)
        case Alarm():
            return _json({name: getattr(decision, name) for name in ("guard", "value", "bound", "steps", "action")})
        case _:
            return ""


def _decision_reason(decision: Decision) -> str:
    match decision:
        case GroupDropped():
            return decision.reason.value
        case RunEnded():
            return decision.reason
        case Evaluated():
            return decision.purpose.value
        case Branch() | Alarm():
            return decision.cause
        case _:
            return ""


def _named_samples(decision: Decision) -> Iterable[tuple[str, str, int, int, float, str]]:
    """Yield (place, group, sample, offset, reward, content) of each sample that a decision names."""
    match decision:
        case StepDecided():
            for member in decision.members:
                yield ("trained", member.group, member.sample, member.offset, member.reward, member.content)
            for ref in decision.buffered:
                yield ("buffered", ref.group, ref.sample, ref.offset, 0.0, "")
        case GroupDropped():
            for ref in decision.members:
                yield (DROPPED[decision.reason].value, ref.group, ref.sample, ref.offset, 0.0, "")
        case RunEnded():
            for ref in decision.unused:
                yield ("unused", ref.group, ref.sample, ref.offset, 0.0, "")
        case _:
            return
