"""Configuration: a file, then the environment, then `--set`; read once, checked, frozen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from infra.config import Config, dump, load
from infra.errors import ConfigError
from infra.settings import apply_override
from infra.worker import Limits


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """The environment of whoever runs the tests is none of ours."""
    for name in [name for name in os.environ if name.startswith("ROLLMILL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    """Write a configuration file."""

    def write(text):
        path = tmp_path / "rollmill.toml"
        path.write_text(text)
        return path

    return write


def test_the_defaults_are_a_configuration():
    """Everything on this machine, each part with its limits."""
    assert load() == Config()
    assert Limits(max_in_flight=32, drain_s=10.0) == Config().eval.limits()


def test_the_environment_comes_before_the_file_and_set_before_both(file, monkeypatch):
    """The nearer to the command line, the stronger."""
    path = file("[run]\nmax_in_flight = 1\ndrain_s = 1\n[policy]\nwait_s = 1\n")
    monkeypatch.setenv("ROLLMILL_RUN__DRAIN_S", "2")
    monkeypatch.setenv("ROLLMILL_POLICY__WAIT_S", "2")
    config = load(path, ["policy.wait_s=3"])

    assert (1, 2.0, 3.0) == (config.run.max_in_flight, config.run.drain_s, config.policy.wait_s)


def test_a_variable_without_a_section_is_not_a_setting(monkeypatch):
    """Such as ROLLMILL_CONFIG, which names the file."""
    monkeypatch.setenv("ROLLMILL_CONFIG", "/nowhere")

    assert load() == Config()


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("bus.bootstrap=10.0.0.1:9092,b:1", "bus", "bootstrap", "10.0.0.1:9092,b:1"),
        ('policy.name="a=b."', "policy", "name", "a=b."),
        ("envhost.address=unix:/run/hosts", "envhost", "address", "unix:/run/hosts"),
        ("policy.model=a/b", "policy", "model", Path("a/b")),
        ("run.max_in_flight=7", "run", "max_in_flight", 7),
        ("init.events=false", "init", "events", False),
        ("policy.wait_s=0.5", "policy", "wait_s", 0.5),
        ("clickhouse.password=", "clickhouse", "password", SecretStr("")),
    ],
)
def test_a_value_is_toml_or_plain_text(override, section, key, value):
    """Nobody has to quote an address."""
    assert getattr(getattr(load(overrides=[override]), section), key) == value


@pytest.mark.parametrize("text", ["1234", "007", "1e5", "true", "2024-01-01", "1_000"])
def test_a_text_that_looks_like_a_number_stays_a_text(text, monkeypatch):
    """A password is what it was given as, character by character."""
    monkeypatch.setenv("ROLLMILL_CLICKHOUSE__PASSWORD", text)
    config = load(overrides=[f"policy.name={text}"])

    assert (text, text) == (config.clickhouse.password.get_secret_value(), config.policy.name)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "run.max_inflight=7",
            r"^--set run.max_inflight: .* mean `max_in_flight`\? \[run\] has drain_s, events",
        ),
        ("ruin.max_in_flight=7", r"^--set ruin.max_in_flight: ruin: .*did you mean `run`\? There are board, breaker"),
        ("run.zzz=7", r"--set run.zzz: there is no such key\. \[run\] has drain_s"),
        ("bus.bootstrap=kafka:99999", r"--set bus.bootstrap: 'kafka:99999' is no address; expected host:port"),
        ("bus.bootstrap=kafka:²", "bus.bootstrap: .*is no address"),
        ("policy.url=ftp://x", "--set policy.url: 'ftp://x' is no address; expected http://host:port"),
        ("policy.url=http://x:99999", "policy.url: .* is no address: Port out of range"),
        ("envhost.address=unix:", "--set envhost.address: 'unix:' names no socket"),
        ("bus.session_timeout_s=inf", "bus.session_timeout_s: Input should be a finite number"),
        ("bus.session_timeout_s=1e300", "bus.session_timeout_s: Input should be less than"),
        (f"run.max_bytes={10**30}", "run.max_bytes: Input should be less than"),
        (f"run.max_bytes={'9' * 5000}", "run.max_bytes: Unable to parse input string as an integer"),
        (
            'policy.model="a\\u0000b"',
            "--set policy.model: policy: model is 'a.x00b', which holds what cannot be",
        ),
        ("bus..prefix=x", "expected KEY=VALUE"),
        ("run.max_in_flight=0", "run.max_in_flight: Input should be greater than 0"),
        ("run.max_in_flight=many", "run.max_in_flight: Input should be a valid integer"),
        ("run.drain_s=-1", "run.drain_s: Input should be greater than or equal to 0"),
        ("run=7", "run: Input should be a valid dictionary"),
        ("run.max_in_flight", "expected KEY=VALUE"),
        ("=7", "expected KEY=VALUE"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, says):
    """A misspelt limit is not silently the default."""
    with pytest.raises(ConfigError, match=says):
        load(overrides=[override])


def test_each_wrong_value_is_blamed_on_whoever_gave_it(file, monkeypatch):
    """The file is not at fault for what came beside it."""
    monkeypatch.setenv("ROLLMILL_RUN__DRAIN_S", "-1")
    path = file("[bus]\nheartbeat_s = -3\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["eval.max_in_flight=0"])

    by_file, by_environment, by_option = str(caught.value).split("; ")
    assert by_file.startswith(f"{path}: bus.heartbeat_s: Input should be greater than 0")
    assert by_environment.startswith("ROLLMILL_RUN__DRAIN_S: run.drain_s: Input should be")
    assert by_option.startswith("--set eval.max_in_flight: Input should be greater than 0")


def test_a_rule_about_two_settings_is_blamed_on_the_one_that_was_changed():
    """It was kept before."""
    with pytest.raises(ConfigError, match=r"^--set bus.min_insync, --set bus.replication: bus: min_insync is 3 and"):
        load(overrides=["bus.min_insync=3", "bus.replication=2"])


def test_all_wrong_keys_of_a_file_are_named_at_once(file):
    """With the file."""
    path = file("[bus]\nboostrap = 'x'\n[run]\nmax_in_flight = 0\n")
    with pytest.raises(ConfigError) as caught:
        load(path)

    assert all(part in str(caught.value) for part in (str(path), "bus.boostrap", "run.max_in_flight"))


def test_a_setting_is_no_section(file):
    """`--set a.b.c` where a.b is a value."""
    with pytest.raises(ConfigError, match=r"run.max_in_flight.now: max_in_flight is not a section"):
        load(file("[run]\nmax_in_flight = 3\n"), ["run.max_in_flight.now=7"])


def test_a_file_that_cannot_be_read_says_why(file, tmp_path):
    """Missing, a folder, or no TOML."""
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent.toml: No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 1"):
        load(file("= nonsense"))
    with pytest.raises(ConfigError, match=r"is not TOML: .*4300 digits"):
        load(file(f"[run]\nmax_in_flight = {'9' * 5000}"))
    with pytest.raises(ConfigError, match="is not TOML"):
        load(file("a = " + "[" * 50_000))


def test_a_configuration_cannot_be_changed_and_keeps_its_password_to_itself():
    """Read once, frozen; logs show no secret."""
    config = load(overrides=["clickhouse.password=secret"])
    with pytest.raises(ValidationError, match="frozen"):
        config.run.max_in_flight = 3

    assert "secret" not in repr(config)


def test_a_configuration_is_plain_values_for_a_manifest():
    """Dumped and loaded it is the same."""
    config = load(overrides=["policy.model=a/b"])

    assert Config.model_validate(dump(config)) == config


def test_overrides_make_the_sections_they_need():
    """Of any depth: RUN.toml uses them too."""
    settings = {}
    apply_override(settings, "tasks.payload.size=7")

    assert {"tasks": {"payload": {"size": 7}}} == settings


@pytest.mark.parametrize("url", ["https://board:1", "http://board", "http://board:x", "board:8020"])
def test_an_address_of_the_board_has_a_port(url):
    """It is where the board listens as well."""
    with pytest.raises(ConfigError, match=r"board\.url.*is no address"):
        load(overrides=[f"board.url={url}"])

    assert load(overrides=["board.url=http://127.0.0.1:99"]).board.port == 99


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("proxy.host=0.0.0.0",), "no agent can call"),
        (("proxy.url=rollouts.example",), "no address"),
        (("proxy.url=http://10.0.0.5:{prot}",), "proxy.url"),
        (("proxy.url=http://{prot}",), "the one thing that is filled in is {port}"),
        (("proxy.port=70000",), "proxy.port"),
    ],
)
def test_an_address_that_no_agent_could_call_is_refused(settings, says):
    """Every interface is none that could be called; then somebody has to say which one."""
    with pytest.raises(ConfigError, match=says):
        load(None, settings)
    assert load(None, ("proxy.host=0.0.0.0", "proxy.url=http://10.0.0.5:{port}")).proxy.url.endswith("{port}")
