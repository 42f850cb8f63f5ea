"""The graded samples of groups as rows: one token sequence each, as every framework wants it.

A row begins with the prompt of the first turn and ends with the last sampled token: what an environment said behind
that was read by nobody, and a reward has to lie on a token that was sampled. A sample whose history was rewritten is
several sequences with one reward; a layout of one row per sample cannot say that, so it is refused, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infra.errors import RollmillError
from schemas.grouping import SiblingGroup
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.transcript import TokenIds, Transcript

Array = npt.NDArray[np.generic]


class Unconvertible(RollmillError):
    """A sample has no place in another framework's layout."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One graded sample of T tokens."""

    sample: Trajectory
    """The sample."""
    outcome: Completed
    """Its grade."""
    record: Transcript
    """Its token record."""
    prompt: int
    """Tokens before the first sampled one."""
    tokens: TokenIds
    """Ids, (T,)."""
    mask: npt.NDArray[np.uint8]
    """1 where sampled, (T,)."""
    logprobs: npt.NDArray[np.float32]
    """Log-prob at sampling, (T,); 0 elsewhere."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def name(self) -> str:
        """The sample, as commands take it."""
        task = self.sample.task
        return f"{task.run}/{task.group}/{task.sample}"


def rows_of(groups: Iterable[SiblingGroup]) -> tuple[Row, ...]:
    """Return the graded samples of groups in order, one at least.

    Raises:
        Unconvertible: there is none, or one has no sampled token, or more than one token sequence.
    """
    rows = tuple(row_of(sample) for group in groups for sample in group.graded)
    if not rows:
        raise Unconvertible("no sample of these groups was graded: there is no row to make a batch of")
    return rows


def row_of(sample: Trajectory) -> Row:
    """Return one sample as a row. Raises Unconvertible."""
    task, record, outcome = sample.task, sample.transcript, sample.outcome
    name = f"{task.run}/{task.group}/{task.sample}"
    if not isinstance(outcome, Completed):
        raise Unconvertible(f"{name} has no reward: {type(outcome).__name__.lower()}; convert graded samples only")
    if record is None or not record.sampled_count:
        raise Unconvertible(f"{name} holds no sampled token: leave it out, and out of its group's baseline if you must")
    if len(record.segments) > 1:
        raise Unconvertible(
            f"{name} has {len(record.segments)} segments, since a template rewrote its history: one row cannot hold "
            f"them; train it from its transcript, or use a template that only appends"
        )
    sampled = np.flatnonzero(record.mask_array)
    stop = int(sampled[-1]) + 1
    return Row(
        sample=sample,
        outcome=outcome,
        record=record,
        prompt=int(sampled[0]),
        tokens=record.token_ids[:stop],
        mask=record.mask_array[:stop],
        logprobs=record.logprob_array[:stop],
    )


def padded(
    values: Sequence[npt.NDArray[np.generic]],
    width: int,
    *,
    fill: float,
    dtype: npt.DTypeLike,
    left: bool = False,
) -> Array:
    """Return arrays of different lengths as one, (rows, width)."""
    found = np.full((len(values), width), fill, dtype=dtype)
    for row, value in enumerate(values):
        found[row, width - len(value) if left else 0 : width if left else len(value)] = value
    return found


def versions(row: Row) -> tuple[int, int]:
    """Return the lowest and the highest version of the weights that sampled a row."""
    found = [span.version for span in row.record.spans]
    return min(found), max(found)


Decode = Callable[[TokenIds], str]
"""Ids -> text."""
