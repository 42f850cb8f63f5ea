"""Configuration: one TOML file, then the environment, then `--set`, read once, checked, frozen.

Environment variables are named like the keys: ROLLMILL_BUS__BOOTSTRAP is `bus.bootstrap`. An unknown key is an error,
so a misspelt limit is not silently the default. Every limit has a unit in its name and a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from infra.breaker import BreakerLimits
from infra.errors import ConfigError
from infra.inference.base import NumberFormat
from infra.inference.canary import LIMIT_NATS
from infra.security_config import REVEAL, Secret, SecurityConfig
from infra.settings import apply_override, explain, given_by, plain_texts, read_toml
from infra.topic_shape import Durability
from infra.worker import Limits
from schemas.topics import DEFAULT_PREFIX

ENV_PREFIX = "ROLLMILL_"
"""Environment variables that are settings begin with this."""


class Section(BaseModel):
    """A group of settings."""

    # Without the inputs: one of them may be a password.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _texts(cls, values: Any) -> Any:
        return plain_texts(values)


HIGHEST_PORT = 65_535
"""Highest port that there is."""

LONGEST_S = 7 * 86_400.0
"""Longest time that a setting may name, seconds: the clients count milliseconds in 32 bits."""

MAX_BYTES = 2**50
"""Most bytes that a setting may name."""

MAX_MEMBERS = 1_000_000
"""Most of anything that a setting may count."""

Pause = Annotated[float, Field(gt=0, le=LONGEST_S)]
MaybePause = Annotated[float, Field(ge=0, le=LONGEST_S)]


def _http_address(value: str) -> str:
    """Return an address that an HTTP client can use. Raises ValueError."""
    try:
        parts = urlsplit(value)
        usable = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ValueError(f"{value!r} is no address: {error}") from error
    if not usable or not value.isprintable():
        raise ValueError(f"{value!r} is no address; expected http://host:port")
    return value


Url = Annotated[str, AfterValidator(_http_address)]
"""An address of something that speaks HTTP."""


class BusConfig(Section):
    """The log."""

    bootstrap: str = Field("127.0.0.1:9092", description="Addresses of the Kafka brokers, `host:port,host:port`.")
    prefix: str = Field(DEFAULT_PREFIX, pattern=r"^[A-Za-z0-9._-]{0,100}$", description="Put before every topic name.")
    blobs: str = Field(
        "", description="Directory, seen by every service, for values too large for a record; none: they are refused."
    )
    session_timeout_s: Pause = Field(10.0, description="A member that is silent this long loses its partitions.")
    heartbeat_s: Pause = Field(1.0, description="Members say that they are alive this often.")
    replication: int | None = Field(
        None,
        gt=0,
        le=32_767,
        description="Copies of each new topic, 3 on a real cluster; by default the cluster's own.",
    )
    min_insync: int | None = Field(
        None, gt=0, le=32_767, description="Copies that must have a record before it counts as published, 2 of 3."
    )
    security: SecurityConfig = SecurityConfig()

    @field_validator("bootstrap")
    @classmethod
    def _addresses(cls, value: str) -> str:
        for address in value.split(","):
            host, colon, port = address.strip().rpartition(":")
            if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port[:6]) <= HIGHEST_PORT):
                raise ValueError(f"{address[:80]!r} is no address; expected host:port, or several with commas between")
        return value

    @model_validator(mode="after")
    def _enough_copies(self) -> Self:
        if self.min_insync is not None and self.replication is not None and self.min_insync > self.replication:
            raise ValueError(
                f"min_insync is {self.min_insync} and replication {self.replication}: "
                "so many copies could never be in sync"
            )
        return self

    def durability(self) -> Durability:
        """Return what topics need beside their line in the table."""
        return Durability(replicas=self.replication, min_insync=self.min_insync)


class PolicyConfig(Section):
    """The engines that sample."""

    url: Url = Field("http://127.0.0.1:8000", description="Address of the engine while no backend is registered.")
    name: str = Field("policy", description="Name under which the engine serves the model.")
    model: Path = Field(Path("model"), description="Model directory with tokenizer.json and the chat template.")
    dtype: NumberFormat = Field(
        "float32",
        description="Number format in which `rollmill policy serve` has its weights; int8 is that of linear layers.",
    )
    rolling: bool = Field(
        False, description="Bring new weights into one engine after another; otherwise into all at once."
    )
    canary_nats: float = Field(
        LIMIT_NATS,
        ge=0,
        le=100,
        description="Mean distance of the canary's log-probs from which on an engine has other weights; 0: do not ask.",
    )
    wait_s: Pause = Field(120.0, description="Longest wait for an engine that is away or behind.")
    generate_timeout_s: Pause = Field(600.0, description="Longest wait for one answer of the engine.")


class ProxyConfig(Section):
    """Where RUN answers agents that only know a `base_url`; it listens once the first of their episodes is there."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that it listens on; 0.0.0.0 is every one.")
    port: int = Field(
        0, ge=0, le=HIGHEST_PORT, description="Port that it listens on, for each RUN worker another one; 0: a free one."
    )
    url: str = Field(
        "", description="Its address as agents see it, `http://host:{port}`; by default the one that it listens on."
    )
    body_bytes: int = Field(16 * 1024 * 1024, gt=0, le=MAX_BYTES, description="Largest request, bytes.")

    @field_validator("url")
    @classmethod
    def _can_be_called(cls, value: str) -> str:
        if value:
            _http_address(with_port := value.replace("{port}", "1"))
            if "{" in with_port or "}" in with_port:
                raise ValueError(f"{value!r}: the one thing that is filled in is {{port}}")
        return value

    @model_validator(mode="after")
    def _can_be_named(self) -> Self:
        if self.host in {"0.0.0.0", "::"} and not self.url:  # noqa: S104 - compared, not listened on
            raise ValueError(f"host is {self.host}, which no agent can call: set url to the address as agents see it")
        return self


