"""Who may touch an environment, and when it is gone: the lease table, decided without I/O.

    create          claim                close
    ------> created ------> claimed <--+ ------> closed
               |    ready      |  |    |
               +---------> ready  +----+ claim (a new token; the old one is fenced)

    withdraw closes a lease in any state, without a token: its sample was cancelled.

Invariants: one lease per (run, group, sample, attempt) at a time, so `create` may be repeated; one valid step token
per lease, the one of its latest claim; whoever claims finds the episode at its start, because a lease that was ever
stepped must be reset before the claim is answered; a closed lease is never claimed, stepped or judged again. Together
they make a verdict the product of one uninterrupted claim.

A lease that ran out answers as one that never was: `lost`. Time is handed in as monotonic seconds. The table knows no
environment, no socket and no clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from infra.errors import Failure, RollmillError
from schemas.outcome import Boundary, FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """How long a lease lives in each state."""

    created_s: float = 60.0
    """A created lease that is neither renewed nor made ready is lost after this many seconds."""
    claimed_s: float = 60.0
    """A claimed lease is lost this many seconds after its last step or heartbeat."""
    closed_s: float = 60.0
    """A closed lease is remembered at least this many seconds, even past its `reap_at`."""
    closed_most: int = 1_000_000
    """Closed leases remembered at most; beyond it the one that would be forgotten next goes first."""


class Fenced(RollmillError):
    """Another worker claimed the lease, or closed it: this one has no say any more and drops its work silently."""


class LeaseState(StrEnum):
    """What may be done with a lease."""

    CREATED = "created"
    """Built and reset; INIT's Episode is not acknowledged yet."""
    READY = "ready"
    """The Episode is in the log; waits for a worker until `reap_at`."""
    CLAIMED = "claimed"
    """One worker steps it."""
    CLOSED = "closed"
    """An output of it is in the log, or its sample was cancelled; kept as a memory only."""


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """What a lease is for."""

    run: str
    """The experiment."""
    group: str
    """One task instance at one visit."""
    sample: int
    """Sibling number."""
    attempt: int
    """Restart of the sample; each attempt has a lease of its own."""


@dataclass(slots=True)
class Lease:
    """One entry of the table; only the table changes it."""

    id: str
    """Name of the lease, never used twice, not even by another start of the host."""
    key: LeaseKey
    """What it is for."""
    reap_at: float
    """The sample is given up at this time, monotonic seconds."""
    deadline: float
    """The lease is lost (or, when closed, forgotten) at this time, monotonic seconds."""
    state: LeaseState = LeaseState.CREATED
    """What may be done with it."""
    token: int = 0
    """The valid step token: the number of claims so far."""
    stepped: bool = False
    """The environment was stepped since its last reset."""


def lost(lease: str) -> Failure:
    """Return the failure of a lease that the host does not hold."""
    cause = f"lease {lease} is lost: it was not renewed in time, or its host started anew; make another attempt"
    return Failure(FailureKind.ENVIRONMENT_LOST, Boundary.ENVIRONMENT, cause)


