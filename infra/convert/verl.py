"""Groups in the layout of verl's DataProto (tried with verl 0.9.1).

    prompts            (B, P)      the first turn's prompt, padded on the left
    responses          (B, R)      all that follows: sampled tokens and observations, padded on the right
    response_mask      (B, R)      1 where the policy sampled
    rollout_log_probs  (B, R)      log-prob at sampling; 0 elsewhere
    input_ids          (B, P + R)  both
    attention_mask     (B, P + R)  1 where there is no padding
    position_ids       (B, P + R)  0 at the first real token
    token_level_scores (B, R)      the reward, on the last sampled token; `rm_scores` is the same

Beside them lie, one per row, `uid` (the group, over which verl normalises), `__num_turns__`, `min_global_steps` and
`max_global_steps` (versions of the weights), `data_source` (the family), and our own `sample`, `success`, `truncated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.convert.rows import Array, Row, Unconvertible, padded, rows_of, versions
from schemas.grouping import SiblingGroup


@dataclass(frozen=True, eq=False, kw_only=True)
class VerlBatch:
    """What a DataProto is made of."""

    tensors: dict[str, Array]
    """Name -> array, B rows each."""
    non_tensors: dict[str, Array]
    """Name -> one value per row."""
    meta_info: dict[str, Any]
    """Of the whole batch: `temperature`, if all rows were sampled with the same one."""

    def to_data_proto(self) -> Any:
        """Return a `verl.DataProto`; needs verl and torch."""
        import torch  # noqa: PLC0415 - only who has verl calls this
        from verl import DataProto  # noqa: PLC0415

        tensors = {name: torch.from_numpy(values) for name, values in self.tensors.items()}
        return DataProto.from_dict(tensors=tensors, non_tensors=self.non_tensors, meta_info=self.meta_info)


def verl_batch(
    groups: Iterable[SiblingGroup],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    process_rewards: bool = False,
) -> VerlBatch:
    """Return the graded samples of groups as one batch, in order.

    Args:
        groups: complete groups, as a `TrajectoryReader` gives them.
        pad_token_id: fills what is not there.
        prompt_length: P; the longest prompt unless given.
        response_length: R; the longest response unless given.
        process_rewards: add each turn's process reward, on its last token, for estimators that look at tokens.

    Raises:
        Unconvertible: there is no graded sample, or one that does not fit.
    """
    rows = rows_of(groups)
    p = _width(rows, [row.prompt for row in rows], prompt_length, "prompt_length")
    r = _width(rows, [len(row) - row.prompt for row in rows], response_length, "response_length")
    prompts = padded([row.tokens[: row.prompt] for row in rows], p, fill=pad_token_id, dtype=np.int64, left=True)
    responses = padded([row.tokens[row.prompt :] for row in rows], r, fill=pad_token_id, dtype=np.int64)
    attention = np.concatenate(
        [
            padded([np.ones(row.prompt) for row in rows], p, fill=0, dtype=np.int64, left=True),
            padded([np.ones(len(row) - row.prompt) for row in rows], r, fill=0, dtype=np.int64),
        ],
        axis=1,
    )
    scores = padded([_scores(row, process=process_rewards) for row in rows], r, fill=0, dtype=np.float32)
    return VerlBatch(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": padded([row.mask[row.prompt :] for row in rows], r, fill=0, dtype=np.int64),
            "rollout_log_probs": padded([row.logprobs[row.prompt :] for row in rows], r, fill=0, dtype=np.float32),
            "input_ids": np.concatenate([prompts, responses], axis=1),
            "attention_mask": attention,
            "position_ids": np.clip(np.cumsum(attention, axis=1) - 1, 0, None),
            "token_level_scores": scores,
            "rm_scores": scores.copy(),
        },
        non_tensors=_beside(rows),
        meta_info=_meta(rows),
    )


def _width(rows: Sequence[Row], lengths: Sequence[int], given: int | None, name: str) -> int:
    longest = max(range(len(rows)), key=lengths.__getitem__)
    if given is not None and lengths[longest] > given:
        raise Unconvertible(
            f"{rows[longest].name} needs {name} = {lengths[longest]}, {given} was given: make it larger, or leave the "
            f"sample out; a record is never cut"
        )
    return lengths[longest] if given is None else given


def _scores(row: Row, *, process: bool) -> Array:
    """Return the reward of each token behind the prompt."""
    found = np.zeros(len(row), dtype=np.float32)
    found[-1] = row.outcome.reward
    if process:
        for turn, reward in zip(row.record.turns, row.outcome.turn_rewards, strict=False):
            found[turn.stop - 1] += reward
    return found[row.prompt :]


def _beside(rows: Sequence[Row]) -> dict[str, Array]:
    bounds = [versions(row) for row in rows]
    return {
        "uid": _objects([row.sample.task.group for row in rows]),
        "sample": _objects([row.name for row in rows]),
        "data_source": _objects([row.sample.task.family for row in rows]),
        "success": np.array([row.outcome.success for row in rows], dtype=np.float64),
        "truncated": np.array([row.outcome.truncated for row in rows]),
        "__num_turns__": np.array([len(row.record.turns) for row in rows], dtype=np.int32),
        "min_global_steps": _objects([low for low, _ in bounds]),
        "max_global_steps": _objects([high for _, high in bounds]),
    }


def _meta(rows: Sequence[Row]) -> dict[str, Any]:
    temperatures = {span.sampling.temperature for row in rows for span in row.record.spans}
    return {"temperature": temperatures.pop()} if len(temperatures) == 1 else {}


def _objects(values: Sequence[Any]) -> Array:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
