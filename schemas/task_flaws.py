"""What makes a task that can be read one that cannot be run: checked by INIT, before anything is made for it.

What no reader could account for (a sibling that does not exist, a time beyond all calendars) is refused at decoding, by
`Task.check`; such a record is no task and names no sample. Here the sample is named, so it ends as failed, with the
flaw as its cause. What a family wants of its payload, the family says.
"""

from __future__ import annotations

from schemas import codec
from schemas.control import RunManifest
from schemas.identity import payload_digest, task_seed
from schemas.messages import LONGEST_BUDGET_S, Task
from schemas.transcript import sampling_flaw


def flaw(task: Task) -> str | None:
    """Return why a task cannot be run, for whoever wrote it; None if nothing speaks against it."""
    wrong = sampling_flaw(task.sampling)
    if wrong is not None:
        return wrong
    try:
        digest = payload_digest(task.payload)
    except TypeError as error:
        return f"the payload has no canonical form: {error}"
    if digest != task.payload_digest:
        return (
            f"payload_digest is {task.payload_digest!r}, the payload's is {digest!r}: tasks are told apart by it; "
            "compute it as docs/wire.md says"
        )
    return None


def refusal(task: Task) -> str | None:
    """Return why a reader or INIT would refuse a task that is to be published; None if nobody would."""
    try:
        # Through the wire: a field of the wrong type is found by nothing else than what a reader does.
        return flaw(codec.decode(codec.encode(task), Task))
    except (TypeError, codec.DecodeError) as error:
        return str(error)


def manifest_refusal(manifest: RunManifest, now_ms: int) -> str | None:
    """Return why all tasks that a run's manifest makes would be refused; None if nobody would.

    Args:
        manifest: what is to be written.
        now_ms: when its tasks would be published, milliseconds since the epoch.
    """
    try:
        manifest = codec.decode(codec.encode(manifest), RunManifest)
        seed = task_seed(manifest.seed, "", 0, 0)
    except (TypeError, OverflowError, codec.DecodeError) as error:
        return str(error)
    if not 0 <= manifest.start_within_s <= LONGEST_BUDGET_S:  # NaN is neither more nor less
        return f"start_within_s is {manifest.start_within_s}; it is 0 to {LONGEST_BUDGET_S:g} s"
    return refusal(
        Task(
            run=manifest.run,
            group="",
            sample=0,
            samples=manifest.samples,
            source="",
            payload={},
            payload_digest=payload_digest({}),
            family="",
            seed=seed,
            start_by_ms=now_ms + int(manifest.start_within_s * 1000),
            budgets=manifest.budgets,
            horizon=manifest.horizon,
            max_sampled_tokens=manifest.max_sampled_tokens,
            sampling=manifest.sampling,
        )
    )
