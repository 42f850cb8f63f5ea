import asyncio
import re
import signal

import pytest

from infra.clock import VirtualClock, settle
from infra.errors import ConfigError
from rollmill.supervisor import (
    Backoff,
    CrashLoop,
    NotBack,
    Restart,
    ServiceDied,
    Supervisor,
    SupervisorError,
    What,
)
from rollmill.supervisor.readiness import at_once
from rollmill.supervisor.runfile import read

QUICK = Backoff(first_s=0.0)


async def test_a_killed_instance_comes_back_and_says_how_long_it_was_away(python, events, run_dir):
    """Its sibling stays; the event of the death names the signal; the time runs from death to ready."""
    services = [python("run", instances=2)]

    async with Supervisor(services, run_dir=run_dir, on_event=events, backoff=QUICK) as supervisor:
        await supervisor.start()
        before = {one.instance: one.pid for one in supervisor.state().instances}
        killed = supervisor.kill("run", 1)
        away_s = await supervisor.recovered("run", 1, since=killed)
        after = {one.instance: one.pid for one in supervisor.state().instances}

    assert killed == before[1] != after[1]
    assert before[0] == after[0]
    assert 0 < away_s < 20
    (died,) = events.of(What.DIED)
    assert "run[1] died" in str(died)
    assert "killed by SIGKILL" in str(died)


async def test_the_pause_before_a_restart_doubles_up_to_its_cap(python, events, run_dir):
    """A service that keeps dying is started ever more rarely, and never more rarely than the cap says."""
    clock = VirtualClock()
    backoff = Backoff(first_s=1.0, cap_s=5.0, healthy_s=1000.0)

    async with Supervisor(
        [python("run")], run_dir=run_dir, on_event=events, clock=clock, backoff=backoff
    ) as supervisor:
        await supervisor.start()
        for life in range(1, 6):
            supervisor.kill("run")
            pause_s = (await events.nth(life, What.DIED)).retry_in_s
            await settle()
            await clock.advance(pause_s - 0.01)
            assert life - 1 == len(events.of(What.RESTARTED))
            await clock.advance(0.01)
            await events.nth(life + 1, What.READY)

    assert [event.retry_in_s for event in events.of(What.DIED)] == [1.0, 2.0, 4.0, 5.0, 5.0]


async def test_a_service_that_was_healthy_for_a_while_starts_over_with_a_short_pause(python, events, run_dir):
    """Yesterday's deaths do not make today's restart slow."""
    clock = VirtualClock()
    backoff = Backoff(first_s=1.0, cap_s=60.0, healthy_s=30.0)

    async with Supervisor(
        [python("run")], run_dir=run_dir, on_event=events, clock=clock, backoff=backoff
    ) as supervisor:
        await supervisor.start()
        for life, healthy_s in enumerate((0.0, 0.0, 29.0, 30.0), start=1):
            await clock.advance(healthy_s)
            supervisor.kill("run")
            pause_s = (await events.nth(life, What.DIED)).retry_in_s
            await settle()
            await clock.advance(pause_s)
            await events.nth(life + 1, What.READY)

    assert [event.retry_in_s for event in events.of(What.DIED)] == [1.0, 2.0, 4.0, 1.0]


def test_the_pause_stays_at_its_cap_for_ever():
    """A service may die for days."""
    assert Backoff().cap_s == Backoff().pause_s(1_000_000)


async def test_a_service_that_dies_too_often_in_a_row_is_given_up_with_its_last_words(python, events, run_dir):
    """It was ready each time, so only the count shows that it cannot work."""
    code = "print('the disk is full'); raise SystemExit(1)"
    services = [python("sink", code, ready=at_once(), give_up_after=3)]

    async with Supervisor(services, run_dir=run_dir, on_event=events, backoff=QUICK) as supervisor:
        await supervisor.start()
        with pytest.raises(CrashLoop) as caught:
            await supervisor.wait()

    assert "sink died 3 times in a row (last: exit code 1)" in str(caught.value)
    assert "the disk is full" in str(caught.value)
    assert len(events.of(What.DIED)) == 3


