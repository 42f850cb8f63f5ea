import json

import pytest

from benchmarks.report import as_table
from benchmarks.result import Result, versus
from benchmarks.rounds import Series
from benchmarks.table import TABLE, Benchmark, Row


def made(**changes):
    """Return a result with one more rival."""
    fields = {"name": "x", "ours": 6.0, "rival": 3.0, "unit": "1/s", "ratio": 2.0, "detail": {"other": {"ratio": 4}}}
    return Result(**{**fields, **changes})


def test_the_object_has_the_promised_shape():
    """Whoever reads the last line finds these keys, in one object."""
    found = json.loads(made().to_json())

    assert list(found) == ["name", "ours", "rival", "unit", "ratio", "detail"]
    assert found["detail"]["other"]["ratio"] == 4


def test_a_rival_is_compared_by_medians():
    """The ratio is ours / rival of the medians, and the rounds of both are kept."""
    entry = versus(Series((10.0, 30.0, 20.0)), Series((5.0, 1.0, 4.0)), unit="jobs/s")

    assert (entry["ours"], entry["rival"], entry["ratio"], entry["unit"]) == (20.0, 4.0, 5.0, "jobs/s")
    assert entry["spread"]["rival"]["rounds"] == [5.0, 1.0, 4.0]


def test_a_figure_is_found_by_its_place():
    """Rows of the table name figures of the result."""
    assert (made().figure("ratio"), made().figure("detail.other.ratio")) == (2.0, 4.0)


@pytest.mark.parametrize("key", ["detail.missing.ratio", "name", "ratio.x"])
def test_a_place_without_a_number_is_an_error(key):
    """A misspelt row must not look like a figure."""
    with pytest.raises(KeyError, match="gave no number"):
        made().figure(key)


def test_the_table_says_for_each_ratio_whether_it_holds():
    """A person sees figure and bound side by side, and what was missed."""
    rows = (Row(key="ratio", rival="slow", at_least=1.5), Row(key="detail.other.ratio", rival="big", at_most=1.0))

    text = as_table({"x": made()}, {"x": Benchmark(module="m", work="w", rows=rows)})

    assert "| `x` `ratio` | slow | 2 | at least 1.5 | yes |" in text
    assert "| `x` `detail.other.ratio` | big | 4 | at most 1 | **no** |" in text


@pytest.mark.parametrize("name", TABLE)
def test_each_ratio_of_the_table_has_a_bound(name):
    """A figure without a bound says nothing, and the first row is the result's own ratio."""
    rows = TABLE[name].rows

    assert all(row.bound for row in rows)
    assert all(row.key == "ratio" or row.key.startswith("detail.") for row in rows)


def test_a_short_run_has_a_bound_of_its_own_where_it_cannot_tell_as_much():
    """The page of a quick run does not call a figure bad that only more work could make good."""
    row = Row(key="ratio", rival="none", at_most=0.01, quick_at_most=0.1)

    assert (row.holds(0.05), row.holds(0.05, quick=True), row.holds(0.2, quick=True)) == (False, True, False)
    assert (row.bound(), row.bound(quick=True)) == ("at most 0.01", "at most 0.1")
    assert (Row(key="ratio", rival="none", at_most=1).bound(quick=True)) == "at most 1"
