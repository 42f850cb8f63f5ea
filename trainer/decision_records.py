"""What the trainer writes down of a step that it makes and of a group that it drops.

A step that is made again is the one that was written down, or it is an error. This module does not know the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infra.errors import RollmillError
from schemas.decisions import GroupDropped, RowSuccess, StepDecided
from trainer.group import Group
from trainer.groups import Dropped, Step


def step_decided(step: Step, *, run: str, epoch: int, tell_rows: bool) -> StepDecided:
    """Return the record of a step; `tell_rows`: the feeder chooses rows by what groups achieved."""
    return StepDecided(
        run=run,
        epoch=epoch,
        step=step.number,
        position=step.position,
        members=step.members,
        digest=step.digest,
        advantage_digest=step.advantage_digest,
        buffered=step.buffered,
        missing=step.missing,
        phase=step.phase,
        rows=tuple(_rows(step.groups)) if tell_rows else (),
    )


def group_dropped(event: Dropped, *, run: str, epoch: int, tell_rows: bool) -> GroupDropped:
    """Return the record of a group that is not trained on; `tell_rows` as above."""
    return GroupDropped(
        run=run,
        epoch=epoch,
        position=event.position,
        group=event.group.id,
        reason=event.reason,
        members=tuple(t.ref for t in event.group.completed),
        row=next(_rows([event.group]), None) if tell_rows else None,
    )


def check_same(step: Step, recorded: StepDecided) -> None:
    """Raise RollmillError unless a step that is made again is the one that was recorded."""
    if (step.digest, step.advantage_digest) == (recorded.digest, recorded.advantage_digest):
        return
    pairs = zip(step.members, recorded.members, strict=False)
    first = next((f"{ours} is now, {theirs} was recorded" for ours, theirs in pairs if ours != theirs), "advantages")
    raise RollmillError(
        f"step {step.number} cannot be made again as it was recorded; first difference: {first}. If the reward's "
        f"shaping or the estimator was changed, change it back until the recorded steps are made"
    )


def _rows(groups: Iterable[Group]) -> Iterator[RowSuccess]:
    """Yield what groups of the feeder achieved."""
    for group in groups:
        if group.admission is not None and group.completed:
            yield RowSuccess(row=group.row, success=group.success)
