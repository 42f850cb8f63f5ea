"""Messages become rows: the same ones every time, and only such that every column can hold."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.bus import Record
from infra.clickhouse import rows
from infra.clickhouse.rows import TABLES, RowError
from infra.clickhouse.streams import STREAMS
from infra.wire import Received
from schemas import topics
from schemas.codec import decode, encode
from schemas.messages import MAX_TIME_MS, Task, Trajectory
from schemas.outcome import Completed
from tests.golden.samples import NOW_MS, SAMPLES, TASK, TRANSCRIPT
from tests.strategies import messages, transcripts

WIDTHS = {table.name: len(table.columns) for table in TABLES}
DONE = Completed(components={"goal": 1.0}, reward=1.0, success=1.0, truncated=False)


def received(message, topic="trajectories", offset=7) -> Received:
    raw = encode(message)
    return Received(Record(topic, 2, offset, NOW_MS, None, raw), message, raw)


def stream_of(topic):
    return next(stream for stream in STREAMS if stream.topic is topic)


def as_dicts(found, table):
    return [dict(zip(table.columns, row, strict=True)) for row in found[table.name]]


@pytest.mark.parametrize("stream", [stream for stream in STREAMS if stream.rows], ids=lambda stream: stream.topic.name)
@settings(deadline=None, max_examples=60)
@given(data=messages())
def test_any_message_gives_full_rows_or_a_row_error(stream, data):
    """Whatever is in a message that decodes, an insert never meets a value that it cannot hold."""
    if type(data) not in stream.topic.carries:
        return
    try:
        found = stream.rows(received(data))
    except RowError:
        return
    assert all(len(row) == WIDTHS[table] for table, many in found.items() for row in many)
    assert repr(found) == repr(stream.rows(received(data)))


def test_every_golden_message_of_a_stored_topic_has_rows():
    """No field of an ordinary message is out of range."""
    stored = {kind: stream for stream in STREAMS if stream.rows for kind in stream.topic.carries}
    samples = [message for message in SAMPLES.values() if type(message) in stored]
    assert len(samples) > 8
    for message in samples:
        assert stored[type(message)].rows(received(message))


def test_an_evaluation_is_a_row_of_decisions_with_its_figures():
    """Step, version and purpose in columns, the rest as JSON."""
    message = SAMPLES["rollmill.evaluated"]
    (row,) = as_dicts(rows.decision_rows(received(message, "decisions")), rows.DECISIONS)

    assert (row["kind"], row["step"], row["version"], row["reason"]) == ("evaluated", 5, 6, "evaluation")
    assert msgspec.json.decode(row["body"])["success"] == 0.5


@settings(deadline=None)
@given(transcript=transcripts())
def test_turns_hold_every_token_exactly_once(transcript):
    """Turns and tail together are the transcript."""
    message = Trajectory(task=TASK, outcome=DONE, transcript=transcript, stage="eval")
    found = rows.trajectory_rows(received(message))
    (row,) = as_dicts(found, rows.TRAJECTORIES)
    turns = as_dicts(found, rows.TURNS) if transcript.turns else []
    tokens = [token for turn in turns for token in turn["tokens"]] + row["tail"]
    assert transcript.token_ids.tolist() == tokens
    assert transcript.sampled_count == sum(sum(turn["mask"]) for turn in turns)
    assert (len(turns), len(tokens)) == (row["turns"], row["tokens"])


def test_a_turn_knows_its_version_and_where_sampling_began():
    """The golden transcript has two turns, sampled by versions 5 and 6."""
    message = Trajectory(task=TASK, outcome=DONE, transcript=TRANSCRIPT, stage="eval")
    found = rows.trajectory_rows(received(message))
    first, second = as_dicts(found, rows.TURNS)
    assert [(t["version"], t["sampled"], t["temperature"]) for t in (first, second)] == [(5, 3, 0.75), (6, 1, 0.75)]
    assert first["logprobs"][3:] == [-0.5, -1.25, -0.0625]
    (row,) = as_dicts(found, rows.TRAJECTORIES)
    assert (row["min_version"], row["max_version"]) == (5, 6)


def test_a_turn_says_what_it_earned():
    """A family that gives process rewards gives one to each turn; where there are none, a turn earned nothing."""
    for rewards, expected in [((0.25, -0.5), [0.25, -0.5]), ((), [0.0, 0.0])]:
        outcome = msgspec.structs.replace(DONE, turn_rewards=rewards)
        message = Trajectory(task=TASK, outcome=outcome, transcript=TRANSCRIPT, stage="eval")
        found = as_dicts(rows.trajectory_rows(received(message)), rows.TURNS)
        assert expected == [turn["turn_reward"] for turn in found]


def test_a_broken_transcript_does_not_hide_the_outcome():
    """The arbiter accepts the record as failed, so the table must show it as that, with the reason."""
    broken = msgspec.structs.replace(TRANSCRIPT, mask=b"\x01")
    message = Trajectory(task=TASK, outcome=DONE, transcript=broken, stage="eval")
    found = rows.trajectory_rows(received(decode(encode(message), Trajectory)))
    (row,) = as_dicts(found, rows.TRAJECTORIES)
    assert (row["outcome"], row["failure_kind"], row["reward"], row["turns"]) == ("failed", "engine", 0.0, 0)
    assert "differ in length" in row["cause"]
    assert "turns" not in found


@settings(deadline=None, max_examples=200)
@given(message=messages(Task, Trajectory), stamp=st.integers(-(2**63), 2**63 - 1))
def test_a_task_or_terminal_record_that_decodes_always_has_rows(message, stamp):
    """What trainer and reaper count the table must show: no clock, payload or verdict keeps it out."""
    raw = encode(message)
    record = Record("tasks" if isinstance(message, Task) else "trajectories", 2, 7, stamp, None, raw)
    decoded = Received(record, decode(raw, Task, Trajectory), raw)

    assert rows.task_rows(decoded) if isinstance(message, Task) else rows.trajectory_rows(decoded)


def test_turns_of_a_mad_clock_and_a_verdict_that_json_has_not_are_written_as_they_can_be():
    """Both are for people; the outcome counts."""
    turns = tuple(msgspec.structs.replace(turn, began_ms=-5, ended_ms=10**18) for turn in TRANSCRIPT.turns)
    transcript = msgspec.structs.replace(TRANSCRIPT, turns=turns)
    verdict = {"by": {None: 1, True: [{False: 2}], "x": b"y"}}
    message = Trajectory(task=TASK, outcome=DONE, transcript=transcript, verdict=verdict, stage="eval")
    (row,) = as_dicts(rows.trajectory_rows(received(message)), rows.TRAJECTORIES)

    assert ("completed", 0, MAX_TIME_MS) == (row["outcome"], row["began_at"], row["ended_at"])
    assert row["verdict"] == '{"by":{"null":1,"true":[{"false":2}],"x":"eQ=="}}'


@pytest.mark.parametrize(("name", "value"), [("sample", -1), ("sample", 2**32), ("seed", -5), ("start_by_ms", 10**18)])
def test_a_number_out_of_range_is_a_row_error(name, value):
    """It is found before the insert, where it would block everything behind it."""
    task = msgspec.structs.replace(TASK, **{name: value})
    with pytest.raises(RowError, match=str(value)):
        rows.task_rows(received(task, "tasks"))


def test_a_dead_letter_keeps_its_bytes_and_says_where_it_came_from():
    """The row is made of headers alone: the value need not be readable."""
    place = (("x-orig-topic", b"tasks"), ("x-orig-offset", b"12"))
    headers = (*place, ("x-kind", b"poison"), ("x-cause", b"not msgpack"), ("odd", b"\xff"))
    record = Record("dead", 3, 9, NOW_MS, b"k", b"\x00\xff", headers)
    (row,) = as_dicts(rows.dead_rows(record), rows.DEAD)
    assert (
        row["source_topic"],
        row["source_offset"],
        row["kind"],
        row["cause"],
        row["value"],
    ) == ("tasks", 12, "poison", "not msgpack", b"\x00\xff")


def test_a_foreign_dead_letter_is_stored_too():
    """Headers may be missing or nonsense."""
    record = Record("dead", 0, 0, NOW_MS, None, None, (("x-orig-offset", b"-1"),))
    (row,) = as_dicts(rows.dead_rows(record), rows.DEAD)
    assert (row["value"], row["kind"], row["source_offset"]) == (b"", "", 0)


def test_the_streams_are_the_topics_that_the_table_gives_to_the_sink():
    """The flow's table and the sink's table agree."""
    declared = {topic.name for topic in topics.TABLE if "sink" in topic.consumers}
    assert declared == {stream.topic.name for stream in STREAMS}


def test_a_rollout_lasts_from_its_first_turn_to_its_last_in_whatever_order_they_stand():
    """Turns stand in the order of their segments, and conversations of one episode go on side by side."""
    first, second = TRANSCRIPT.turns
    later = msgspec.structs.replace(first, began_ms=NOW_MS + 50, generated_ms=NOW_MS + 60, ended_ms=NOW_MS + 90)
    sooner = msgspec.structs.replace(second, began_ms=NOW_MS + 10, generated_ms=NOW_MS + 20, ended_ms=NOW_MS + 30)
    record = msgspec.structs.replace(TRANSCRIPT, turns=(later, sooner))
    message = Trajectory(task=TASK, outcome=DONE, transcript=record, stage="eval")
    (row,) = as_dicts(rows.trajectory_rows(received(message)), rows.TRAJECTORIES)
    assert (row["began_at"], row["ended_at"]) == (rows._when(NOW_MS + 10), rows._when(NOW_MS + 90))