class EnvHostConfig(Section):
    """The environment host."""

    address: str = Field("http://127.0.0.1:8010", description="`http://host:port` or `unix:/path`.")
    capacity: int = Field(1024, gt=0, le=MAX_MEMBERS, description="Most environments at once.")

    @field_validator("address")
    @classmethod
    def _can_be_reached(cls, value: str) -> str:
        path = value.removeprefix("unix:")
        if path == value:
            return _http_address(value)
        if not path:
            raise ValueError(f"{value!r} names no socket; expected unix:/path")
        return value


class ClickHouseConfig(Section):
    """Where metrics and records can be asked for by SQL."""

    url: Url = Field("http://127.0.0.1:8123", description="ClickHouse's HTTP interface.")
    database: str = Field("rollmill", description="Database of the tables.")
    user: str = Field("default", description="User name.")
    password: Secret = Field(SecretStr(""), description="Password.")


class BoardConfig(Section):
    """The live board."""

    url: str = Field("http://127.0.0.1:8020", description="Where `rollmill status` asks for it.")
    memory_mb: int = Field(
        1024, gt=0, le=MAX_MEMBERS, description="A board that holds more memory ends and is started again."
    )

    @field_validator("url")
    @classmethod
    def _has_a_port(cls, value: str) -> str:
        try:
            port = urlsplit(value).port
        except ValueError as error:
            raise ValueError(f"{value!r} is no address: {error}") from error
        if not port or not value.startswith("http://"):
            raise ValueError(f"{value!r} is no address; expected http://host:port")
        return value

    @property
    def port(self) -> int:
        """The port of its address."""
        port = urlsplit(self.url).port
        assert port is not None, "checked above"
        return port


class StageConfig(Section):
    """One worker of a stage: its bounds, and what it tells."""

    max_in_flight: int = Field(64, gt=0, le=1024, description="Records worked on at once by one worker.")
    max_bytes: int = Field(
        256 * 1024 * 1024, gt=0, le=MAX_BYTES, description="The same in bytes, as the records lie in the log."
    )
    drain_s: MaybePause = Field(10.0, description="Work may finish this long after a stop is asked for.")
    events: bool = Field(
        True, description="Say on `events` what happens to each sample; without it the board does not see this stage."
    )

    def limits(self) -> Limits:
        """Return the worker's limits."""
        return Limits(max_in_flight=self.max_in_flight, max_bytes=self.max_bytes, drain_s=self.drain_s)


class BreakerConfig(Section):
    """When INIT and RUN hold that a service is away, and stand still."""

    failures: int = Field(
        3, gt=0, le=MAX_MEMBERS, description="Calls that reach nobody, in a row, until a service is away."
    )
    failing_s: MaybePause = Field(2.0, description="From the first to the last of them at least, seconds.")
    first_pause_s: Pause = Field(1.0, description="Before it is asked whether it is back; doubles each time.")
    longest_pause_s: Pause = Field(5.0, description="Longest such pause, seconds.")
    longest_s: MaybePause = Field(1800.0, description="Budgets and deadlines wait this long for one outage, seconds.")

    def limits(self) -> BreakerLimits:
        """Return the limits of each breaker."""
        return BreakerLimits(**self.model_dump())


class Config(Section):
    """All settings of the services on one machine."""

    bus: BusConfig = BusConfig()
    policy: PolicyConfig = PolicyConfig()
    proxy: ProxyConfig = ProxyConfig()
    envhost: EnvHostConfig = EnvHostConfig()
    clickhouse: ClickHouseConfig = ClickHouseConfig()
    board: BoardConfig = BoardConfig()
    breaker: BreakerConfig = BreakerConfig()
    init: StageConfig = StageConfig()
    run: StageConfig = StageConfig()
    eval: StageConfig = StageConfig(max_in_flight=32)


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration.

    Args:
        path: a TOML file, or None for the defaults.
        overrides: `a.b=value` each, the value in TOML syntax or plain text.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; the error names each.
    """
    settings = {} if path is None else read_toml(path)
    environment = _from_environment(os.environ)
    given = {override.partition("=")[0]: name for name, override in environment.items()} | given_by("--set", overrides)
    # As text: the schema converts, and a password that looks like a number stays what it is.
    for name, override in environment.items():
        apply_override(settings, override, as_text=True, option=name)
    for override in overrides:
        apply_override(settings, override, as_text=True)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path or "configuration"), Config, given)) from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variable -> setting: ROLLMILL_BUS__BOOTSTRAP=x is `bus.bootstrap=x`; without a section it is none."""
    return {
        name: f"{name.removeprefix(ENV_PREFIX).lower().replace('__', '.')}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(ENV_PREFIX) and "__" in name
    }


def dump(config: BaseModel, *, reveal: bool = False) -> dict[str, Any]:
    """Return a configuration as plain values; what is not set is left out.

    Args:
        config: the settings.
        reveal: with its secrets, for a file that only its owner may read; otherwise asterisks stand in their place.
    """
    return config.model_dump(mode="json", exclude_none=True, context=REVEAL if reveal else None)
