import pytest

from benchmarks.step import LOSS_TOLERANCE, made_batch, padded_step, prepared


@pytest.fixture
def work(tmp_path):
    return prepared(tmp_path, made_batch(groups=2, siblings=2))


def test_both_sides_make_the_same_step(work):
    """One padded batch or passes of like length: the same loss, and the same weights but for float sums."""
    ours = work.sides["ours"].step(work.batch).loss
    rival = padded_step(work.sides["rival"], work.batch)

    assert ours == pytest.approx(rival, abs=LOSS_TOLERANCE)
    pairs = zip(work.sides["ours"].model.parameters(), work.sides["rival"].model.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-3


async def test_a_round_begins_where_the_last_one_began(work):
    """A side gives the same loss in every round."""
    await work.measured("ours")
    await work.measured("ours")

    first, second = work.losses["ours"]
    assert first == second


def test_lengths_have_a_heavy_tail():
    """The longest of 64 sequences is several times the median: padding all to it is what costs."""
    lengths = sorted(len(sequence) for group in made_batch(8, 8).groups for sequence in group)

    assert lengths[-1] > 4 * lengths[len(lengths) // 2]
