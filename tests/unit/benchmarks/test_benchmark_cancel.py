"""When things were gone, told by how many there were."""

from benchmarks.cancel import drops, percentile


def test_each_thing_is_gone_at_the_first_look_that_does_not_count_it():
    """What went before the moment counts as gone at it."""
    counts = [(9.0, 3), (9.5, 2), (10.5, 2), (11.0, 0)]

    assert [0.0, 1.0, 1.0] == drops(counts, 10.0)


def test_a_percentile_is_one_of_the_values():
    """Of a hundred, the 99th is the last but one: nothing is made up between two of them."""
    values = [float(number) for number in range(100)]

    assert (98.0, 49.0) == (percentile(values, 99), percentile(values, 50))
