"""Configuration: one TOML file, then the environment, then `--set`, read once, checked, frozen.

Environment variables are named like the keys: ROLLMILL_BUS__BOOTSTRAP is `bus.bootstrap`. An unknown key is an error,
so a misspelt limit is not silently the default. Every limit has a unit in its name and a sentence.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from infra.breaker import BreakerLimits
from infra.errors import ConfigError
from infra.security_config import REVEAL, Secret, SecurityConfig
from infra.topic_shape import Durability
from infra.worker import Limits
from schemas.topics import DEFAULT_PREFIX

ENV_PREFIX = "ROLLMILL_"
"""Environment variables that are settings begin with this."""


class Section(BaseModel):
    """A group of settings."""

    # Without the inputs: one of them may be a password.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class BusConfig(Section):
    """The log."""

    bootstrap: str = Field("127.0.0.1:9092", description="Addresses of the Kafka brokers, `host:port,host:port`.")
    prefix: str = Field(DEFAULT_PREFIX, description="Put before every topic name.")
    blobs: str = Field(
        "", description="Directory, seen by every service, for values too large for a record; none: they are refused."
    )
    session_timeout_s: float = Field(10.0, gt=0, description="A member that is silent this long loses its partitions.")
    heartbeat_s: float = Field(1.0, gt=0, description="Members say that they are alive this often.")
    replication: int | None = Field(
        None,
        gt=0,
        le=32_767,
        description="Copies of each new topic, 3 on a real cluster; by default the cluster's own.",
    )
    min_insync: int | None = Field(
        None, gt=0, description="Copies that must have a record before it counts as published, 2 of 3."
    )
    security: SecurityConfig = SecurityConfig()

    @field_validator("bootstrap")
    @classmethod
    def _addresses(cls, value: str) -> str:
        for address in value.split(","):
            host, colon, port = address.strip().rpartition(":")
            if not (host and colon and port.isdigit()):
                raise ValueError(f"{address!r} is no address; expected host:port, or several with commas between")
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
    """The engine that samples."""

    url: str = Field("http://127.0.0.1:8000", description="Address of the engine.")
    name: str = Field("policy", description="Name under which the engine serves the model.")
    model: Path = Field(Path("model"), description="Model directory with tokenizer.json and the chat template.")
    wait_s: float = Field(120.0, gt=0, description="Longest wait for an engine that is away or behind.")


class EnvHostConfig(Section):
    """The environment host."""

    address: str = Field("http://127.0.0.1:8010", description="`http://host:port` or `unix:/path`.")
    capacity: int = Field(1024, gt=0, description="Most environments at once.")


class ClickHouseConfig(Section):
    """Where metrics and records can be asked for by SQL."""

    url: str = Field("http://127.0.0.1:8123", description="ClickHouse's HTTP interface.")
    database: str = Field("rollmill", description="Database of the tables.")
    user: str = Field("default", description="User name.")
    password: Secret = Field(SecretStr(""), description="Password.")


class BoardConfig(Section):
    """The live board."""

    url: str = Field("http://127.0.0.1:8020", description="Where `rollmill status` asks for it.")
    memory_mb: int = Field(1024, gt=0, description="A board that holds more memory ends and is started again.")

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
    max_bytes: int = Field(256 * 1024 * 1024, gt=0, description="The same in bytes, as the records lie in the log.")
    drain_s: float = Field(10.0, ge=0, description="Work may finish this long after a stop is asked for.")
    events: bool = Field(
        True, description="Say on `events` what happens to each sample; without it the board does not see this stage."
    )

    def limits(self) -> Limits:
        """Return the worker's limits."""
        return Limits(max_in_flight=self.max_in_flight, max_bytes=self.max_bytes, drain_s=self.drain_s)


class BreakerConfig(Section):
    """When INIT and RUN hold that a service is away, and stand still."""

    failures: int = Field(3, gt=0, description="Calls that reach nobody, in a row, until a service is away.")
    failing_s: float = Field(2.0, ge=0, description="From the first to the last of them at least, seconds.")
    first_pause_s: float = Field(1.0, gt=0, description="Before it is asked whether it is back; doubles each time.")
    longest_pause_s: float = Field(5.0, gt=0, description="Longest such pause, seconds.")
    longest_s: float = Field(1800.0, ge=0, description="Budgets and deadlines wait this long for one outage, seconds.")

    def limits(self) -> BreakerLimits:
        """Return the limits of each breaker."""
        return BreakerLimits(**self.model_dump())


class Config(Section):
    """All settings of the services on one machine."""

    bus: BusConfig = BusConfig()
    policy: PolicyConfig = PolicyConfig()
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
    for override in (*_from_environment(os.environ), *overrides):
        # As text: the schema converts, and a password that looks like a number stays what it is.
        apply_override(settings, override, as_text=True)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path or "configuration"))) from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> list[str]:
    """Return ROLLMILL_BUS__BOOTSTRAP=x as `bus.bootstrap=x`; a name without a section is not a setting."""
    return [
        f"{name.removeprefix(ENV_PREFIX).lower().replace('__', '.')}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(ENV_PREFIX) and "__" in name
    ]


def apply_override(settings: dict[str, Any], override: str, *, as_text: bool = False) -> None:
    """Put `a.b=value` into nested settings.

    Args:
        settings: changed in place.
        override: the key with its value, in TOML syntax or plain text.
        as_text: leave numbers, truth values and dates as they are written.

    Raises:
        ConfigError: the text has no `=`.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: expected KEY=VALUE, such as run.max_in_flight=32")
    *parents, last = key.split(".")
    for parent in parents:
        settings = settings.setdefault(parent, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"--set {key}: {parent} is not a section")
    # A password is what was given, character by character, brackets and quotes included.
    value = text if as_text and last.endswith("password") else _value(text)
    settings[last] = text if as_text and not isinstance(value, str | list | dict) else value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def explain(error: ValidationError, where: str) -> str:
    """Return a validation error as one line per wrong key."""
    lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
    return f"{where}: " + "; ".join(lines)


def dump(config: BaseModel, *, reveal: bool = False) -> dict[str, Any]:
    """Return a configuration as plain values; what is not set is left out.

    Args:
        config: the settings.
        reveal: with its secrets, for a file that only its owner may read; otherwise asterisks stand in their place.
    """
    return config.model_dump(mode="json", exclude_none=True, context=REVEAL if reveal else None)
