"""The services of one machine, as data: what `rollmill up` runs, in which order, and when each is ready.

    broker -> topics -> envhost, init, run, eval, reaper, sink
    policy           -> run
    envhost          -> init, run
    clickhouse       -> sink
    topics           -> board     optional, and left out where Faust is not installed

A `LocalPlan` holds the addresses and directories; `local_services` turns it into `Service`s. What is said to run
elsewhere (a Kafka, an engine, a ClickHouse) is not started; `reach_elsewhere` finds out whether it is there. A service
is ready when it does its work, not when it has begun. No process is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from infra.broker.local import START_LIMIT_S, STOP_LIMIT_S
from infra.config import Config, dump
from infra.disk import room_for
from infra.envhost.address import UNIX_PATH_BYTES
from infra.errors import ConfigError
from infra.loopback import HOST
from infra.security import Protocol
from rollmill import ports, toml
from rollmill.paths import BLOBS_NAME, CONFIG_NAME, DATA_DIR, PORTS_NAME, RUN_NAME
from rollmill.supervisor import Restart, Service
from rollmill.supervisor.readiness import answers_http, answers_kafka, done, listens, reached, says

MODEL_LIMIT_S = 180.0
"""Longest that an engine may take to load its model."""

JOIN_LIMIT_S = 60.0
"""Longest that a worker may take to join its consumer group; after a kill -9 it waits for a session to run out."""

BOARD_LIMIT_S = 120.0
"""Longest that the board may take to import Faust, join, and read what is left of `events`."""

EXTRA_GRACE_S = 5.0
"""A service is given this much longer to end than it allows itself."""

CONFIG_HEADING = "# Written by `rollmill up`: what its services, and the commands called beside them, use."
"""First line of the settings' file."""

ELSEWHERE_LIMIT_S = 30.0
"""Longest wait for what is said to run already: somebody may have started it at the same moment."""

OWNS_PARTITIONS = r": owns \d+ partitions"
"""What a worker logs when its group has given it its share."""

STORES_PARTITIONS = r": stores \d+ partitions"
"""What the sink logs when ClickHouse has answered and its group has given it its share."""

WATCHES = r": watches every sample"
"""What the reaper logs when it has read `control` and reads tasks and outcomes."""

Argv = Callable[..., tuple[str, ...]]
"""(command, options ...) -> program and arguments."""


def rollmill(*arguments: str) -> tuple[str, ...]:
    """Return the call of a `rollmill` command by the Python that runs now."""
    return (sys.executable, "-m", "rollmill", *arguments)


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """Where everything is on this machine."""

    data_dir: Path
    """Holds all that a local system keeps; absolute."""
    config: Config
    """What the services are told: addresses and limits."""
    ports: dict[str, int]
    """Ports of the services that are started here: `broker`, `policy`, `clickhouse`, perhaps `envhost`, `board`."""
    run_workers: int = 2
    """How many RUN workers."""

    @property
    def run_dir(self) -> Path:
        """The supervisor's directory: lock, state, logs."""
        return self.data_dir / RUN_NAME

    @property
    def config_path(self) -> Path:
        """The file that the services, and commands called beside them, read."""
        return self.data_dir / CONFIG_NAME

    @property
    def addresses(self) -> dict[str, str]:
        """Where each service is reached."""
        board = {"board": f"{self.config.board.url}/board"} if "board" in self.ports else {}
        return {
            "broker": self.config.bus.bootstrap,
            "policy": self.config.policy.url,
            "envhost": self.config.envhost.address,
            "clickhouse": self.config.clickhouse.url,
            **board,
        }

    def write(self) -> None:
        """Write what the services read. Only whoever holds the directory may: a running system reads it too."""
        with room_for("settings for the services", self.data_dir, then="Then call it again; nothing was started."):
            self.data_dir.mkdir(parents=True, exist_ok=True)
            ports.keep(self.ports, self.data_dir / PORTS_NAME)
            part = self.config_path.with_suffix(".part")
            part.unlink(missing_ok=True)
            part.touch(mode=0o600)  # it may hold passwords
            part.write_text(f"{CONFIG_HEADING}\n\n{toml.dumps(dump(self.config, reveal=True))}")
            part.replace(self.config_path)


