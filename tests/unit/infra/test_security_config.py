"""Settings of a secured cluster: what cannot work is refused, and no secret is ever shown."""

from __future__ import annotations

import json
import logging
import os
import ssl
import traceback

import pytest
from aiokafka.protocol.admin import SaslAuthenticateRequest_v0, SaslHandShakeRequest_v0
from pydantic import ValidationError

from infra.config import BusConfig, Config, dump, load
from infra.errors import ConfigError
from infra.security import PLAINTEXT, Mechanism, Protocol, Security
from infra.security_config import MAX_PASSWORD_BYTES, SecurityConfig
from rollmill.services import make_plan

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """The environment of whoever runs the tests is none of ours."""
    for name in [name for name in os.environ if name.startswith("ROLLMILL_")]:
        monkeypatch.delenv(name)


def login(**settings):
    """Return settings of a user over TLS, some of them changed; None leaves one out."""
    base = {"protocol": "sasl_ssl", "mechanism": "SCRAM-SHA-512", "user": "alice", "password": SECRET}
    return {name: value for name, value in {**base, **settings}.items() if value is not None}


def test_by_default_nothing_is_secured():
    """As the broker of a laptop has it."""
    assert SecurityConfig().open() == PLAINTEXT
    assert PLAINTEXT.options() == {"security_protocol": "PLAINTEXT"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (login(mechanism=None), "these are needed too: mechanism"),
        (login(user=None, password=None), "these are needed too: user, password or password_file"),
        (login(user=""), "these are needed too: user"),
        (login(password=""), "password is empty"),
        (login(password_file="x"), "password and password_file are both set"),
        (login(protocol="ssl"), "mechanism, user, password would have no effect: protocol is ssl, and sasl_ssl"),
        (login(protocol="plaintext"), "mechanism, user, password would have no effect: protocol is plaintext"),
        (login(protocol="sasl_plaintext", ca_file="ca.pem"), "ca_file would have no effect: .* ssl or sasl_ssl is"),
        ({"ca_file": "ca.pem"}, "ca_file would have no effect: protocol is plaintext"),
        ({"protocol": "ssl", "cert_file": "c"}, "key_file is missing: cert_file is set"),
        ({"protocol": "ssl", "key_file": "k"}, "cert_file is missing: key_file is set"),
        ({"protocol": "ssl", "key_password": SECRET}, "key_file is missing: key_password is set"),
        ({"protocol": "tls"}, "protocol: Input should be 'plaintext', 'ssl', 'sasl_plaintext' or 'sasl_ssl'"),
        (login(mechanism="GSSAPI"), "mechanism: Input should be 'PLAIN', 'SCRAM-SHA-256' or 'SCRAM-SHA-512'"),
        (login(passwort="x"), "passwort: there is no such key, did you mean `password`"),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_and_without_the_secret(settings, says):
    """When it is read, not when a service has waited for a broker."""
    overrides = [f"bus.security.{name}={value}" for name, value in settings.items()]
    with pytest.raises(ConfigError, match=says) as caught:
        load(overrides=overrides)
    with pytest.raises(ValidationError) as bare:
        SecurityConfig(**settings)

    assert "bus.security" in str(caught.value)
    assert SECRET not in str(caught.value) + str(bare.value)


def test_words_may_be_written_as_kafka_writes_them():
    """Upper or lower case."""
    config = SecurityConfig(**login(protocol="SASL_SSL", mechanism="scram-sha-512"))
    assert (Protocol.SASL_SSL, Mechanism.SCRAM_SHA_512) == (config.protocol, config.mechanism)


def test_a_secret_shows_nowhere_but_in_a_dump_that_reveals_it():
    """repr, text, JSON, manifests."""
    config = load(overrides=[f"bus.security.{name}={value}" for name, value in login().items()])
    config = config.model_copy(update={"clickhouse": config.clickhouse.model_copy(update={"password": SECRET})})
    config = Config.model_validate(config.model_dump())
    shown = [repr(config), str(config), repr(config.bus.security.open()), json.dumps(dump(config)), str(dump(config))]

    assert all(SECRET not in text for text in shown)
    assert dump(config, reveal=True)["bus"]["security"]["password"] == SECRET
    assert dump(config, reveal=True)["clickhouse"]["password"] == SECRET
    assert Config.model_validate(dump(config, reveal=True)) == config


@pytest.mark.parametrize("password", ["[1]", '"quoted"', "{a=1}", "1e5", "'", "a=b", "ü #x", "true"])
def test_a_password_is_what_was_given_sign_by_sign(password, monkeypatch):
    """Whatever TOML would read in it; and it survives the file that `rollmill up` writes."""
    monkeypatch.setenv("ROLLMILL_BUS__SECURITY__PASSWORD", password)
    config = load(overrides=[f"bus.security.{name}={value}" for name, value in login(password=None).items()])

    assert config.bus.security.open().password == password


def test_the_settings_that_up_writes_are_read_back_with_their_secrets(tmp_path):
    """By services, and by commands called beside them."""
    base = Config(bus=BusConfig(security=SecurityConfig(**login(password='a\'b\\c "d"'))))
    plan = make_plan(tmp_path, base=base, bootstrap="kafka:9093")
    plan.write()

    assert load(plan.config_path) == plan.config
    assert plan.config_path.stat().st_mode & 0o077 == 0


def test_up_refuses_security_for_the_broker_that_it_starts_itself(tmp_path):
    """It speaks plaintext: the services would never reach it."""
    base = Config(bus=BusConfig(security=SecurityConfig(**login())))
    with pytest.raises(ConfigError, match=r"bus.security.protocol is sasl_ssl, .* --bootstrap, or leave"):
        make_plan(tmp_path, base=base)


class TestPasswordFile:
    @pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
    def test_it_holds_the_password_in_one_line(self, tmp_path, ending):
        """An editor's line end is not part of it; spaces are."""
        (tmp_path / "p").write_bytes(f" {SECRET} {ending}".encode())
        config = SecurityConfig(**login(password=None, password_file=tmp_path / "p"))

        assert config.open().password == f" {SECRET} "

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "must hold one line with the password"),
            (b"\n", "must hold one line"),
            (b"hunter2\nhunter3\n", "must hold one line"),
            (b"x" * (MAX_PASSWORD_BYTES + 1), "must hold one line"),
            (b"\xff\xfe", "is not UTF-8 text"),
            (None, "cannot read .*: No such file"),
        ],
        ids=["empty", "a line end", "two lines", "large", "no text", "absent"],
    )
    def test_another_content_is_named_by_file_and_setting(self, tmp_path, content, says):
        """The error shows nothing of what is in it."""
        if content is not None:
            (tmp_path / "p").write_bytes(content)
        with pytest.raises(ConfigError, match=says) as caught:
            SecurityConfig(**login(password=None, password_file=tmp_path / "p")).open()

        assert "bus.security.password_file" in str(caught.value)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