class LeaseTable:
    """All leases of one start of one host.

    Args:
        instance: prefix of the lease ids, different at every start of a host.
        limits: how long leases live.
    """

    def __init__(self, instance: str, limits: LeaseLimits | None = None) -> None:
        self.limits = limits or LeaseLimits()
        self._instance = instance
        self._numbers = itertools.count(1)
        self._leases: dict[str, Lease] = {}
        self._by_key: dict[LeaseKey, str] = {}
        # Only closed leases are many and long-lived, and their deadline is final: a heap finds the due ones, while
        # the few open ones, whose deadlines move with every step, are looked through.
        self._forget: list[tuple[float, str]] = []
        self._open: dict[str, Lease] = {}

    def find(self, key: LeaseKey, now: float) -> Lease | None:
        """Return the lease of a sample's attempt, if there is one that has not run out."""
        lease = self._leases.get(self._by_key.get(key, ""))
        return lease if lease and lease.deadline > now else None

    def create(self, key: LeaseKey, reap_at: float, now: float) -> Lease:
        """Return a new lease; `find` has said that there is none."""
        lease = Lease(f"{self._instance}-{next(self._numbers)}", key, reap_at, now + self.limits.created_s)
        self._leases[lease.id] = self._open[lease.id] = lease
        self._by_key[key] = lease.id
        return lease

    def renew(self, lease_id: str, now: float, token: int | None = None) -> None:
        """Postpone the end: of a created lease without a token, of a claimed one with the claim's.

        A renewal without a token changes nothing once the Episode is acknowledged or claimed: INIT is out of it.

        Raises:
            Failure: the lease is lost.
            Fenced: the token is not valid any more.
        """
        if token is not None:
            self._claimed(lease_id, token, now)
            return
        lease = self._held(lease_id, now)
        if lease.state is LeaseState.CREATED:
            lease.deadline = now + self.limits.created_s

    def ready(self, lease_id: str, now: float) -> None:
        """Keep a created lease until its `reap_at`: the Episode that names it is in the log.

        Raises:
            Failure: the lease is lost.
        """
        lease = self._held(lease_id, now)
        if lease.state is LeaseState.CREATED:
            lease.state, lease.deadline = LeaseState.READY, lease.reap_at

    def claim(self, lease_id: str, now: float) -> Lease | None:
        """Give the lease to a new worker and fence the one before; None if it is closed.

        The caller resets the environment if the lease was `stepped`, then says so (`was_reset`), then answers.

        Raises:
            Failure: the lease is lost.
        """
        lease = self._held(lease_id, now)
        if lease.state is LeaseState.CLOSED:
            return None
        lease.state, lease.token = LeaseState.CLAIMED, lease.token + 1
        lease.deadline = now + self.limits.claimed_s
        return lease

    def step(self, lease_id: str, token: int, now: float) -> None:
        """Allow a step: from now on the environment is not at its start.

        Raises:
            Failure: the lease is lost.
            Fenced: the token is not valid any more.
        """
        self._claimed(lease_id, token, now).stepped = True

    def was_reset(self, lease_id: str) -> None:
        """Note that the environment is at its start again; called while nobody else can step it."""
        if lease := self._leases.get(lease_id):
            lease.stepped = False

    def close(self, lease_id: str, token: int, now: float) -> bool:
        """Close the lease for good and remember it; False if it was closed before by the same claim.

        Raises:
            Failure: the lease is lost.
            Fenced: another claim is the valid one.
        """
        lease = self._held(lease_id, now)
        if lease.token != token:
            raise _fenced(lease, token)
        return self._close(lease, now)

    def withdraw(self, lease_id: str, now: float) -> bool:
        """Close a lease for good, whoever holds it; False if it was closed before.

        Raises:
            Failure: the lease is lost.
        """
        return self._close(self._held(lease_id, now), now)

    def open(self) -> list[Lease]:
        """Return the leases that are not closed."""
        return list(self._open.values())

    def drop(self, lease_id: str) -> None:
        """Lose a lease now: its environment is of no use any more."""
        self._remove(lease_id)

    def expire(self, now: float) -> list[str]:
        """Remove what ran out and return the leases whose environments are to be closed."""
        ran_out = [lease.id for lease in self._open.values() if lease.deadline <= now]
        for lease_id in ran_out:
            self._remove(lease_id)
        while self._forget and self._forget[0][0] <= now:
            self._remove(heapq.heappop(self._forget)[1])
        return ran_out

    def counts(self) -> dict[str, int]:
        """Return how many leases are in each state."""
        found = Counter(lease.state.value for lease in self._open.values())
        return {state.value: found[state.value] for state in LeaseState} | {"closed": len(self._forget)}

    def _close(self, lease: Lease, now: float) -> bool:
        if lease.state is LeaseState.CLOSED:
            return False
        del self._open[lease.id]
        lease.state, lease.deadline = LeaseState.CLOSED, max(lease.reap_at, now + self.limits.closed_s)
        heapq.heappush(self._forget, (lease.deadline, lease.id))
        if len(self._forget) > self.limits.closed_most:
            self._remove(heapq.heappop(self._forget)[1])
        return True

    def _held(self, lease_id: str, now: float) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.deadline <= now:
            raise lost(lease_id)
        return lease

    def _claimed(self, lease_id: str, token: int, now: float) -> Lease:
        lease = self._held(lease_id, now)
        if lease.state is not LeaseState.CLAIMED or lease.token != token:
            raise _fenced(lease, token)
        lease.deadline = now + self.limits.claimed_s
        return lease

    def _remove(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id, None)
        self._open.pop(lease_id, None)
        # A key whose lease ran out may belong to a newer lease already.
        if lease and self._by_key.get(lease.key) == lease_id:
            del self._by_key[lease.key]


def _fenced(lease: Lease, token: int) -> Fenced:
    return Fenced(f"claim {token} of lease {lease.id} has no say: the lease is {lease.state} under claim {lease.token}")
