"""The error tree: what can go wrong, named by who has to act.

    RollmillError
    |-- ConfigError           the caller wrote something that cannot work
    |-- ServiceError          a service outside this process did not do its part
    |   |-- BusError          the broker: unreachable, refused, too slow
    |   |   |-- OffsetLost    the offset to read from is no longer in the log
    |   |   `-- NotOwner      a commit for a partition that now belongs to another member
    |   `-- WaitTimeout       something that was waited for did not happen in time
    |-- TooLarge              a message exceeds what the log carries
    `-- Failure               a rollout failed: data with a cause, turned into a record by the retry middleware

A seam adds its own leaves beside its code, such as `inference/base.py` and `broker/errors.py`. Whoever calls code that
is not ours wraps it in `boundary`; the retry middleware catches what is left of a job; anywhere else errors are caught
by name, or a comment says why not. An error says what was tried, what was found and what to do.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from schemas.outcome import Boundary, Failed, FailureKind

CAUSE_CHARS = 2_000
"""Longest cause that a failure keeps: it travels in a record and in an event, which have limits."""

log = logging.getLogger(__name__)


class RollmillError(Exception):
    """Root of all errors that Rollmill raises on purpose."""

    exit_code: ClassVar[int] = 1
    """What a command that ends with it returns."""


class ConfigError(RollmillError):
    """Configuration, arguments or input files cannot work as they are."""


class ServiceError(RollmillError):
    """A service outside this process did not do its part."""


class BusError(ServiceError):
    """The broker is unreachable, refused or was too slow."""


class OffsetLost(BusError):
    """The offset to continue from is no longer in the log: retention removed it."""


class NotOwner(BusError):
    """A commit was refused because the partition belongs to another member now."""


class WaitTimeout(ServiceError):
    """Something that was waited for did not happen within its limit."""


class TooLarge(RollmillError):
    """A message exceeds the largest record that the log carries."""


class Failure(RollmillError):
    """A rollout failed for a reason that is not the policy's.

    Attributes:
        kind: decides whether another attempt is made.
        boundary: the seam at which it was seen.
        cause: the error, for a person; cut where it is too long for a record.
    """

    def __init__(self, kind: FailureKind, boundary: Boundary, cause: str) -> None:
        # Foreign code may raise a text of megabytes, or one that is not Unicode: it must still fit into a record.
        short = cause if len(cause) <= CAUSE_CHARS else f"{cause[:CAUSE_CHARS]}... ({len(cause)} characters)"
        self.cause = short.encode("utf-8", "backslashreplace").decode()
        super().__init__(f"{boundary.value}: {self.cause}")
        self.kind = kind
        self.boundary = boundary

    def outcome(self) -> Failed:
        """Return the failure as the outcome of a trajectory."""
        return Failed(kind=self.kind, boundary=self.boundary, cause=self.cause)


@contextmanager
def boundary(where: Boundary, kind: FailureKind) -> Iterator[None]:
    """Turn any error that leaves the block into a Failure of this kind at this boundary.

    For calls into code that is not ours (a handler, an environment): whatever it raises is its failure, not ours.
    """
    try:
        yield
    except Failure:
        raise
    except (Exception, SystemExit) as error:  # a library may call sys.exit: that must not end our process
        # Whoever wrote the handler needs the trace; the record keeps the place where it was raised.
        log.warning("%s raised", where.value, exc_info=error)
        raise Failure(kind, where, f"{type(error).__name__}: {error}{_place_of(error)}") from error


def _place_of(error: BaseException) -> str:
    """Return the innermost place of an error, for a person."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