class TestCertificateFiles:
    @pytest.mark.parametrize(
        ("names", "says"),
        [
            ({"ca_file": "absent"}, "bus.security.ca_file: cannot read .*absent: No such file"),
            ({"ca_file": "text"}, "bus.security.ca_file: .*text holds no certificate in PEM form"),
            ({"cert_file": "absent", "key_file": "text"}, "cert_file, key_file: cannot read .*absent and"),
            ({"cert_file": "text", "key_file": "text"}, "cert_file, key_file: .* are no certificate with its key"),
        ],
    )
    def test_one_that_cannot_be_used_is_named_with_its_setting(self, tmp_path, names, says):
        """Before anything is connected."""
        (tmp_path / "text").write_text("no certificate\n")
        files = {setting: tmp_path / name for setting, name in names.items()}
        with pytest.raises(ConfigError, match=says):
            SecurityConfig(protocol="ssl", **files).open()

    def test_hosts_are_always_checked(self):
        """A certificate of the right authority for another host is a stranger's."""
        tls = SecurityConfig(protocol="ssl").open().tls

        assert (True, ssl.CERT_REQUIRED) == (tls.check_hostname, tls.verify_mode)


def test_log_lines_about_logging_in_are_dropped_at_every_level(caplog):
    """The client library prints requests at DEBUG, with the password in them; other requests stay."""
    caplog.set_level(logging.DEBUG, "aiokafka.conn")
    logger = logging.getLogger("aiokafka.conn")
    for request in (SaslAuthenticateRequest_v0(b"\0alice\0" + SECRET.encode()), SaslHandShakeRequest_v0("PLAIN")):
        logger.debug("Request to %s:%d %d: %s", "h", 1, 2, request)

    assert SECRET not in caplog.text
    assert "SaslHandShakeRequest" in caplog.text


def test_options_are_those_of_the_client_library():
    """Only what the protocol uses."""
    security = Security(protocol=Protocol.SASL_PLAINTEXT, mechanism=Mechanism.PLAIN, user="alice", password=SECRET)
    assert security.options() == {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "alice",
        "sasl_plain_password": SECRET,
    }


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["bus.replication=0"], "bus.replication: Input should be greater than 0"),
        (["bus.replication=1", "bus.min_insync=2"], "min_insync is 2 and replication 1: so many copies could never"),
    ],
)
def test_copies_that_could_never_be_are_refused(settings, says):
    """More in sync than there are."""
    with pytest.raises(ConfigError, match=says):
        load(overrides=settings)
