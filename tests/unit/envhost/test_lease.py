from __future__ import annotations

import pytest

from infra.envhost.lease import Fenced, Lease, LeaseKey, LeaseLimits, LeaseState, LeaseTable
from infra.errors import Failure
from schemas.outcome import FailureKind

KEY = LeaseKey("run", "group", 0, 0)
REAP_AT = 10_000.0


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable("host")


def created(table: LeaseTable, now: float = 0.0, key: LeaseKey = KEY) -> Lease:
    return table.create(key, REAP_AT, now)


def lost(failed: pytest.ExceptionInfo[Failure]) -> bool:
    return failed.value.kind is FailureKind.ENVIRONMENT_LOST


def test_a_created_lease_is_found_by_its_key(table):
    """The lease of an attempt is found again, and no other attempt's."""
    lease = created(table)

    assert table.find(KEY, 1.0) is lease
    assert table.find(LeaseKey("run", "group", 0, 1), 1.0) is None


def test_a_created_lease_is_lost_after_sixty_seconds(table):
    """An INIT that crashed leaves nothing behind."""
    lease = created(table)

    table.renew(lease.id, 59.9)
    table.renew(lease.id, 119.8)
    with pytest.raises(Failure) as failed:
        table.ready(lease.id, 180.0)

    assert lost(failed)
    assert table.find(KEY, 180.0) is None


def test_a_ready_lease_lives_until_its_reap_at(table):
    """A queue in front of RUN may be long; the one clock of the task ends the wait."""
    lease = created(table)
    table.ready(lease.id, 1.0)

    table.renew(lease.id, REAP_AT - 1)
    with pytest.raises(Failure) as failed:
        table.claim(lease.id, REAP_AT)

    assert lost(failed)


@pytest.mark.parametrize("steps", [(), ("ready",), ("claim",), ("ready", "claim")])
def test_a_withdrawn_lease_is_closed_in_whatever_state_it_was(table, steps):
    """No token is needed: the sample is nobody's any more. Who comes for it finds it closed."""
    lease = created(table)
    for step in steps:
        getattr(table, step)(lease.id, 1.0)

    assert table.withdraw(lease.id, 2.0)
    assert not table.withdraw(lease.id, 3.0)
    assert (LeaseState.CLOSED, []) == (lease.state, table.open())
    assert table.claim(lease.id, 4.0) is None
    with pytest.raises(Fenced):
        table.step(lease.id, 1, 4.0)


def test_a_lost_lease_cannot_be_withdrawn(table):
    """It has no environment any more."""
    with pytest.raises(Failure) as failed:
        table.withdraw("gone", 0.0)

    assert lost(failed)


def test_a_lease_may_be_claimed_before_it_is_ready(table):
    """RUN may be faster than INIT's acknowledgement, which then changes nothing."""
    lease = created(table)
    claimed = table.claim(lease.id, 1.0)
    table.ready(lease.id, 2.0)

    assert claimed is not None
    assert claimed.state is LeaseState.CLAIMED
    assert claimed.deadline == 61.0


@pytest.mark.parametrize("renewal", ["step", "renew"])
def test_steps_and_heartbeats_keep_a_claim_alive(table, renewal):
    """A claim lives sixty seconds from its last sign of life."""
    lease = created(table)
    table.claim(lease.id, 0.0)

    if renewal == "step":
        table.step(lease.id, 1, 50.0)
    else:
        table.renew(lease.id, 50.0, 1)

    assert lease.deadline == 110.0
    with pytest.raises(Failure) as failed:
        table.step(lease.id, 1, 110.0)
    assert lost(failed)


def test_a_second_claim_fences_the_first(table):
    """Whoever claimed before has no say: no step, no heartbeat, no close."""
    lease = created(table)
    table.claim(lease.id, 0.0)
    again = table.claim(lease.id, 1.0)

    assert again is not None
    assert again.token == 2
    for use in (table.step, table.close):
        with pytest.raises(Fenced, match="claim 1 of lease host-1 has no say"):
            use(lease.id, 1, 2.0)
    with pytest.raises(Fenced):
        table.renew(lease.id, 2.0, 1)


def test_a_stepped_lease_stays_stepped_until_it_was_reset(table):
    """A claim that crashed before its reset leaves the duty to the next one."""
    lease = created(table)
    table.claim(lease.id, 0.0)
    table.step(lease.id, 1, 1.0)

    assert table.claim(lease.id, 2.0).stepped
    assert table.claim(lease.id, 3.0).stepped
    table.was_reset(lease.id)
    assert not table.claim(lease.id, 4.0).stepped


def test_a_closed_lease_is_never_used_again(table):
    """Every claim of a closed lease says so, and no step or heartbeat passes."""
    lease = created(table)
    table.claim(lease.id, 0.0)

    assert table.close(lease.id, 1, 1.0)
    assert not table.close(lease.id, 1, 2.0)
    assert table.claim(lease.id, REAP_AT - 1) is None
    with pytest.raises(Fenced):
        table.step(lease.id, 1, 3.0)
    with pytest.raises(Fenced):
        table.renew(lease.id, 3.0, 1)
    assert table.find(KEY, 3.0) is lease


def test_a_closed_lease_is_forgotten_at_its_reap_at(table):
    """Memory of what is done ends when nobody may ask any more."""
    lease = created(table)
    table.claim(lease.id, 0.0)
    table.close(lease.id, 1, 1.0)

    assert table.expire(REAP_AT - 1) == []
    assert table.counts()["closed"] == 1
    table.expire(REAP_AT)

    assert table.counts() == {"created": 0, "ready": 0, "claimed": 0, "closed": 0}
    with pytest.raises(Failure):
        table.claim(lease.id, REAP_AT)


def test_a_lease_closed_late_is_remembered_for_a_while(table):
    """A redelivery right after a close past `reap_at` still finds it closed."""
    lease = table.create(KEY, 5.0, 0.0)
    table.claim(lease.id, 4.0)
    table.close(lease.id, 1, 20.0)

    assert table.claim(lease.id, 79.0) is None


def test_the_memory_of_closed_leases_is_bounded():
    """The closed lease that would be forgotten next goes first."""
    table = LeaseTable("host", LeaseLimits(closed_most=2))
    leases = [table.create(LeaseKey("run", "group", n, 0), REAP_AT + n, 0.0) for n in range(3)]
    for lease in leases:
        table.claim(lease.id, 0.0)
        table.close(lease.id, 1, 0.0)

    assert table.counts()["closed"] == 2
    assert table.find(leases[0].key, 1.0) is None
    assert table.find(leases[2].key, 1.0) is leases[2]


def test_expiry_names_what_ran_out_once(table):
    """The environments of leases that ran out are to be closed, each once; the others stay."""
    old = created(table)
    young = created(table, 30.0, LeaseKey("run", "group", 1, 0))

    assert table.expire(60.0) == [old.id]
    assert table.expire(61.0) == []
    assert table.find(young.key, 61.0) is young


def test_a_lease_that_ran_out_makes_room_for_a_new_one_before_it_is_reaped(table):
    """The key belongs to the newer lease, also after the older one was removed."""
    created(table)
    newer = created(table, 70.0)
    table.expire(71.0)

    assert table.find(KEY, 72.0) is newer


def test_an_unknown_lease_is_lost(table):
    """A host that restarted knows nothing of leases given by the one before."""
    with pytest.raises(Failure, match="its host started anew") as failed:
        table.claim("other-7", 0.0)

    assert lost(failed)
