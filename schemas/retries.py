"""When a failed attempt is made again, as one table: kind of failure -> delays of the next attempts.

The n-th attempt that fails waits for the n-th delay of its failure's kind; a kind whose delays are used up ends the
sample. So the length of a line is the limit of its kind, and the longest line bounds a sample whatever breaks it.
Attempts are counted over all kinds, since a sample does not become fresh because it breaks in another way. Each delay
is a tier, a topic of its own (`topics.py`), whose head is always the earliest due. How a failure becomes a record is
not known here: `infra/middleware/retry.py`.
"""

from __future__ import annotations

from typing import Literal

from schemas.outcome import FailureKind

Delay = Literal["5s", "30s", "5m"]
"""Time between a failure and the next attempt: the name of a tier."""

RETRIES: dict[FailureKind, tuple[Delay, ...]] = {
    FailureKind.INFRASTRUCTURE: ("5s", "30s", "5m"),  # a restart takes seconds, a node that is replaced minutes
    FailureKind.ENVIRONMENT_LOST: ("5s", "5s", "30s"),  # another environment is as good at once
    FailureKind.ENGINE: ("5s", "30s"),  # RUN had waited for the engine itself already
    FailureKind.RATE_LIMIT: ("30s", "5m", "5m"),  # asking again soon is what the limit is about
    FailureKind.HANDLER: (),  # the same task would raise again
    FailureKind.INVALID_TASK: (),  # the same task is as invalid again
}
"""Kind of a failure -> how long the next attempts wait, in order."""


def next_delay(kind: FailureKind, tried: int) -> Delay | None:
    """Return how long the next attempt waits; None when there is none.

    Args:
        kind: why the last attempt failed.
        tried: attempts made before that one.
    """
    delays = RETRIES[kind]
    return delays[tried] if tried < len(delays) else None
