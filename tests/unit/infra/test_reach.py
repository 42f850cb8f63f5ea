"""Why a cluster does not answer: each cause in words of its own, within the limit."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager

import pytest
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from infra import kafka_reach
from infra.errors import BusError, ConfigError
from infra.kafka_reach import explain, reach
from infra.security import PLAINTEXT, Mechanism, Protocol, Security

SECRET = "hunter2"
TLS = Security(protocol=Protocol.SSL, tls=ssl.create_default_context())
LOGIN = Security(
    protocol=Protocol.SASL_SSL, tls=TLS.tls, mechanism=Mechanism.SCRAM_SHA_512, user="alice", password=SECRET
)


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] something (_ssl.c:1)")
    error.reason = reason
    return error


def untrusted() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "IP address mismatch"
    return error


def closed(cause: Exception | None = None) -> KafkaConnectionError:
    error = KafkaConnectionError("Connection at h:1 closed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "security", "says"),
    [
        (
            SaslAuthenticationFailed("no"),
            LOGIN,
            "h:1 refused user 'alice' by SCRAM-SHA-512: wrong password, or no such",
        ),
        (UnsupportedSaslMechanismError("x"), LOGIN, "h:1 offers no SCRAM-SHA-512"),
        (IllegalSaslStateError("x"), LOGIN, "takes no log-in, .* set bus.security.protocol to ssl"),
        (ValueError("Server sent wrong signature!"), LOGIN, "does not prove that it knows the password of 'alice'"),
        (KeyError("v"), LOGIN, "is it the right cluster?"),
        (untrusted(), TLS, "the certificate of h:1 is not accepted: IP address mismatch; check bus.security.ca_file"),
        (tls_error("TLSV13_ALERT_CERTIFICATE_REQUIRED"), TLS, r"refused the TLS .*check bus.security.cert_file"),
        (closed(tls_error("SSLV3_ALERT_BAD_CERTIFICATE")), TLS, "refused the TLS connection"),
    ],
)
def test_what_more_tries_would_not_change_is_final(error, security, says):
    """More tries with a wrong password lock the account."""
    trouble = explain(error, security, "h:1", greeted=False)
    assert trouble.final
    assert SECRET not in trouble.text
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(trouble.text)


@pytest.mark.parametrize(
    ("error", "security", "greeted", "says"),
    [
        (ConnectionRefusedError(111, "Connection refused"), PLAINTEXT, False, "h:1: Connection refused"),
        (OSError(-2, "Name or service not known"), PLAINTEXT, False, "h:1: Name or service not known"),
        (closed(), PLAINTEXT, False, "closes them unanswered .* does its listener want TLS or a log-in"),
        (ConnectionResetError(104, "reset"), TLS, False, "speaks no TLS .* is its listener plaintext"),
        (tls_error("WRONG_VERSION_NUMBER"), TLS, False, r"speaks no TLS \(WRONG_VERSION_NUMBER\)"),
        (closed(), TLS, True, "speaks Kafka but closes the connection at the first question .* want a log-in"),
    ],
)
def test_what_time_may_heal_is_not_final(error, security, greeted, says):
    """A broker may be starting, or behind a balancer that takes connections before it."""
    trouble = explain(error, security, "h:1", greeted=greeted)
    assert not trouble.final
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(trouble.text)


@asynccontextmanager
async def server(answer):
    """Serve a function of (reader, writer) on loopback and give its address."""
    running = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running:
        yield f"127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def hang_up(reader, writer):
    """Take a connection and close it."""
    writer.close()


async def stay_silent(reader, writer):
    """Read and say nothing, as a frozen process does, until the other side leaves."""
    await reader.read()
    writer.close()


async def talk_nonsense(reader, writer):
    """Answer like a web server."""
    writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("answer", [hang_up, talk_nonsense])
async def test_what_speaks_no_kafka_is_told_from_what_is_silent(answer):
    """Whatever listens there."""
    async with server(answer) as address:
        trouble = await kafka_reach._ask(address, PLAINTEXT, limit_s=30.0)

    assert isinstance(trouble, kafka_reach.Trouble)
    assert "takes connections but closes them unanswered" in trouble.text


async def test_silence_is_reported_within_the_limit_with_every_address():
    """A frozen process takes connections and says nothing."""
    async with server(stay_silent) as silent, server(stay_silent) as other:
        with pytest.raises(BusError, match=rf"no answer from {silent},{other} in 0.6 s .*{silent} .*{other} gave no"):
            await reach(f"{silent},{other}", PLAINTEXT, limit_s=0.6)


@pytest.mark.parametrize("bootstrap", ["localhost", ":9092", "h:x"])
async def test_what_is_no_address_is_said_so_at_once(bootstrap):
    """Time would not heal it."""
    with pytest.raises(BusError, match="is no address; expected host:port"):
        await asyncio.wait_for(reach(bootstrap, PLAINTEXT, limit_s=3600.0), 30)


@pytest.mark.parametrize("bootstrap", ["", " , "])
async def test_nothing_to_ask_is_said_so_at_once(bootstrap):
    """Nobody is waited for."""
    with pytest.raises(ConfigError, match=r"names no address; set bus\.bootstrap"):
        await asyncio.wait_for(reach(bootstrap, PLAINTEXT, limit_s=3600.0), 30)
