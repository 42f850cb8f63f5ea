"""Packages of others, installed into a folder of their own beside ours, and programs that run with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

LIMIT_S = 540
"""For an installation, and for a program, seconds; importing such packages takes a minute on a busy machine."""


def install(folder: Path, *requirements: str, alone: bool = False) -> Path:
    """Install packages into a folder and return it; `alone`: without what they depend on."""
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", folder]
    options = ["--no-deps"] if alone else []
    done = _run([*command, *options, *requirements])
    assert done.returncode == 0, f"{requirements[0]} could not be installed: {done.stderr}"
    return folder


def side(script: str, *arguments: Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Any:
    """Run a program of `tests/integration` in a process of its own, and return what its last line holds."""
    command = [sys.executable, ROOT / "tests" / "integration" / script, *arguments]
    done = _run(command, cwd=cwd, env={"PYTHONPATH": str(ROOT), **(environment or {})})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **options)
