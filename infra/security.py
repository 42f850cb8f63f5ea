"""How a client and a Kafka cluster prove themselves to each other: TLS and SASL, ready to use.

Invariants: a secret is in no `repr` and in no log line, also not of the client library at its finest level; a server
is believed only when its certificate is signed by a trusted authority and names the host. Which settings these values
come from is not known here (`security_config.py`).
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiokafka.protocol.api import RequestStruct, Response

_SASL_AUTHENTICATE = 36
"""Kafka's number of the request that carries a password or what is derived from it."""


class Protocol(StrEnum):
    """What a listener speaks, in Kafka's words."""

    PLAINTEXT = "plaintext"
    """No encryption, no identity: for one machine or a closed network."""
    SSL = "ssl"
    """TLS; a client may prove itself by a certificate."""
    SASL_PLAINTEXT = "sasl_plaintext"
    """A user with a password, unencrypted: SCRAM hides the password, PLAIN does not."""
    SASL_SSL = "sasl_ssl"
    """TLS, and a user with a password."""

    @property
    def encrypted(self) -> bool:
        """Whether TLS is spoken."""
        return self in (Protocol.SSL, Protocol.SASL_SSL)

    @property
    def with_user(self) -> bool:
        """Whether a user logs in."""
        return self in (Protocol.SASL_PLAINTEXT, Protocol.SASL_SSL)


class Mechanism(StrEnum):
    """How a user logs in."""

    PLAIN = "PLAIN"
    """The password itself is sent."""
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    """Both sides prove that they know the password."""
    SCRAM_SHA_512 = "SCRAM-SHA-512"
    """The same with a longer hash."""


@dataclass(frozen=True, kw_only=True)
class Security:
    """What every connection to a cluster is made with."""

    protocol: Protocol = Protocol.PLAINTEXT
    """What the listener speaks."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """Trusted authorities and the client's own certificate; None without TLS."""
    mechanism: Mechanism | None = None
    """How the user logs in; None without SASL."""
    user: str = ""
    """Who logs in."""
    password: str = field(default="", repr=False)
    """What proves it."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of an aiokafka client."""
        options: dict[str, Any] = {"security_protocol": self.protocol.name}
        if self.protocol.encrypted:
            options["ssl_context"] = self.tls
        if self.protocol.with_user:
            options["sasl_mechanism"] = self.mechanism.value if self.mechanism else None
            options["sasl_plain_username"] = self.user
            options["sasl_plain_password"] = self.password
        return options


PLAINTEXT = Security()
"""No encryption and no identity."""


class _NoCredentials(logging.Filter):
    """Drops lines that show a log-in: at DEBUG the library prints every request with its content."""

    def filter(self, record: logging.LogRecord) -> bool:
        values = record.args if isinstance(record.args, tuple) else ()
        return not any(
            isinstance(value, RequestStruct | Response) and value.API_KEY == _SASL_AUTHENTICATE for value in values
        )


logging.getLogger("aiokafka.conn").addFilter(_NoCredentials())
