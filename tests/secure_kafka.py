"""A local Kafka with secured listeners beside its plaintext one, and certificates for it, made for one test session.

    tls       TLS, the client needs no certificate
    mutual    TLS, the client needs a certificate
    login     TLS and a user with a password (PLAIN, SCRAM)
    bare      a user with a password, without TLS

Who comes by the plaintext listener is a super user; everybody else may do what an access control list allows. The
openssl program comes with every Debian that has Java.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import broker, loopback
from infra.broker import archive
from infra.broker.local import LocalBroker, Node

USER = "rollmill-test"
"""May do everything, like whoever comes by the plaintext listener."""

PASSWORD = "horse; staple=\\7 [ü]"
"""Of every user: signs that formats take for their own."""

LISTENERS = {"tls": "SSL", "mutual": "SSL", "login": "SASL_SSL", "bare": "SASL_PLAINTEXT"}
"""Listener -> what it speaks."""

_LIMIT_S = 60.0


@dataclass(frozen=True)
class Certificates:
    """Authorities, and what they signed."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority that signed the broker and the client."""
        return self.folder / "ca.pem"

    @property
    def other_ca(self) -> Path:
        """One that signed nothing but `stranger`."""
        return self.folder / "other.pem"

    def cert(self, name: str) -> Path:
        """The certificate of `broker`, `client` (may do everything), `guest` (may do nothing) or `stranger`."""
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        """Its key; `locked` is the client's, encrypted with PASSWORD."""
        return self.folder / f"{name}.key"

    @classmethod
    def made(cls, folder: Path) -> Certificates:
        """Make them all."""
        made = cls(folder)
        for name in ("ca", "other"):
            _openssl("req", "-x509", *_new_key(folder, name), "-subj", f"/CN={name}")
        for name, authority in (("broker", "ca"), ("client", "ca"), ("guest", "ca"), ("stranger", "other")):
            signed_by = ("-CA", folder / f"{authority}.pem", "-CAkey", folder / f"{authority}.key")
            names = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
            _openssl("req", "-x509", *signed_by, *_new_key(folder, name), "-subj", f"/CN={name}", *names)
        locked = ("-topk8", "-passout", f"pass:{PASSWORD}", "-out", made.key("locked"))
        _openssl("pkcs8", "-in", made.key("client"), *locked)
        (folder / "broker.both.pem").write_text(made.key("broker").read_text() + made.cert("broker").read_text())
        return made


def _new_key(folder: Path, name: str) -> tuple[Any, ...]:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    return (*curve, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")


def _openssl(*arguments: object) -> None:
    command = ["openssl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@dataclass(frozen=True)
class SecureKafka:
    """The running broker."""

    plaintext: str
    """Address of the open listener."""
    addresses: dict[str, str]
    """Listener -> its address."""
    certificates: Certificates
    data: Path = field(repr=False)
    """Its data directory."""


def _settings(ports: dict[str, int], certificates: Certificates, users: tuple[str, ...]) -> dict[str, str]:
    listening = ",".join(f"{name.upper()}://${{host}}:{port}" for name, port in ports.items())
    speaking = ",".join(f"{name.upper()}:{protocol}" for name, protocol in LISTENERS.items())
    plain = " ".join(f"user_{user}={_quoted(PASSWORD)}" for user in users)
    modules = "org.apache.kafka.common.security"
    settings = {
        "listeners": f"BROKER://${{host}}:${{port}},CONTROLLER://${{host}}:${{controller_port}},{listening}",
        "advertised.listeners": f"BROKER://${{host}}:${{port}},{listening}",
        "listener.security.protocol.map": f"BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT,{speaking}",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.folder / "broker.both.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.ca),
        "listener.name.mutual.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:CN=client;User:{USER}",
    }
    for listener in ("login", "bare"):
        prefix = f"listener.name.{listener}"
        settings[f"{prefix}.plain.sasl.jaas.config"] = f"{modules}.plain.PlainLoginModule required {plain};"
        for mechanism in ("scram-sha-256", "scram-sha-512"):
            settings[f"{prefix}.{mechanism}.sasl.jaas.config"] = f"{modules}.scram.ScramLoginModule required;"
    return settings


def _quoted(text: str) -> str:
    """Return a text as JAAS wants it quoted, in a properties file."""
    in_jaas = text.replace("\\", "\\\\").replace('"', '\\"')
    in_properties = in_jaas.replace("\\", "\\\\")
    return '"' + "".join(sign if sign.isascii() else f"\\u{ord(sign):04x}" for sign in in_properties) + '"'


def _scram(user: str, password: str) -> list[str]:
    return [
        word
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
        for word in ("--add-scram", f"{mechanism}=[name={user},password={password}]")
    ]


@contextmanager
def secure_kafka(folder: Path, *, users: tuple[str, ...] = (USER,)) -> Iterator[SecureKafka]:
    """Run the broker with these users until the block is left."""
    (folder / "certificates").mkdir()
    certificates = Certificates.made(folder / "certificates")
    ports: dict[str, int] = {}
    for name in LISTENERS:
        ports[name] = loopback.find_free(ports.values()) or 0
    node = Node(
        settings=_settings(ports, certificates, users),
        format_options=tuple(word for user in users for word in _scram(user, PASSWORD)),
    )
    running = LocalBroker(folder / "data", node=node)
    found = broker.prepare()
    classes = archive.ensure(found)
    try:
        running.launch(found, java_flags=[f"-XX:SharedArchiveFile={classes}"] if classes else [], detached=False)
        yield SecureKafka(
            plaintext=str(running.status().bootstrap),
            addresses={name: f"{loopback.HOST}:{port}" for name, port in ports.items()},
            certificates=certificates,
            data=folder / "data",
        )
    finally:
        running.stop()
