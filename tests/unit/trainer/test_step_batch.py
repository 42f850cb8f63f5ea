from dataclasses import replace

import numpy as np
import pytest
from synthetic_log import end, rules
from synthetic_tokens import transcript

from trainer.algorithm_config import AlgorithmConfig, Estimator
from trainer.groups import AssemblerState, GroupAssembler
from trainer.step_batch import step_batch

REWRITTEN = transcript([([1], [2, 3]), ([4], [5]), ([6, 7], [8])], segments=(0, 3), tail=[9, 10])
"""Three turns in two segments, and an observation after them."""

SHORT = transcript([([1], [2])], tail=[3])


def decided(*records, **changes):
    """Return the step that a group of two makes."""
    machine = GroupAssembler(rules(groups=1, std=False, **changes), AssemblerState.fresh(0), versions={0: 0})
    return next(event for record in records for event in machine.feed(record))


def records(**changes):
    """Return two siblings: one of three turns with success, one of one turn without."""
    return (
        replace(end(0, "a", 0, 1.0, turns=3, transcript=REWRITTEN), **changes),
        end(1, "a", 1, turns=1, transcript=SHORT),
    )


def made(step, **algorithm):
    return step_batch(step, AlgorithmConfig(**algorithm), lag=lambda _: 0, vocabulary=100)


def test_each_segment_is_a_sequence_with_the_advantage_of_its_sample():
    """A rewritten history counts once in the baseline: 1/2 and -1/2, not a mean over three sequences."""
    (group,) = made(decided(*records())).groups

    assert [s.tokens.tolist() for s in group] == [[1, 2, 3], [4, 5, 6, 7, 8], [1, 2]]
    assert [float(s.advantage) for s in group] == [0.5, 0.5, -0.5]


def test_each_turn_has_its_own_advantage_where_there_are_process_rewards():
    """Returns-to-go (1, 1, 0) and (0): mean 1/2, and the outcome's 1/2 or -1/2."""
    (group,) = made(decided(*records(turn_rewards=(0.0, 1.0, 0.0)))).groups

    assert [np.asarray(s.advantage).tolist() for s in group] == [[1.0, 1.0], [1.0, 0.0], [-1.0]]


def test_a_sample_without_a_token_record_is_in_the_baseline_alone():
    """The advantages of the others stay with the others."""
    first, second = records()

    (group,) = made(decided(replace(first, transcript=None), second)).groups

    assert [float(s.advantage) for s in group] == [-0.5]


# ---- with a value head


def by_model(*given, **algorithm):
    step = decided(*given, estimator=Estimator.GAE)
    return step, made(step, estimator=Estimator.GAE, **algorithm)


def test_a_step_whose_advantages_need_the_model_says_what_each_episode_earned():
    """Its process rewards, the shaped reward at the end, and which sequences are its; no advantage, no digest."""
    step, batch = by_model(*records(turn_rewards=(0.25, 0.0, 0.5), reward=2.0))

    assert (step.advantages, step.advantage_digest) == ((), "")
    assert [(e.sequences, e.rewards, e.truncated) for e in batch.episodes] == [
        ((0, 1), (0.25, 0.0, 2.5), False),
        ((2,), (0.0,), False),
    ]
    assert [s.turns.tolist() for s in batch.groups[0]] == [[0, 0], [1, 2], [0]]


def test_samples_that_sampled_nothing_are_no_episode():
    """The indices of the others still name their sequences."""
    first, second = records()

    _, batch = by_model(replace(first, transcript=None), second)

    assert [e.sequences for e in batch.episodes] == [(0,)]


@pytest.mark.parametrize(
    ("truncated", "option", "last"), [(True, True, 10), (True, False, 8), (False, True, 8), (False, False, 8)]
)
def test_the_end_of_the_record_is_kept_only_where_its_value_is_asked_for(truncated, option, last):
    """A truncated episode bootstraps from what it saw last, if the option is on."""
    _, batch = by_model(*records(truncated=truncated), bootstrap_truncated=option)

    assert batch.groups[0][1].tokens.tolist()[-1] == last
    assert batch.groups[0][1].positions.tolist() == [1, 4]
    assert batch.episodes[0].truncated is truncated
