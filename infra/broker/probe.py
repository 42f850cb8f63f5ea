"""One question to a Kafka address, without a client: which cluster are you, and do you serve.

A listening port is not a broker that serves, and it may be somebody else's. This sends one Metadata request (version
2, no topics) over a plain socket and reads the cluster id from the answer. Nothing is retried and nothing is logged:
the caller waits and decides. Only plaintext listeners are understood.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_METADATA = 3
"""Kafka's number of the request."""

_VERSION = 2
"""Version of the request: the first one whose answer names the cluster."""

_CORRELATION = 0x524D
"""Comes back with the answer, which proves that it is one."""

_CLIENT = b"rollmill-probe"
"""Names us in the broker's log."""

_MAX_ANSWER_BYTES = 1 << 20
"""Largest answer that is read."""


@dataclass(frozen=True)
class Answer:
    """What a Kafka node said about its cluster."""

    cluster: str
    """Id of the cluster; made when its data directory was formatted."""
    brokers: int
    """Brokers registered; 0 while the cluster is still starting."""


def ask(host: str, port: int, *, limit_s: float = 1.0) -> Answer | None:
    """Return the answer of the node at host:port; None if nothing there speaks Kafka within the limit."""
    header = struct.pack(">hhih", _METADATA, _VERSION, _CORRELATION, len(_CLIENT)) + _CLIENT
    request = header + struct.pack(">i", 0)
    try:
        with socket.create_connection((host, port), timeout=limit_s) as link:
            link.settimeout(limit_s)
            link.sendall(struct.pack(">i", len(request)) + request)
            (size,) = struct.unpack(">i", _receive(link, 4))
            if not 0 < size <= _MAX_ANSWER_BYTES:
                return None
            return _parse(_receive(link, size))
    except (OSError, struct.error, ValueError):
        return None


def _receive(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = link.recv(size - len(data))
        if not chunk:
            raise ConnectionError(f"the node closed the connection after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)


def _parse(body: bytes) -> Answer:
    correlation, brokers = struct.unpack_from(">ii", body)
    if correlation != _CORRELATION:
        raise ValueError("not an answer to this request")
    at = 8
    for _ in range(brokers):
        at += 4  # node id
        _, at = _string(body, at)  # host
        at += 4  # port
        _, at = _string(body, at)  # rack
    cluster, _ = _string(body, at)
    return Answer(cluster=cluster, brokers=brokers)


def _string(body: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">h", body, at)
    end = at + 2 + max(size, 0)  # -1 stands for null
    return body[at + 2 : end].decode(), end
