import asyncio
import os
import socket

import pytest

from infra.broker.pidfile import identity_of
from infra.errors import ConfigError
from rollmill.supervisor import Backoff, NotReady, Restart, ServiceDied, Supervisor, What
from rollmill.supervisor.instance import KILLED_STARTS
from rollmill.supervisor.readiness import answers_http, at_once, done, says


async def test_a_service_starts_when_all_that_it_needs_are_ready_and_ends_before_them(python, events, run_dir):
    """The order of the list does not matter; `after` alone decides, and backwards at the end."""
    services = [python("c", after=("b",)), python("a"), python("b", after=("a",))]

    async with Supervisor(services, run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()
        said = [(event.service, event.what) for event in events.all]

    assert [(name, what) for name in "abc" for what in (What.STARTED, What.READY)] == said
    assert events.order(What.STOPPED) == ["c", "b", "a"]


async def test_independent_services_start_side_by_side(python, events, run_dir):
    """Each of two waits for the other's start, which only works when both are under way at once."""
    flag = "import os, signal; os.mkfifo(p) if not os.path.exists(p) else 0; "
    one = python("one", f"p={str(run_dir / 'fifo')!r}; {flag} open(p).read(); print('ready'); signal.pause()")
    two = python("two", f"p={str(run_dir / 'fifo')!r}; {flag} open(p, 'w').close(); print('ready'); signal.pause()")
    run_dir.mkdir()
    os.mkfifo(run_dir / "fifo")

    async with Supervisor([one, two], run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()

    assert len(events.of(What.READY)) == 2


async def test_a_task_is_done_before_what_follows_it_starts(python, events, run_dir):
    """A service whose readiness is its end with 0 is never restarted and lets the next begin."""
    task = python("topics", "print('made')", ready=done(), restart=Restart.NEVER)

    async with Supervisor([python("run", after=("topics",)), task], run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()
        assert (await supervisor.ended("topics")).code == 0

    assert events.order(What.STARTED) == ["topics", "run"]
    assert events.order(What.ENDED) == ["topics"]


async def test_starting_some_services_starts_what_they_need_and_no_more(python, events, run_dir):
    """The rest can be started later, while nothing starts twice."""
    services = [python("a"), python("b", after=("a",)), python("c")]

    async with Supervisor(services, run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start("b")
        assert events.order(What.STARTED) == ["a", "b"]
        await asyncio.gather(supervisor.start(), supervisor.start())

    assert events.order(What.STARTED) == ["a", "b", "c"]


async def test_every_instance_has_a_process_a_log_and_its_number(python, run_dir):
    """Instances of one service tell themselves apart by an environment variable."""
    code = "import os, signal; print('I am', os.environ['ROLLMILL_INSTANCE']); print('ready'); signal.pause()"

    async with Supervisor([python("run", code, instances=3)], run_dir=run_dir) as supervisor:
        await supervisor.start()
        assert len({one.pid for one in supervisor.state().instances}) == 3

    for index in range(3):
        assert f"I am {index}\n" in (run_dir / "logs" / f"run-{index}.log").read_text()


async def test_a_service_that_ends_before_it_is_ready_is_an_error_with_the_end_of_its_log(python, events, run_dir):
    """The error names the exit code, what was waited for and the reason that the service gave."""
    broken = python("policy", "print('no model in /x'); raise SystemExit(3)")

    async with Supervisor([python("a"), broken], run_dir=run_dir, on_event=events) as supervisor:
        with pytest.raises(ServiceDied) as caught:
            await supervisor.start()

    assert "policy ended (exit code 3) before it was ready" in str(caught.value)
    assert "no model in /x" in str(caught.value)
    assert "policy.log" in str(caught.value)
    assert all(identity_of(event.pid) is None for event in events.of(What.STARTED))


async def test_a_service_that_is_killed_while_it_starts_is_started_again(python, events, run_dir):
    """Whoever killed it, it says nothing against the service: `start` waits for the next life."""
    slow = python("trainer", "import signal; print('loading'); signal.pause()", ready=says("ready", limit_s=60.0))

    async with Supervisor([slow], run_dir=run_dir, on_event=events, backoff=Backoff(first_s=0.0)) as supervisor:
        starting = asyncio.create_task(supervisor.start())
        await events.nth(1, What.STARTED)
        for life in range(1, KILLED_STARTS):
            supervisor.kill("trainer")
            await events.nth(life, What.RESTARTED)
        assert not starting.done()
        supervisor.kill("trainer")

        with pytest.raises(ServiceDied, match=r"trainer ended \(killed by SIGKILL\) before it was ready"):
            await starting


async def test_a_service_that_is_not_ready_in_time_is_ended_and_named(python, events, run_dir):
    """The error says what was waited for and for how long; the process does not stay."""
    code = "import signal; print('loading'); signal.pause()"
    slow = python("policy", code, ready=says("^ready$", limit_s=0.3))

    async with Supervisor([slow], run_dir=run_dir, on_event=events) as supervisor:
        with pytest.raises(NotReady, match=r"policy was not ready: a line like '\^ready\$' in its log did not happen"):
            await supervisor.start()

    assert identity_of(events.all[0].pid) is None


async def test_a_program_that_does_not_exist_is_named(python, run_dir):
    """A misspelt command reads as one."""
    missing = python("x", ready=says("never"))
    missing = type(missing)(name="x", argv=("no-such-program-here",), ready=says("never"))

    async with Supervisor([missing], run_dir=run_dir) as supervisor:
        with pytest.raises(ServiceDied, match="cannot start no-such-program-here: "):
            await supervisor.start()


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        ({"a": ("b",), "b": ("a",)}, "in a circle"),
        ({"a": ("x",), "b": ()}, "a is to start after x, which is no service"),
    ],
)
def test_an_order_that_cannot_be_is_refused_before_anything_starts(python, run_dir, after, complaint):
    """A circle or an unknown name is the caller's mistake, and nothing is written."""
    with pytest.raises(ConfigError, match=complaint):
        Supervisor([python(name, after=names) for name, names in after.items()], run_dir=run_dir)
    assert not run_dir.exists()


def test_two_services_of_one_name_are_refused(python, run_dir):
    """Names are the identity of a service."""
    with pytest.raises(ConfigError, match="one name"):
        Supervisor([python("a"), python("a")], run_dir=run_dir)


def test_a_task_that_is_restarted_always_is_refused(python, run_dir):
    """It would never be ready for good."""
    with pytest.raises(ConfigError, match="cannot be restarted always"):
        Supervisor([python("a", ready=done())], run_dir=run_dir)


async def test_a_service_ready_at_once_needs_nothing_but_its_start(python, events, run_dir):
    """For services that have nothing to wait for."""
    async with Supervisor([python("a", ready=at_once())], run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()

    assert [event.what for event in events.all] == [What.STARTED, What.READY, What.STOPPED]


async def test_an_optional_service_that_dies_is_named_and_stops_nothing(python, events, run_dir):
    """`start` waits for its first life alone, and it is started again like after any death."""
    board = python("board", "print('no faust here'); raise SystemExit(3)", optional=True)

    async with Supervisor(
        [python("a"), board], run_dir=run_dir, on_event=events, backoff=Backoff(first_s=0.0)
    ) as supervisor:
        await supervisor.start()
        await events.nth(2, What.DIED, "board")
        (event,) = supervisor.unwell()

    assert ("board", "no faust here") == (event.service, event.last_words)
    assert ["a"] == events.order(What.READY)


async def test_an_optional_service_that_is_late_stops_nothing_either(python, events, run_dir):
    """The wait for it has a limit, like every wait."""
    board = python("board", "import signal; signal.pause()", ready=says("^ready$", limit_s=0.3), optional=True)

    async with Supervisor([board], run_dir=run_dir, on_event=events, backoff=Backoff(first_s=0.0)) as supervisor:
        await supervisor.start()
        assert ["board"] == [event.service for event in supervisor.unwell()]
        await events.nth(1, What.RESTARTED, "board")


async def test_an_optional_service_that_comes_up_is_waited_for(python, events, run_dir):
    """What works is ready when `start` returns."""
    async with Supervisor([python("board", optional=True)], run_dir=run_dir, on_event=events) as supervisor:
        await supervisor.start()
        assert [] == supervisor.unwell()

    assert ["board"] == events.order(What.READY)


async def test_the_error_of_a_probe_says_what_the_last_try_found(python, run_dir):
    """The address and the reason: refused, another answer, no answer."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{link.getsockname()[1]}/ping"
    store = python("clickhouse", ready=answers_http(url, limit_s=0.5))

    async with Supervisor([store], run_dir=run_dir) as supervisor:
        with pytest.raises(NotReady, match=rf"clickhouse was not ready: an answer 200 from {url} .*the last try: "):
            await supervisor.start()