def make_plan(
    data_dir: Path = DATA_DIR,
    *,
    base: Config | None = None,
    model: Path | None = None,
    bootstrap: str | None = None,
    policy_url: str | None = None,
    clickhouse_url: str | None = None,
    run_workers: int = 2,
) -> LocalPlan:
    """Choose addresses for a local system; nothing is written.

    Args:
        data_dir: where it keeps its data.
        base: limits and names; its addresses are replaced.
        model: model directory of the engine; by default the one of `base`.
        bootstrap: a Kafka that runs elsewhere; by default one is started here.
        policy_url: an engine that runs elsewhere; by default one is started here.
        clickhouse_url: a ClickHouse that runs elsewhere; by default one is started here.
        run_workers: how many RUN workers.

    Raises:
        ConfigError: there is no free port, or the log is secured but would be started here.
    """
    data_dir, base = data_dir.absolute(), base or Config()
    protocol = base.bus.security.protocol
    if bootstrap is None and protocol is not Protocol.PLAINTEXT:
        raise ConfigError(
            f"bus.security.protocol is {protocol}, but the broker that is started here speaks plaintext on loopback: "
            "give the secured cluster with --bootstrap, or leave bus.security out"
        )
    socket = f"unix:{data_dir / 'envhost.sock'}"
    own = {"broker": bootstrap is None, "policy": policy_url is None, "clickhouse": clickhouse_url is None}
    own["board"] = has_faust()
    own["envhost"] = len(socket.removeprefix("unix:").encode()) > UNIX_PATH_BYTES
    chosen = ports.choose([name for name, here in own.items() if here], kept=data_dir / PORTS_NAME)
    envhost = f"http://{HOST}:{chosen['envhost']}" if own["envhost"] else socket
    policy = {
        "url": policy_url or f"http://{HOST}:{chosen['policy']}",
        "model": (model or base.policy.model).absolute(),
    }
    clickhouse = {"url": clickhouse_url or f"http://{HOST}:{chosen['clickhouse']}"}
    bus = {
        "bootstrap": bootstrap or f"{HOST}:{chosen['broker']}",
        "blobs": str(Path(base.bus.blobs or data_dir / BLOBS_NAME).absolute()),
    }
    board = {"url": f"http://{HOST}:{chosen['board']}"} if own["board"] else {}
    config = base.model_copy(
        update={
            "bus": base.bus.model_copy(update=bus),
            "policy": base.policy.model_copy(update=policy),
            "envhost": base.envhost.model_copy(update={"address": envhost}),
            "clickhouse": base.clickhouse.model_copy(update=clickhouse),
            "board": base.board.model_copy(update=board),
        }
    )
    return LocalPlan(data_dir=data_dir, config=config, ports=chosen, run_workers=run_workers)


def local_services(plan: LocalPlan, *, argv: Argv = rollmill) -> tuple[Service, ...]:
    """Return the services of a plan, each after those that it needs.

    Args:
        plan: where everything is.
        argv: turns a command and its options into a program with arguments.
    """
    services = (*_stores(plan, argv), *_hosts(plan, argv), *_stages(plan, argv))
    elsewhere = {name for name in ("broker", "policy", "clickhouse", "board") if name not in plan.ports}
    return without(services, elsewhere)


async def reach_elsewhere(plan: LocalPlan, *, limit_s: float = ELSEWHERE_LIMIT_S) -> None:
    """Return once what the plan says runs elsewhere has answered; the log is asked by whoever makes the topics.

    Raises:
        NotReady: it did not answer in time.
    """
    asked = {
        "policy": (f"{plan.config.policy.url}/health", "--policy-url"),
        "clickhouse": (f"{plan.config.clickhouse.url}/ping", "--clickhouse-url"),
    }
    for name, (url, option) in asked.items():
        if name not in plan.ports:
            advice = f"{option} says that it runs already: start it, correct the address, or leave the option out"
            await reached(name, answers_http(url, limit_s=limit_s), advice)


