"""Where an environment host listens: `unix:/path` or `http://127.0.0.1:PORT`.

The address travels in every Episode, so that a worker finds the host that holds its lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from infra.errors import ConfigError

UNIX_PATH_BYTES = 107
"""Longest path of a Unix socket that Linux takes, bytes."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: either a path or a host and port."""

    path: Path | None
    """The Unix socket."""
    host: str = ""
    """Name or number of the machine."""
    port: int = 0
    """TCP port; 0 lets the machine choose when listening."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address.

        Raises:
            ConfigError: it has neither form.
        """
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if not path.startswith("/") or len(path.encode()) > UNIX_PATH_BYTES:
                raise ConfigError(
                    f"environment host address {text!r}: a Unix socket needs an absolute path of at most "
                    f"{UNIX_PATH_BYTES} bytes, this one has {len(path.encode())}; choose a shorter directory"
                )
            return cls(Path(path))
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme != "http" or not host or port is None:
            raise ConfigError(f"environment host address {text!r}: expected unix:/path or http://127.0.0.1:PORT")
        return cls(None, host, port)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"
