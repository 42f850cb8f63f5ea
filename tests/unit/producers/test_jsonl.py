"""Task instances from a JSONL file: a bad line is named, the rest is used."""

from __future__ import annotations

import itertools

import pytest

from infra.errors import ConfigError
from producers.jsonl import PAYLOAD_BYTES, JsonlSource
from producers.source import Instance

GOOD = '{"family": "toy", "payload": {"a": 1}}'


def source(tmp_path, *lines, **settings):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return JsonlSource(path, **settings)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "Input data was truncated"),
        ("nonsense", "invalid"),
        ("[]", "Expected `object`, got `array`"),
        ('{"payload": {}}', "missing required field `family`"),
        ('{"family": "toy"}', "missing required field `payload`"),
        ('{"family": 7, "payload": {}}', "at `$.family`"),
        ('{"family": "toy", "payload": [1]}', "at `$.payload`"),
        ('{"family": "toy", "payload": {}, "horizon": "long"}', "at `$.horizon`"),
        ('{"family": "toy", "payload": {}, "horizon": 0}', "Expected `int` >= 1 - at `$.horizon`"),
        (
            '{"family": "toy", "payload": {}, "horizon": 99999999999999}',
            "Expected `int` <= 2147483647 - at `$.horizon`",
        ),
        ('{"family": "toy", "payload": {}, "horizn": 3}', "unknown field `horizn`"),
        ('{"family": "toy", "payload": {"n": 99999999999999999999}}', "at `$.payload`"),
        (b'{"family": "toy", "payload": {"n": "\xff"}}', "Invalid UTF-8"),
        (f'{{"family": "toy", "payload": {{"n": "{"x" * PAYLOAD_BYTES}"}}}}', "are carried - at `$.payload`"),
        ('{"family": "chess", "payload": {}}', "unknown family 'chess' - at `$.family`; known: keydoor, toy"),
    ],
)
def test_a_bad_line_is_named_with_its_field_and_the_rest_is_used(tmp_path, line, says):
    """Line number, what is wrong and where; the lines around it are published."""
    found = source(tmp_path, GOOD, line, GOOD, known_families=["toy", "keydoor"])

    assert [2] == [bad.number for bad in found.bad]
    assert str(found.bad[0]).startswith("line 2: ")
    assert says in found.bad[0].reason
    assert [1, 3] == [instance.row for instance in found.instances()]


def test_a_row_is_its_line_number_and_blank_lines_are_none(tmp_path):
    """Places stay where they are when a bad line is mended."""
    found = source(tmp_path, GOOD, "", "   ", '{"family": "toy", "payload": {"a": 2}, "horizon": 3}')

    assert [Instance(0, 1, "toy", {"a": 1}), Instance(0, 4, "toy", {"a": 2}, 3)] == list(found.instances())
    assert ([], "tasks.jsonl") == (found.bad, found.name)


def test_a_file_that_is_repeated_counts_its_visits(tmp_path):
    """The second pass asks for other groups than the first."""
    found = source(tmp_path, GOOD, GOOD, repeat=True)

    places = [(instance.visit, instance.row) for instance in itertools.islice(found.instances(), 5)]
    assert [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)] == places


@pytest.mark.parametrize("start", range(6))
def test_instances_from_a_place_are_those_that_followed_it(tmp_path, start):
    """A feeder that starts again goes on where it was."""
    found = source(tmp_path, GOOD, GOOD, GOOD, repeat=True)

    whole = list(itertools.islice(found.instances(), 8))
    assert whole[start:] == list(itertools.islice(found.instances(start), 8 - start))


def test_a_finite_file_ends(tmp_path):
    """From any place, also from behind its end."""
    found = source(tmp_path, GOOD, GOOD)

    assert [2, 1, 0, 0] == [len(list(found.instances(start))) for start in range(4)]


def test_a_name_may_be_given(tmp_path):
    """Groups keep their ids when the file moves."""
    assert source(tmp_path, GOOD, name="gsm").name == "gsm"


def test_a_file_without_a_task_says_why(tmp_path):
    """Nothing usable is an error, with the first reasons."""
    with pytest.raises(ConfigError, match="it is empty"):
        source(tmp_path, "")
    with pytest.raises(ConfigError, match=r"holds no task: line 1: .*; line 2: "):
        source(tmp_path, "{", "{")
    with pytest.raises(ConfigError, match=r"cannot read .*absent.*: No such file"):
        JsonlSource(tmp_path / "absent.jsonl")


def test_a_payload_that_is_nested_too_deep_is_a_bad_line(tmp_path):
    """As deep as it would lie in a record, also where the reader itself gives up; the rest is used."""
    deep, deeper = (
        '{"family": "f", "payload": ' + '{"a": ' * depth + "1" + "}" * (depth + 1) for depth in (100, 100_000)
    )
    path = tmp_path / "deep.jsonl"
    path.write_text(f'{deep}\n{{"family": "f", "payload": {{}}}}\n{deeper}\n')
    source = JsonlSource(path)

    assert [2] == [instance.row for instance in source.instances()]
    assert [1, 3] == [bad.number for bad in source.bad]
    assert all("deep" in bad.reason for bad in source.bad)
