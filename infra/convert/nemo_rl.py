"""Groups in the layout of NeMo RL: message logs, and the flat batch that its losses take.

Made from NeMo RL's documentation of `DatumSpec`, message logs and the GRPO batch: no package of it can be installed
from PyPI (the one of that name is empty), so unlike `verl.py` this was never held against the real classes. Its
`BatchedDataDict` is a dictionary and takes either result as it is: `BatchedDataDict(nemo_rl_batch(groups).to_torch())`.

A message log has two messages for each turn: what the policy was told (`user` at first, `environment` later), and what
it said (`assistant`, with `generation_logprobs`). Every message has `token_ids` and `token_loss_mask`, so that
concatenating them gives the record back, up to the last sampled token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.convert.rows import Array, Decode, Row, padded, rows_of
from schemas.grouping import SiblingGroup

MessageLog = list[dict[str, Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class NemoRlBatch:
    """The graded samples of groups, B of them."""

    rollouts: dict[str, Any]
    """As a rollout gives them: `message_log`, `length` (tokens of the prompt), `loss_multiplier`, `idx` (the group's
    number in the batch), `task_name`, `total_reward`, `truncated`, `extra_env_info`."""
    train: dict[str, Any]
    """As a loss takes them, (B, T) padded on the right: `input_ids`, `token_mask`, `generation_logprobs`; and (B,):
    `input_lengths`, `sample_mask`, `total_reward`. `prompt_ids_for_adv` (B, P) is what groups are told apart by."""

    def to_torch(self) -> dict[str, Any]:
        """Return both in one dictionary with tensors in the place of arrays; needs torch."""
        import torch  # noqa: PLC0415 - only who trains calls this

        def tensors(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return torch.from_numpy(np.array(value))  # a copy: what lies in a record is read-only
            if isinstance(value, dict):
                return {key: tensors(each) for key, each in value.items()}
            return [tensors(each) for each in value] if isinstance(value, list) else value

        found: dict[str, Any] = tensors({**self.rollouts, **self.train})
        return found


def nemo_rl_batch(
    groups: Iterable[SiblingGroup], *, pad_token_id: int = 0, decode: Decode = lambda _: ""
) -> NemoRlBatch:
    """Return the graded samples of groups, in order.

    Args:
        groups: complete groups, as a `TrajectoryReader` gives them.
        pad_token_id: fills what is not there.
        decode: makes the `content` of messages from ids, for who looks at it; it is empty unless given.

    Raises:
        Unconvertible: there is no graded sample, or one has no place in a row.
    """
    rows = rows_of(groups)
    rewards = np.array([row.outcome.reward for row in rows], dtype=np.float32)
    rollouts = {
        "message_log": [message_log(row, decode) for row in rows],
        "length": np.array([row.prompt for row in rows], dtype=np.int64),
        "loss_multiplier": np.ones(len(rows), dtype=np.float32),
        "idx": _numbers(rows),
        "task_name": [row.sample.task.family for row in rows],
        "total_reward": rewards,
        "truncated": np.array([row.outcome.truncated for row in rows]),
        "extra_env_info": [{"sample": row.name, "success": row.outcome.success} for row in rows],
    }
    return NemoRlBatch(rollouts=rollouts, train=_train(rows, rewards, pad_token_id))


def message_log(row: Row, decode: Decode = lambda _: "") -> MessageLog:
    """Return one sample as its messages."""
    found: MessageLog = []
    for turn in row.record.turns:
        if turn.start < min(turn.sampled, len(row)):
            found.append(_message("environment" if found else "user", row, turn.start, turn.sampled, decode))
        if turn.sampled < turn.stop:
            said = _message("assistant", row, turn.sampled, turn.stop, decode)
            found.append({**said, "generation_logprobs": row.logprobs[turn.sampled : turn.stop]})
    return found


def _message(role: str, row: Row, start: int, stop: int, decode: Decode) -> dict[str, Any]:
    ids = row.tokens[start:stop]
    return {
        "role": role,
        "content": decode(ids),
        "token_ids": ids.astype(np.int64),
        "token_loss_mask": row.mask[start:stop].astype(np.int64),
    }


def _train(rows: Sequence[Row], rewards: Array, pad_token_id: int) -> dict[str, Any]:
    longest, prompt = max(map(len, rows)), max(row.prompt for row in rows)
    return {
        "input_ids": padded([row.tokens for row in rows], longest, fill=pad_token_id, dtype=np.int64),
        "input_lengths": np.array([len(row) for row in rows], dtype=np.int32),
        "generation_logprobs": padded([row.logprobs for row in rows], longest, fill=0, dtype=np.float32),
        "token_mask": padded([row.mask for row in rows], longest, fill=0, dtype=np.int64),
        "sample_mask": np.ones(len(rows), dtype=np.float32),
        "prompt_ids_for_adv": padded(
            [row.tokens[: row.prompt] for row in rows], prompt, fill=pad_token_id, dtype=np.int64
        ),
        "total_reward": rewards,
    }


def _numbers(rows: Sequence[Row]) -> list[int]:
    """Return the number of each row's group in the batch."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(row.sample.task.group, len(numbers)) for row in rows]
