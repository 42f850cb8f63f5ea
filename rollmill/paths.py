"""Where a local system keeps its things, below the current directory unless told otherwise.

Names alone, so that a command may know them without knowing the services.
"""

from __future__ import annotations

from pathlib import Path

DATA_DIR = Path(".rollmill")
"""Everything of a local system."""

CONFIG_NAME = "config.toml"
"""What its services, and commands called beside them, read."""

PORTS_NAME = "ports.json"
"""The ports of the last start."""

BLOBS_NAME = "blobs"
"""Values that are too large for the log."""

RUN_NAME = "run"
"""The supervisor's directory: lock, state, logs."""
