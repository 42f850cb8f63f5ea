"""Finds out which addresses of a Kafka cluster answer, and when none does, why: an error that says what to check.

The client library only logs why it cannot connect, so this makes one connection of its own first, with the same
security, and asks for the cluster. What time may heal (nobody listens yet, a broker that restarts) is tried again until
the limit; a refused password or certificate is final at once, since more tries only lock accounts. Errors name
addresses, users and settings, never a secret.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.metadata import MetadataRequest

from infra.errors import BusError, ConfigError
from infra.security import Protocol, Security

_PAUSE_S = 0.25
"""Pause before addresses that did not answer are asked again, seconds."""

_CLOSE_S = 1.0
"""Longest wait for the end of the connection that asked, seconds."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Why an address gave no answer."""

    rank: int
    """How much it tells, for a report of one: more is more."""
    text: str
    """What was found and what to check."""

    @property
    def final(self) -> bool:
        """Whether another try would end the same."""
        return self.rank == _FINAL


_SILENT, _ODD, _FINAL = range(3)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an address said about its cluster."""

    address: str
    """The address as it was given."""
    cluster: str
    """Id of its cluster."""
    brokers: int
    """Brokers that the cluster has now."""


async def reach(bootstrap: str, security: Security, *, limit_s: float) -> list[Answer]:
    """Return the answers of a cluster, as soon as one of its addresses has answered.

    Raises:
        ConfigError: there is no address to ask.
        BusError: none did within the limit, or the cluster refused us; it says what to check.
    """
    addresses = [address.strip() for address in bootstrap.split(",") if address.strip()]
    if not addresses:
        raise ConfigError(
            f"connecting to Kafka: {bootstrap!r} names no address; set bus.bootstrap to host:port,host:port"
        )
    give_up = time.monotonic() + limit_s
    known: dict[str, Trouble] = {}
    while True:
        left_s = give_up - time.monotonic()
        found = await _ask_all(addresses, security, limit_s=left_s)
        answers = [result for result in found.values() if isinstance(result, Answer)]
        if answers:
            return answers
        # An attempt that the limit cut short tells less than the one before it.
        for address, result in found.items():
            if isinstance(result, Trouble) and result.rank >= known.get(address, result).rank:
                known[address] = result
        worst = max(known.values(), key=lambda trouble: trouble.rank, default=None)
        if worst is not None and worst.final:
            raise BusError(f"connecting to Kafka: {worst.text}")
        if time.monotonic() + _PAUSE_S >= give_up:
            if worst is not None and worst.rank > _SILENT:
                raise BusError(f"connecting to Kafka: {worst.text}")
            said = "; ".join(trouble.text for trouble in known.values())
            raise BusError(
                f"connecting to Kafka: no answer from {bootstrap} in {limit_s:g} s ({said}); "
                "start one with `rollmill up` or `rollmill broker start`, or set bus.bootstrap"
            )
        await asyncio.sleep(_PAUSE_S)


async def _ask_all(addresses: Sequence[str], security: Security, *, limit_s: float) -> dict[str, Answer | Trouble]:
    """Ask all addresses at once, until the first answer: a frozen broker must not hold up a cluster that works."""
    asking = {asyncio.create_task(_ask(address, security, limit_s=limit_s)): address for address in addresses}
    pending = set(asking)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(isinstance(task.result(), Answer) for task in done):
                break
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return {address: task.result() for task, address in asking.items() if not task.cancelled()}


async def _ask(address: str, security: Security, *, limit_s: float) -> Answer | Trouble:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return Trouble(rank=_FINAL, text=f"{address!r} is no address; expected host:port")
    connection: AIOKafkaConnection | None = None
    try:
        async with asyncio.timeout(max(limit_s, 0.0)):
            connection = await create_conn(
                host.strip("[]"), int(port), client_id="rollmill-reach", **security.options()
            )
            metadata = await connection.send(MetadataRequest([]))
            return Answer(address=address, cluster=metadata.cluster_id or "", brokers=len(metadata.brokers))
    except TimeoutError:
        return Trouble(rank=_SILENT, text=f"{address} gave no answer in {limit_s:.1f} s")
    except (KafkaError, OSError, ValueError, KeyError, AssertionError) as error:
        # The last three: the library's parsers on an answer that breaks the protocol of logging in.
        return explain(error, security, address, greeted=connection is not None)
    finally:
        if connection is not None:
            closed = connection.close()
            await asyncio.wait({closed}, timeout=_CLOSE_S)


def explain(error: BaseException, security: Security, address: str, *, greeted: bool) -> Trouble:
    """Return what an error of a connection means, and what to check.

    Args:
        error: what was raised.
        security: how the connection was made.
        address: to where.
        greeted: whether the other side had said before which requests it knows: Kafka says that to anybody.
    """
    cause = error.__cause__ if isinstance(error, KafkaError) and error.__cause__ is not None else error
    if isinstance(cause, ssl.SSLError):
        return _tls_trouble(cause, address)
    if isinstance(cause, SaslAuthenticationFailed | UnsupportedSaslMechanismError | IllegalSaslStateError):
        return Trouble(rank=_FINAL, text=_login_trouble(cause, security, address))
    if isinstance(cause, ValueError | KeyError | AssertionError):
        text = f"{address} broke off the log-in: it does not prove that it knows the password of {security.user!r}"
        return Trouble(rank=_FINAL, text=f"{text}; is it the right cluster?")
    if isinstance(cause, ConnectionRefusedError) or (
        isinstance(cause, OSError) and not isinstance(cause, ConnectionError)
    ):
        # By the number: asyncio's own words are "Connect call failed".
        said = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror
        return Trouble(rank=_SILENT, text=f"{address}: {said or cause}")
    if greeted:
        found = f"{address} speaks Kafka but closes the connection at the first question"
        advice = "does its listener want a log-in? check the port, bus.security.protocol, user and mechanism"
    elif security.protocol.encrypted:
        found = f"{address} takes connections but speaks no TLS"
        advice = "is its listener plaintext? check the port, or set bus.security.protocol to what the listener has"
    else:
        found = f"{address} takes connections but closes them unanswered"
        advice = "does its listener want TLS or a log-in? check the port and bus.security.protocol"
    return Trouble(rank=_ODD, text=f"{found} (bus.security.protocol is {security.protocol}); {advice}")


def _tls_trouble(error: ssl.SSLError, address: str) -> Trouble:
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate of {address} is not accepted: {error.verify_message}"
        advice = "check bus.security.ca_file, and that bus.bootstrap has a name that is in the certificate"
        return Trouble(rank=_FINAL, text=f"{text}; {advice}")
    reason = error.reason or type(error).__name__
    if "ALERT" in reason:
        text = f"{address} refused the TLS connection ({reason})"
        advice = "does it want a client certificate of its own authority? check bus.security.cert_file and key_file"
        return Trouble(rank=_FINAL, text=f"{text}; {advice}")
    text = f"{address} speaks no TLS ({reason})"
    advice = "is its listener plaintext? check the port, or set bus.security.protocol to what the listener has"
    return Trouble(rank=_ODD, text=f"{text}; {advice}")


def _login_trouble(error: KafkaError, security: Security, address: str) -> str:
    who = f"user {security.user!r} by {security.mechanism}"
    if isinstance(error, UnsupportedSaslMechanismError):
        return f"{address} offers no {security.mechanism}; set bus.security.mechanism to one that it has"
    if isinstance(error, IllegalSaslStateError):
        plain = Protocol.SSL if security.protocol.encrypted else Protocol.PLAINTEXT
        return (
            f"{address} takes no log-in, but {who} tried one; set bus.security.protocol to {plain}, or check the port"
        )
    return f"{address} refused {who}: wrong password, or no such user; check bus.security.user and the password"
