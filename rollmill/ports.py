"""Free loopback ports for the services of this machine, kept from start to start while they stay free.

A kept port keeps bookmarks, dashboards and `curl` lines working. Which ports are chosen from, and whether one is free,
is `infra/loopback.py`. It does not know the services.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from infra.errors import ConfigError
from infra.loopback import NONE_FREE, find_free, is_free


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
    port = find_free(taken)
    if port is None:
        raise ConfigError(f"{NONE_FREE}: end what listens there")
    return port


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): port for name, port in found.items() if isinstance(port, int) and 0 < port < 1 << 16}