def without(services: Sequence[Service], names: set[str]) -> tuple[Service, ...]:
    """Return the services but those of these names; nobody waits for them any more."""
    return tuple(
        replace(service, after=tuple(name for name in service.after if name not in names))
        for service in services
        if service.name not in names
    )


def has_faust() -> bool:
    """Tell whether the live board can run here, without importing what it runs on."""
    # Not `find_spec`: Faust, once imported, puts a module without a spec in its place, and that is an error there.
    return PathFinder.find_spec("faust") is not None


def _stores(plan: LocalPlan, argv: Argv) -> tuple[Service, ...]:
    config = ("--config", str(plan.config_path))
    data = plan.data_dir
    return (
        Service(
            name="broker",
            argv=argv("broker", "run", "--data", str(data / "broker"), "--port", _port(plan, "broker")),
            # Kafka's jars are there by then: `infra.broker.prepare()` comes first, it may take minutes once.
            ready=answers_kafka(plan.config.bus.bootstrap, limit_s=START_LIMIT_S + EXTRA_GRACE_S),
            stop_grace_s=STOP_LIMIT_S + EXTRA_GRACE_S,
        ),
        Service(
            name="topics",
            argv=argv("broker", "topics", "--create", *config),
            after=("broker",),
            ready=done(),
            restart=Restart.ON_FAILURE,
        ),
        Service(
            name="clickhouse",
            argv=argv("clickhouse", "--data", str(data / "clickhouse"), "--port", _port(plan, "clickhouse")),
            env={"ROLLMILL_CLICKHOUSE__PASSWORD": plan.config.clickhouse.password.get_secret_value()},
            ready=answers_http(f"{plan.config.clickhouse.url}/ping"),
        ),
        Service(
            name="sink",
            argv=argv("sink", *config),
            after=("topics", "clickhouse"),
            ready=says(
                STORES_PARTITIONS,
                what=f"its share of the log, with ClickHouse at {plan.config.clickhouse.url}",
                limit_s=JOIN_LIMIT_S,
            ),
        ),
    )


def _hosts(plan: LocalPlan, argv: Argv) -> tuple[Service, ...]:
    config = ("--config", str(plan.config_path))
    return (
        Service(
            name="policy",
            argv=argv("policy", "serve", "--port", _port(plan, "policy"), *config),
            ready=answers_http(f"{plan.config.policy.url}/health", limit_s=MODEL_LIMIT_S),
        ),
        Service(
            name="envhost",
            argv=argv("envhost", *config),
            after=("topics",),
            ready=listens(plan.config.envhost.address),
        ),
    )


def _stages(plan: LocalPlan, argv: Argv) -> tuple[Service, ...]:
    config = ("--config", str(plan.config_path))
    log = plan.config.bus.bootstrap
    joined = says(OWNS_PARTITIONS, what=f"its share of the log at {log}", limit_s=JOIN_LIMIT_S)
    drains = plan.config
    return (
        Service(
            name="init",
            argv=argv("init", *config),
            after=("topics", "envhost"),
            ready=joined,
            stop_grace_s=drains.init.drain_s + EXTRA_GRACE_S,
        ),
        Service(
            name="run",
            argv=argv("run", *config),
            after=("topics", "envhost", "policy"),
            ready=joined,
            stop_grace_s=drains.run.drain_s + EXTRA_GRACE_S,
            instances=plan.run_workers,
        ),
        Service(
            name="eval",
            argv=argv("eval", *config),
            after=("topics",),
            ready=joined,
            stop_grace_s=drains.eval.drain_s + EXTRA_GRACE_S,
        ),
        Service(
            name="reaper",
            argv=argv("reaper", *config),
            after=("topics",),
            ready=says(WATCHES, what=f"that it reads the log at {log}", limit_s=JOIN_LIMIT_S),
        ),
        # Nothing depends on it, so its failure is told and stops nothing.
        Service(
            name="board",
            argv=argv("board", "--data", str(plan.run_dir / "board"), *config),
            after=("topics",),
            ready=answers_http(f"{plan.config.board.url}/board", limit_s=BOARD_LIMIT_S),
            optional=True,
        ),
    )


def _port(plan: LocalPlan, name: str) -> str:
    return str(plan.ports.get(name, 0))