async def test_a_later_life_that_is_not_ready_in_time_is_restarted_too(python, events, run_dir):
    """What it needs may be restarting itself; only the first life's lateness is an error."""
    mark = run_dir / "mark"
    code = (
        f"import os, signal; mark = {str(mark)!r}; lives = len(os.listdir(mark))\n"
        "open(f'{mark}/{lives}', 'w').close()\n"
        "print('hanging' if lives == 1 else 'ready'); signal.pause()"
    )
    mark.mkdir(parents=True)
    clock = VirtualClock()
    services = [python("run", code)]

    async with Supervisor(services, run_dir=run_dir, on_event=events, clock=clock, backoff=QUICK) as supervisor:
        await supervisor.start()
        supervisor.kill("run")
        await events.nth(1, What.RESTARTED)
        async with asyncio.timeout(20):
            await supervisor._instances["run"][0].log.said(re.compile("hanging"))
        # Far beyond the limit of readiness; the process is ended, and the third life is ready.
        while len(events.of(What.DIED)) < 2:
            await clock.advance(services[0].ready.limit_s)
            await asyncio.sleep(0)
        await events.nth(2, What.READY)

    assert len(events.of(What.STARTED)) + len(events.of(What.RESTARTED)) == 3


async def test_a_service_that_finished_its_work_is_left_alone(python, events, run_dir):
    """Restarted on failure only: an exit with 0 is an end, and `wait` returns when all have ended."""
    trainer = python("trainer", "print('done')", ready=at_once(), restart=Restart.ON_FAILURE)

    async with Supervisor([trainer], run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()
        await supervisor.wait()
        assert (await supervisor.ended("trainer")).code == 0

    assert [event.what for event in events.all] == [What.STARTED, What.READY, What.ENDED]


async def test_a_service_that_is_never_restarted_ends_the_supervisor_when_it_fails(python, events, run_dir):
    """A failure nobody mends must not go unseen."""
    service = python("x", "print('lost my data'); raise SystemExit(2)", ready=at_once(), restart=Restart.NEVER)

    async with Supervisor([service], run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()
        with pytest.raises(ServiceDied, match=r"(?s)x failed \(exit code 2\).*lost my data"):
            await supervisor.wait()


async def test_waiting_for_a_service_that_does_not_come_back_has_a_limit(python, run_dir):
    """The error says what was waited for and where to look."""
    async with Supervisor([python("run")], run_dir=run_dir, backoff=Backoff(first_s=15.0)) as supervisor:
        await supervisor.start()
        killed = supervisor.kill("run", number=signal.SIGTERM)
        with pytest.raises(NotBack, match=rf"pid {killed} was killed\) was not ready again in 0 s.*run\.log"):
            await supervisor.recovered("run", since=killed, limit_s=0.2)
        with pytest.raises(SupervisorError, match="run does not run"):
            supervisor.kill("run")


async def test_an_instance_that_was_never_started_cannot_be_killed(python, run_dir):
    """The error names what was started."""
    async with Supervisor([python("run")], run_dir=run_dir) as supervisor:
        await supervisor.start()
        with pytest.raises(ConfigError, match=r"instance 7 of 'run' was never started; started are \['run'\]"):
            supervisor.kill("run", 7)


async def test_a_full_disk_ends_no_supervisor_and_services_come_back_when_there_is_room(
    python, events, run_dir, caplog
):
    """What it writes is for people: it is said once, and written again. A service that needs room is started again."""
    part, full = run_dir / "supervisor.part", [True]

    def observe(event):
        if full[0] and not part.is_symlink():
            part.symlink_to("/dev/full")
        events(event)

    code = f"import os, signal; open({str(run_dir / 'data')!r}, 'wb', 0).write(b'x'); print('ready'); signal.pause()"
    async with Supervisor([python("store", code)], run_dir=run_dir, on_event=observe, backoff=QUICK) as supervisor:
        await supervisor.start()
        before = read(run_dir).instances
        (run_dir / "data").unlink()
        (run_dir / "data").symlink_to("/dev/full")
        supervisor.kill("store")
        died = await events.nth(3, What.DIED)
        full[0] = False
        (run_dir / "data").unlink()
        part.unlink(missing_ok=True)
        await events.nth(2, What.READY)
        after = read(run_dir).instances

    assert "No space left on device" in died.last_words
    assert ([], ["ready"]) == ([one.state for one in before if one.state != "started"], [one.state for one in after])
    said = [record.getMessage() for record in caplog.records if "make room there" in record.getMessage()]
    assert 1 == len(said)
    assert str(run_dir) in said[0]
