"""Groups in the layouts of other frameworks: every sampled token with its log-prob, every reward once."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from infra.convert.nemo_rl import nemo_rl_batch
from infra.convert.rows import Unconvertible, rows_of
from infra.convert.verl import verl_batch
from tests.made_up_groups import failure, graded, made_up_groups, transcript

PAD = 0
GROUPS = made_up_groups()
SAMPLES = [sample for group in GROUPS for sample in group.graded]


def group_of(*samples):
    """Return the first group with other samples."""
    return replace(GROUPS[0], samples=samples)


def until_last_sampled(sample):
    """Return ids, mask and log-probs of a record without what nobody answered."""
    record = sample.transcript
    stop = int(np.flatnonzero(record.mask_array)[-1]) + 1
    return record.token_ids[:stop], record.mask_array[:stop], record.logprob_array[:stop]


def test_a_verl_row_is_the_record_with_padding_around_it():
    """Prompts end and responses begin at one column; what is masked out of them was never there."""
    found = verl_batch(GROUPS, pad_token_id=PAD).tensors
    p = found["prompts"].shape[1]

    assert len(found["prompts"]) == len(SAMPLES)
    for row, sample in enumerate(SAMPLES):
        ids, mask, logprobs = until_last_sampled(sample)
        real = found["attention_mask"][row] == 1
        assert found["input_ids"][row][real].tolist() == ids.tolist()
        assert (found["input_ids"][row][~real] == PAD).all()
        assert found["position_ids"][row][real].tolist() == list(range(len(ids)))
        prompt = int(np.flatnonzero(mask)[0])
        in_response = found["attention_mask"][row][p:] == 1
        assert found["response_mask"][row][in_response].tolist() == mask[prompt:].tolist()
        assert found["response_mask"][row][~in_response].sum() == 0
        assert found["rollout_log_probs"][row][in_response].tolist() == logprobs[prompt:].tolist()
    assert (np.concatenate([found["prompts"], found["responses"]], axis=1) == found["input_ids"]).all()


def test_a_verl_reward_lies_on_the_last_sampled_token():
    """So that the sum over a row is the reward, and a discount has somewhere to begin."""
    found = verl_batch(GROUPS, pad_token_id=PAD)
    scores, mask = found.tensors["token_level_scores"], found.tensors["response_mask"]

    assert scores.sum(axis=1).tolist() == [sample.outcome.reward for sample in SAMPLES]
    for row in range(len(SAMPLES)):
        (at,) = np.flatnonzero(scores[row]) if scores[row].any() else (np.flatnonzero(mask[row])[-1],)
        assert at == np.flatnonzero(mask[row])[-1]
    assert found.non_tensors["uid"].tolist() == [sample.task.group for sample in SAMPLES]
    assert found.non_tensors["sample"][0] == "r/g0/0"
    assert found.meta_info == {"temperature": 1.0}


def test_process_rewards_lie_on_the_last_token_of_their_turn():
    """Where they are asked for."""
    found = verl_batch(GROUPS, pad_token_id=PAD, process_rewards=True).tensors["token_level_scores"]

    for row, sample in enumerate(SAMPLES):
        first = sample.transcript.turns[0].sampled
        ends = [turn.stop - 1 - first for turn in sample.transcript.turns]
        expected = np.zeros(found.shape[1])
        for at, reward in zip(ends, sample.outcome.turn_rewards, strict=True):
            expected[at] += reward
        expected[ends[-1]] += sample.outcome.reward
        assert found[row].tolist() == expected.tolist()


def test_a_verl_batch_can_have_a_width_and_says_who_does_not_fit():
    """A record is never cut: half an episode with a whole reward is a lie."""
    found = verl_batch(GROUPS, pad_token_id=PAD, prompt_length=20, response_length=70).tensors
    assert found["input_ids"].shape == (len(SAMPLES), 90)

    with pytest.raises(Unconvertible, match=r"r/g\d/\d needs response_length = \d+, 1 was given"):
        verl_batch(GROUPS, pad_token_id=PAD, response_length=1)


def test_a_verl_batch_sampled_at_several_temperatures_names_none():
    """It divides the logits of a batch by one."""
    hot = msgspec.structs.replace(SAMPLES[0].transcript.spans[0].sampling, temperature=0.5)
    spans = tuple(msgspec.structs.replace(span, sampling=hot) for span in SAMPLES[0].transcript.spans)
    other = msgspec.structs.replace(SAMPLES[0], transcript=msgspec.structs.replace(SAMPLES[0].transcript, spans=spans))

    assert verl_batch([group_of(other, SAMPLES[1])], pad_token_id=PAD).meta_info == {}


def test_nemo_messages_give_the_record_back():
    """Those of the policy have log-probs and are trained on, the others neither."""
    found = nemo_rl_batch(GROUPS, decode=lambda ids: f"{len(ids)} tokens").rollouts

    for log, sample in zip(found["message_log"], SAMPLES, strict=True):
        ids, mask, logprobs = until_last_sampled(sample)
        assert np.concatenate([message["token_ids"] for message in log]).tolist() == ids.tolist()
        assert np.concatenate([message["token_loss_mask"] for message in log]).tolist() == mask.tolist()
        said = [message for message in log if message["role"] == "assistant"]
        assert np.concatenate([m["generation_logprobs"] for m in said]).tolist() == logprobs[mask == 1].tolist()
        roles = [message["role"] for message in log]
        assert roles == ["user", "assistant", *["environment", "assistant"] * (len(sample.transcript.turns) - 1)]
        assert log[0]["content"] == f"{found['length'][SAMPLES.index(sample)]} tokens"
        assert not any("generation_logprobs" in message for message in log if message["role"] != "assistant")


def test_a_nemo_batch_is_what_its_messages_are_when_they_are_laid_flat():
    """Padded on the right; a group has one prompt and one number."""
    found = nemo_rl_batch(GROUPS, pad_token_id=PAD)
    flat = found.train

    for row, sample in enumerate(SAMPLES):
        ids, mask, logprobs = until_last_sampled(sample)
        length = flat["input_lengths"][row]
        assert flat["input_ids"][row, :length].tolist() == ids.tolist()
        assert flat["token_mask"][row, :length].tolist() == mask.tolist()
        assert flat["generation_logprobs"][row, :length].tolist() == logprobs.tolist()
        assert not flat["token_mask"][row, length:].any()
    assert flat["total_reward"].tolist() == [sample.outcome.reward for sample in SAMPLES]
    assert found.rollouts["idx"] == [int(sample.task.group[1:]) for sample in SAMPLES]
    assert found.rollouts["truncated"].tolist() == [sample.outcome.truncated for sample in SAMPLES]


def test_nemo_arrays_become_tensors_also_inside_messages():
    """A tensor can be written to; a record cannot, and stays as it was."""
    import torch

    found = nemo_rl_batch(GROUPS).to_torch()
    first = found["message_log"][0][0]["token_ids"]
    before = SAMPLES[0].transcript.token_ids.tolist()
    first += 1

    assert found["input_ids"].dtype == torch.int64
    assert found["message_log"][0][1]["generation_logprobs"].dtype == torch.float32
    assert SAMPLES[0].transcript.token_ids.tolist() == before


def test_samples_without_a_reward_are_no_rows():
    """They failed for reasons of the system, and are in no baseline either."""
    assert any(group.failed for group in GROUPS)
    assert len(rows_of(GROUPS)) == len(SAMPLES)
    with pytest.raises(Unconvertible, match="no sample of these groups was graded"):
        verl_batch([group_of(failure(0, 0, 1))], pad_token_id=PAD)
    with pytest.raises(Unconvertible, match="no sample of these groups was graded"):
        nemo_rl_batch([])


@pytest.mark.parametrize("convert", [lambda groups: verl_batch(groups, pad_token_id=PAD), nemo_rl_batch])
def test_what_has_no_place_in_a_row_is_refused_by_its_name(convert):
    """A history that was rewritten, and a grade without tokens."""
    sample = graded(7, 3, 4, np.random.default_rng(1), turns=2)
    second = sample.transcript.turns[1].start
    broken = msgspec.structs.replace(
        sample, transcript=msgspec.structs.replace(sample.transcript, segments=(0, second))
    )

    with pytest.raises(Unconvertible, match="r/g7/3 has 2 segments"):
        convert([group_of(broken)])
    with pytest.raises(Unconvertible, match="r/g7/3 holds no sampled token"):
        convert([group_of(msgspec.structs.replace(sample, transcript=None))])
    silent = transcript([(3, 0)], np.random.default_rng(1))
    with pytest.raises(Unconvertible, match="r/g7/3 holds no sampled token"):
        convert([group_of(msgspec.structs.replace(sample, transcript=silent))])
