"""What makes a task that can be read one that cannot be run: checked once, by INIT, before anything is made for it.

What no reader could account for (a sibling that does not exist, a time beyond all calendars) is refused at decoding, by
`Task.check`; such a record is no task and names no sample. Here the sample is named, so it ends as failed, with the
flaw as its cause. What a family wants of its payload, the family says.
"""

from __future__ import annotations

import math

from schemas.identity import payload_digest
from schemas.messages import Task

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (math.ulp(0.0), 1.0),  # 0 would leave no token
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "max_tokens": (1, 2**31 - 1),
}
"""Field of the sampling parameters -> lowest and highest value."""


def flaw(task: Task) -> str | None:
    """Return why a task cannot be run, for whoever wrote it; None if nothing speaks against it."""
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(task.sampling, name)
        if not low <= value <= high:  # NaN is neither more nor less
            return f"sampling.{name} is {value}; it is {low:g} to {high:g}"
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
