"""Free loopback ports for the services of this machine, kept from start to start while they stay free.

A kept port keeps bookmarks, dashboards and `curl` lines working. Ports are chosen below the range that Linux lends to
outgoing connections (see `infra/broker/local.py` for what goes wrong inside it). Between the choice and the bind
somebody may take a port; then the service says so and a new start chooses another.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from infra.broker.local import HOST, PORTS
from infra.errors import ConfigError

TRIES = 200
"""Ports tried before giving up."""


def is_free(port: int) -> bool:
    """Tell whether a service could listen on a loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind: an old TIME_WAIT is no owner
        try:
            link.bind((HOST, port))
        except OSError:
            return False
        return True


def choose(names: Sequence[str], *, kept: Path) -> dict[str, int]:
    """Return a free port for each name: that of the last `keep` if it is still free, else another.

    Raises:
        ConfigError: no free port was found.
    """
    last = _read(kept)
    chosen: dict[str, int] = {}
    for name in names:
        wish = last.get(name, 0)
        chosen[name] = wish if wish not in {0, *chosen.values()} and is_free(wish) else _another({*chosen.values()})
    return chosen


def keep(ports: dict[str, int], path: Path) -> None:
    """Remember the ports for the next start."""
    path.write_text(json.dumps(ports, indent=2) + "\n")


def _another(taken: set[int]) -> int:
    for port in random.sample(PORTS, TRIES):
        if port not in taken and is_free(port):
            return port
    raise ConfigError(f"{TRIES} ports between {PORTS.start} and {PORTS.stop - 1} on {HOST} were tried, none is free")


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): port for name, port in found.items() if isinstance(port, int) and 0 < port < 1 << 16}
