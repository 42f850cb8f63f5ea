import socket
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web

from infra.config import BusConfig, ClickHouseConfig, Config, StageConfig, load
from infra.envhost.address import Address
from rollmill import services as services_module
from rollmill.cli import COMMANDS
from rollmill.services import local_services, make_plan, reach_elsewhere
from rollmill.supervisor import NotReady, Restart, Supervisor
from rollmill.supervisor.readiness import at_once


def test_the_services_can_be_started_in_an_order(tmp_path):
    """No circle, no unknown name; everything that uses the log starts after its topics are there."""
    services = local_services(make_plan(tmp_path))
    Supervisor(services, run_dir=tmp_path)

    assert {service.name for service in services} == {
        *("broker", "topics", "clickhouse", "sink", "policy", "envhost", "init", "run", "eval", "reaper", "board"),
    }
    log_users = {"sink", "envhost", "init", "run", "eval", "reaper", "board"}
    assert all("topics" in service.after for service in services if service.name in log_users)


def test_every_service_is_a_command_of_ours_and_is_restarted_but_the_task(tmp_path):
    """The table of commands knows each; only making the topics is done once."""
    for service in local_services(make_plan(tmp_path), argv=lambda *arguments: arguments):
        assert service.argv[0] in COMMANDS
        assert service.restart is (Restart.ON_FAILURE if service.name == "topics" else Restart.ALWAYS)


def test_what_runs_elsewhere_is_not_started_and_not_waited_for(tmp_path):
    """A cluster's Kafka, an engine on another machine, a real ClickHouse server."""
    plan = make_plan(
        tmp_path, bootstrap="kafka:9092", policy_url="http://gpu:8000", clickhouse_url="http://warehouse:8123"
    )
    services = local_services(plan)

    assert plan.addresses["broker"] == "kafka:9092"
    assert not {"broker", "policy", "clickhouse"} & {service.name for service in services}
    assert not {"broker", "policy", "clickhouse"} & {name for service in services for name in service.after}
    Supervisor(services, run_dir=tmp_path)


def test_nothing_depends_on_the_board(tmp_path):
    """It alone may fail; its end is no end of anything else."""
    services = {service.name: service for service in local_services(make_plan(tmp_path))}

    assert not [service.name for service in services.values() if "board" in service.after]
    assert ["board"] == [service.name for service in services.values() if service.optional]
    assert (Restart.ALWAYS, None) == (services["board"].restart, services["board"].give_up_after)


def test_no_service_is_ready_by_its_start_alone(tmp_path):
    """A process that runs and dies again would pass for one that works."""
    services = local_services(make_plan(tmp_path))

    assert not [service.name for service in services if service.ready.what == at_once().what]
    assert "ClickHouse at http://" in next(one for one in services if one.name == "sink").ready.what


@pytest.mark.parametrize(("name", "option"), [("clickhouse", "clickhouse_url"), ("policy", "policy_url")])
async def test_what_is_said_to_run_elsewhere_is_asked_before_anything_starts(tmp_path, name, option):
    """A dead address is named with the option that gave it, what the try found, and what to do."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{link.getsockname()[1]}"
    with pytest.raises(NotReady) as caught:
        await reach_elsewhere(make_plan(tmp_path, **{option: dead}), limit_s=0.3)

    said = str(caught.value)
    assert said.startswith(f"{name}: an answer 200 from {dead}/")
    assert all(part in said for part in ("the last try: ", f"--{option.replace('_', '-')}", "start it"))


async def test_what_runs_elsewhere_and_answers_is_taken_at_its_word(tmp_path):
    """And where everything is started here nothing is asked."""
    app = web.Application()
    app.router.add_get("/ping", _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await reach_elsewhere(make_plan(tmp_path, clickhouse_url=url))
        await reach_elsewhere(make_plan(tmp_path))
    finally:
        await runner.cleanup()


async def _answer(_):
    return web.Response(text="Ok.")


def test_without_faust_there_is_no_board(tmp_path, monkeypatch):
    """It is an extra; everything else runs as ever."""
    with_board = {service.name for service in local_services(make_plan(tmp_path))}
    monkeypatch.setattr(services_module, "has_faust", lambda: False)
    plan = make_plan(tmp_path)

    assert {"board"} == with_board - {service.name for service in local_services(plan)}
    assert "board" not in plan.addresses


def test_the_written_configuration_is_read_back_as_it_was(tmp_path):
    """Services and commands beside them see the same addresses; limits of the user's own file survive."""
    base = Config(
        bus=BusConfig(prefix="odd."),
        clickhouse=ClickHouseConfig(password="a'b\\c"),
        run=StageConfig(max_in_flight=3, drain_s=0.5),
    )
    plan = make_plan(tmp_path / "data", base=base)
    plan.write()

    assert load(plan.config_path) == plan.config
    assert plan.config.run == base.run
    assert stat.S_IMODE(plan.config_path.stat().st_mode) == 0o600
    assert make_plan(tmp_path / "data", base=base) == plan


def test_the_environment_host_has_a_socket_or_a_port_where_its_path_would_be_too_long(tmp_path):
    """A Unix socket's path has at most 107 bytes."""
    assert make_plan(Path("/tmp/x")).config.envhost.address == "unix:/tmp/x/envhost.sock"
    deep = make_plan(tmp_path / ("d" * 60) / ("e" * 60))
    assert deep.config.envhost.address == f"http://127.0.0.1:{deep.ports['envhost']}"
    assert Address.parse(deep.config.envhost.address).port == deep.ports["envhost"]


@pytest.mark.parametrize("name", ["init", "run", "eval"])
def test_a_worker_gets_longer_to_end_than_it_takes_to_drain(tmp_path, name):
    """Else the supervisor would kill what is about to finish."""
    base = Config(**{name: StageConfig(drain_s=100)})
    services = {service.name: service for service in local_services(make_plan(tmp_path, base=base))}
    assert services[name].stop_grace_s > 100


def test_a_local_system_keeps_large_values_beside_its_other_data(tmp_path):
    """Every service and command reads where; a directory that the user names is left as it is."""
    own = Config(bus=BusConfig(blobs="/mnt/shared/blobs"))

    assert make_plan(tmp_path).config.bus.blobs == str(tmp_path / "blobs")
    assert make_plan(tmp_path, base=own).config.bus.blobs == "/mnt/shared/blobs"


def test_an_imported_faust_is_found_too(monkeypatch):
    """It puts a module without a spec in its place, which must not stop whoever asks whether it is there."""
    found = services_module.has_faust()
    monkeypatch.setitem(sys.modules, "faust", ModuleType("faust"))

    assert services_module.has_faust() is found
