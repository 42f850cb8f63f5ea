import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic_tokens import transcript

from schemas.transcript import Sampling
from trainer.batching import TokenSequence, UntrainableTranscript, micro_batches, sequences


def one(record, advantage=0.5, **changes):
    values = {"lag": lambda _: 0, "max_lag": 1, "vocabulary": 100}
    return sequences(record, advantage, **{**values, **changes})


def test_each_sampled_token_knows_its_logprob_and_place():
    """Prompt tokens and what follows the last answer are only context, or nothing."""
    (found,) = one(transcript([([1, 2], [3]), ([4], [5, 6])], tail=[7, 8]))

    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.positions.tolist() == [2, 4, 5]
    np.testing.assert_allclose(found.rollout, [-0.03, -0.05, -0.06], rtol=1e-6)
    assert found.advantage == 0.5


def test_temperature_and_lag_are_those_of_the_span():
    """Each turn may be drawn by other weights at another temperature."""
    record = transcript(
        [([1], [2]), ([3], [4])], versions=[3, 5], sampling=[Sampling(temperature=0.5), Sampling(temperature=2.0)]
    )

    (found,) = one(record, lag=lambda version: 5 - version)

    assert found.temperature.tolist() == [0.5, 2.0]
    assert found.lag.tolist() == [2, 0]


def test_tokens_beyond_the_lag_are_masked_and_the_rest_trained():
    """late = mask."""
    (found,) = one(transcript([([1], [2]), ([3], [4])], versions=[3, 5]), lag=lambda version: 5 - version)

    assert found.trained.tolist() == [0.0, 1.0]
    assert found.trained_count == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=8),
    st.integers(0, 12),
    st.integers(0, 4),
)
def test_no_token_is_trained_on_that_lags_more_than_it_may_however_many_versions_a_sample_has(turns, now, max_lag):
    """Also with max_lag 0, where every other version is one too many; what is left out is counted by nobody."""
    record = transcript([([1], [2] * count) for _, count in turns], versions=[version for version, _ in turns])

    # A version that nobody announced is infinitely old (`GroupAssembler.lag_at_use`).
    found = one(record, lag=lambda version: now - version if version <= now else 99, max_lag=max_lag)

    young = [now - max_lag <= version <= now for version, count in turns for _ in range(count)]
    assert [bool(value) for sequence in found for value in sequence.trained] == young
    assert sum(sequence.trained_count for sequence in found) == sum(young)


def test_segments_become_sequences_with_one_advantage():
    """A rewritten history starts a new prefix; positions are relative to it."""
    found = one(transcript([([1], [2]), ([3, 4], [5])], segments=(0, 2)))

    assert [s.tokens.tolist() for s in found] == [[1, 2], [3, 4, 5]]
    assert [s.positions.tolist() for s in found] == [[1], [2]]
    assert {s.advantage for s in found} == {0.5}


def test_each_token_has_the_advantage_of_its_turn_in_whatever_segment_it_is():
    """Three turns in two segments; turns are those of the episode, positions those of the segment."""
    record = transcript([([1], [2]), ([3], [4, 5]), ([6, 7], [8])], segments=(0, 5))

    first, second = one(record, np.array([0.1, 0.2, 0.3], dtype=np.float32))
    (micro,) = micro_batches([first, second], 100)

    assert (first.turns.tolist(), second.turns.tolist()) == ([0, 1, 1], [2])
    np.testing.assert_allclose(micro.advantages[micro.rows == list(micro.members).index(0)], [0.1, 0.2, 0.2])
    np.testing.assert_allclose(micro.advantages[micro.rows == list(micro.members).index(1)], [0.3])


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=8))
def test_each_sampled_token_is_in_exactly_one_segment_with_its_own_values(turns):
    """However history was rewritten, the sequences hold the sampled tokens once, in order."""
    ids = iter(range(1, 200))
    made = [([next(ids) for _ in range(prompt)], [next(ids) for _ in range(answer)]) for prompt, answer, _ in turns]
    lengths = np.cumsum([0, *(len(p) + len(a) for p, a in made)])
    segments = (0, *(int(n) for n, (_, _, anew) in zip(lengths[1:-1], turns[1:], strict=True) if anew))

    found = one(transcript(made, segments=segments), np.arange(len(turns), dtype=np.float32), vocabulary=200)

    tokens = [int(token) for s in found for token in s.tokens[s.positions]]
    assert tokens == [token for _, answer in made for token in answer]
    assert [int(t) for s in found for t in s.turns] == [
        number for number, (_, answer) in enumerate(made) for _ in answer
    ]
    assert [float(a) for s in found for a in s.advantage] == [float(t) for s in found for t in s.turns]
    np.testing.assert_allclose(
        np.concatenate([[], *(s.rollout for s in found)]), [-0.01 * t for t in tokens], rtol=1e-6
    )


def test_an_advantage_for_other_turns_than_there_are_is_refused():
    """Nothing is shifted or padded."""
    with pytest.raises(UntrainableTranscript, match="outside of the 1 turns"):
        one(transcript([([1], [2]), ([3], [4])]), np.zeros(1, dtype=np.float32))


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (transcript([([1], [200])]), "vocabulary"),
        (transcript([([1], [2])], sampling=[Sampling(top_p=0.9)]), "top_p"),
        (transcript([([1], [2])], sampling=[Sampling(temperature=0.0)]), "temperature"),
        (transcript([([1], [2])], mode="raw_logprobs"), "raw_logprobs"),
    ],
)
def test_what_cannot_be_compared_with_the_trainer_is_refused(record, names):
    """The error says what to sample with instead."""
    with pytest.raises(UntrainableTranscript, match=names):
        one(record)


def test_padding_is_on_the_right_and_targets_are_predicted_from_the_token_before():
    """Two sequences in one pass."""
    batch = one(transcript([([1, 2], [3])])) + one(transcript([([4], [5, 6, 7])]))

    (micro,) = micro_batches(batch, 100)

    assert micro.ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert micro.rows.tolist() == [0, 1, 1, 1]
    assert micro.columns.tolist() == [1, 0, 1, 2]
    assert micro.targets.tolist() == [3, 5, 6, 7]


def plain(length):
    positions = np.arange(1, length)
    ones = np.ones(length - 1, dtype=np.float32)
    return TokenSequence(
        tokens=np.arange(length),
        positions=positions,
        rollout=-ones,
        temperature=ones,
        lag=np.zeros(length - 1, dtype=np.int64),
        trained=ones,
        advantage=1.0,
    )


@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(20, 200))
def test_every_sequence_is_in_exactly_one_pass_and_passes_are_bounded(lengths, limit):
    """A pass has at most the tokens asked for, unless one sequence alone is longer."""
    batch = [plain(length) for length in lengths]

    passes = micro_batches(batch, limit)

    assert sorted(i for micro in passes for i in micro.members) == list(range(len(batch)))
    assert all(micro.ids.numel() <= limit or len(micro.members) == 1 for micro in passes)


def test_like_lengths_share_a_pass():
    """Short ones are not padded to the long one."""
    passes = micro_batches([plain(n) for n in (50, 5, 5, 48)], 100)

    assert [sorted(micro.members) for micro in passes] == [[1, 2], [0, 3]]
    assert passes[0].ids.dtype == torch.int64
