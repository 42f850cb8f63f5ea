"""An agent that is a program: started with an address in its variables, ended with what it started and is in its group.

For families whose agent only knows a `base_url` (`stages/run/harness.py` says what is stepped). The program finds it in
OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and OUTCOME_URL, runs in an empty directory of its own, sees no other
variables than those, PATH, that directory as HOME and what its family gives it, and has no input. The episode ends with
the program; its exit code and the end of what it printed are the verdict. This is no sandbox: it may do what the
environment host's user may do, and what it starts in a session of its own outlives it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from infra.envhost.environment import StepResult

OUTPUT_BYTES = 4096
"""So much of the end of what a program prints is kept, bytes."""

READ_BYTES = 65_536
"""Read at once, bytes."""


class ProgramEnvironment:
    """Runs one command for each claim of its episode.

    Args:
        command: the program and its arguments.
        variables: more variables that it sees.
        files: name -> content, in its directory when it starts.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._variables = dict(variables or {})
        self._files = dict(files or {})
        self._running: _Running | None = None

    def reset(self) -> str:
        """End the program, if one runs; there is nothing to see before it is started."""
        self._end()
        return ""

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Start the program with an address (`open`), or say whether it has ended (`wait`)."""
        if action["name"] == "open":
            self._end()
            self._running = _Running(self._command, {**self._variables, **_told(action["arguments"])}, self._files)
        if self._running is None:
            raise ValueError("the program was not started: open it first")
        return StepResult("", done=self._running.ended)

    def verdict(self) -> dict[str, Any]:
        """End the program and return its exit code, none if it had to be ended, and the end of its output."""
        if self._running is None:
            return {"exit_code": None, "output": ""}
        self._running.end()
        return {"exit_code": self._running.exit_code, "output": self._running.output}

    def close(self) -> None:
        """End the program."""
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None


class _Running:
    """One start of a program."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str]) -> None:
        self.exit_code: int | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="agent-"))
        self._tail = b""
        try:
            for name, content in files.items():
                (self._directory / name).write_text(content, encoding="utf-8")
            self._process = subprocess.Popen(
                command,
                cwd=self._directory,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self._directory), **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        assert self._process.stdout is not None, "asked for"
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        """Tell whether the program has ended by itself.

        It is not waited for yet: as long as it is not, its number is nobody else's, and its group can be killed.
        """
        if self._process.returncode is not None:
            return True
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None

    @property
    def output(self) -> str:
        """The end of what it printed."""
        return self._tail.decode("utf-8", "replace")

    def end(self) -> None:
        """End the program and all that it started and left in its group."""
        if self._process.returncode is not None:
            return
        by_itself = self.ended
        os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.exit_code = code if by_itself else None
        self._reader.join(timeout=1.0)  # what left the group may hold the pipe
        shutil.rmtree(self._directory, ignore_errors=True)

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while piece := os.read(pipe.fileno(), READ_BYTES):
                self._tail = (self._tail + piece)[-OUTPUT_BYTES:]


def _told(address: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that tell a program its address, by the names that clients look for."""
    return {
        "OPENAI_BASE_URL": str(address["base_url"]),
        "OPENAI_API_KEY": str(address["api_key"]),
        "OPENAI_MODEL": str(address["model"]),
        "OUTCOME_URL": str(address["outcome_url"]),
    }
