"""Where the time of a hop goes, as the page has it."""

from __future__ import annotations

import time

import pytest

from benchmarks import hop_profile
from infra.offsets import Progress


def test_what_a_process_does_is_sampled_and_not_what_it_waits_for():
    """Time on a core alone is counted, under the function that spent it."""
    with hop_profile.sampled() as samples:
        began = time.process_time()
        while time.process_time() - began < 0.3:
            sum(range(1000))
        at_work = samples.total
        time.sleep(0.3)
    assert at_work > 20
    assert samples.total - at_work < at_work / 2
    (function, count), *_ = samples.functions.most_common(1)
    assert function.endswith("test_what_a_process_does_is_sampled_and_not_what_it_waits_for")
    assert count > samples.total / 2


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (Progress.__init__.__code__, "offsets and their map"),
        (hop_profile.page.__code__, "handler"),
        (pytest.raises.__code__, "the rest"),
    ],
)
def test_a_function_belongs_to_the_part_of_its_file(code, part):
    """Of the product, of its client, of the library."""
    assert hop_profile._part(hop_profile._within(code.co_filename)) == part


def test_the_page_shares_the_time_out():
    """Shares of all samples, and microseconds of the whole."""
    samples = hop_profile.Samples()
    samples.parts.update({"a": 3, "b": 1})
    samples.functions.update({"f": 4})
    page = hop_profile.page(samples, 200e-6, "Taken here.")
    assert "| a | 75.0% | 150 |\n| b | 25.0% | 50 |" in page
    assert "200 us on a core for each" in page
