"""What is said to an environment host, and its answers: plain values, the same on a socket and in one process.

A failure of the environment travels as its kind, boundary and cause and is a `Failure` again on the other side;
`Fenced` and `HostFull` likewise. Bodies are msgpack maps. This file does not know HTTP, leases or environments.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec

from infra.envhost.lease import Fenced
from infra.errors import Failure, RollmillError, ServiceError
from schemas.message import Part
from schemas.messages import Task
from schemas.outcome import Boundary, FailureKind


class HostFull(ServiceError):
    """The host holds as many environments as it may, and none was closed while the caller waited."""


class BadRequest(ServiceError):
    """The host did not understand the request: the two sides speak different versions."""


class Create(Part, frozen=True, kw_only=True):
    """Build and reset an environment; repeated for the same attempt it gives the same lease."""

    run: str
    """The experiment."""
    group: str
    """One task instance at one visit."""
    sample: int
    """Sibling number."""
    attempt: int
    """Restart of the sample."""
    family: str
    """Which handler builds the environment."""
    payload: dict[str, Any]
    """What the family needs to build it."""
    seed: int
    """Seed of the environment."""
    reap_at_ms: int
    """The sample is given up at this time, milliseconds since the epoch; so is the lease."""
    wait_s: float = 120.0
    """Longest wait for a free place on the host, seconds."""

    @classmethod
    def of(cls, task: Task, *, reap_at_ms: int, wait_s: float = 120.0) -> Self:
        """Return the request for a task's environment."""
        return cls(
            run=task.run,
            group=task.group,
            sample=task.sample,
            attempt=task.attempt,
            family=task.family,
            payload=task.payload,
            seed=task.seed,
            reap_at_ms=reap_at_ms,
            wait_s=wait_s,
        )


class LeaseOnly(Part, frozen=True, kw_only=True):
    """Asks for something about a lease: ready, claim, withdraw."""

    lease: str
    """The lease."""


class Renew(Part, frozen=True, kw_only=True):
    """Postpones the end of a lease."""

    lease: str
    """The lease."""
    token: int | None = None
    """The claim's token; none from INIT, before the lease is ready."""


class Held(Part, frozen=True, kw_only=True):
    """Asks for something that only the holder of the valid claim may: verdict, close."""

    lease: str
    """The lease."""
    token: int
    """The claim's token."""


class Step(Held, frozen=True, kw_only=True):
    """One action of the policy."""

    action: dict[str, Any]
    """`name`, `arguments` and `text`."""


class Created(Part, frozen=True, kw_only=True, tag=str.lower):
    """The environment is there and at its start."""

    lease: str
    """The lease, for the Episode."""
    observation: str
    """What the agent sees first."""


class Claimed(Part, frozen=True, kw_only=True, tag=str.lower):
    """The environment is the caller's alone and at its start."""

    lease: str
    """The lease."""
    token: int
    """Goes with every step, verdict, heartbeat and with the close."""
    observation: str
    """What the agent sees first."""
    reset: bool
    """Another worker had stepped it, so it was put back to its start."""


class Closed(Part, frozen=True, kw_only=True, tag=str.lower):
    """An output of this lease is in the log, or its sample was cancelled: commit without another one."""

    lease: str
    """The lease; empty if the sample was cancelled before it had one."""


class Stepped(Part, frozen=True, kw_only=True, tag=str.lower):
    """What an action led to."""

    observation: str
    """What the agent sees next."""
    done: bool
    """The task is over, solved or not."""


class Verdict(Part, frozen=True, kw_only=True, tag=str.lower):
    """The environment's final state."""

    state: dict[str, Any]
    """What grading needs to know."""


class Done(Part, frozen=True, kw_only=True, tag=str.lower):
    """It was done; there is nothing to tell."""


class Counts(Part, frozen=True, kw_only=True, tag=str.lower):
    """How a host is."""

    instance: str
    """Changes at every start of the host."""
    capacity: int
    """Environments held at most."""
    leases: dict[str, int]
    """Leases by state."""
    environments: int
    """Environments held now, those being built and closed included."""


class Refused(Part, frozen=True, kw_only=True, tag=str.lower):
    """It was not done."""

    reason: str
    """`failure`, `fenced`, `full` or `bad_request`."""
    text: str
    """What was tried, what was found, what to do."""
    kind: FailureKind | None = None
    """Kind of a failure."""
    boundary: Boundary | None = None
    """Boundary of a failure."""


Answer = Created | Claimed | Closed | Stepped | Verdict | Done | Counts
"""What an operation gives when it was done."""


def refusal(error: RollmillError) -> Refused:
    """Return the wire form of an error of the host."""
    match error:
        case Failure():
            return Refused(reason="failure", text=error.cause, kind=error.kind, boundary=error.boundary)
        case Fenced():
            return Refused(reason="fenced", text=str(error))
        case HostFull():
            return Refused(reason="full", text=str(error))
        case _:
            return Refused(reason="bad_request", text=str(error))


def as_error(refused: Refused) -> RollmillError:
    """Return the error that the host raised."""
    match refused:
        case Refused(reason="failure", kind=FailureKind() as kind, boundary=Boundary() as where):
            return Failure(kind, where, refused.text)
        case Refused(reason="fenced"):
            return Fenced(refused.text)
        case Refused(reason="full"):
            return HostFull(refused.text)
        case _:
            return BadRequest(refused.text)


def pack(value: Part) -> bytes:
    """Return a request or an answer as msgpack.

    Raises:
        TypeError, OverflowError: a free-form field holds a value without a msgpack form.
    """
    return msgspec.msgpack.encode(value)
