"""Free ports on this machine's loopback interface.

They are chosen below the range that Linux lends to outgoing connections: a client that keeps calling a dead server
from inside that range may connect to itself, and so keep the server from coming back. Between the choice and the bind
somebody may take a port; then whoever binds says so and chooses again. What a port is for is not known here.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

HOST = "127.0.0.1"
"""Where local services listen."""

PORTS = range(20_000, 32_000)
"""Where free ports are chosen."""

TRIES = 200
"""Ports tried before giving up."""

NONE_FREE = f"{TRIES} ports between {PORTS.start} and {PORTS.stop - 1} on {HOST} were tried, none is free"
"""What to say when `find_free` found none."""


def is_free(port: int) -> bool:
    """Tell whether a service could listen on a port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind: an old TIME_WAIT is no owner
        try:
            link.bind((HOST, port))
        except OSError:
            return False
        return True


def find_free(but: Collection[int] = ()) -> int | None:
    """Return a free port other than these, drawn at random; None if all that were tried are taken."""
    return next((port for port in random.sample(PORTS, TRIES) if port not in but and is_free(port)), None)
