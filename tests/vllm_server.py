"""A real vLLM server on the processor, in the environment that `make vllm` builds."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
START_LIMIT_S = 600.0
"""A minute on two idle cores."""
STOP_LIMIT_S = 60.0

OPTIONS = (
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),  # what our client needs
    "--enforce-eager",  # no compilation
    # On a processor vLLM 0.32 dies of a seeded request whose prompt it computes in pieces.
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Vllm:
    """A server that answers."""

    url: str
    log: Path

    def counter(self, name: str) -> int:
        """Return one of its Prometheus counters or gauges, over all engines."""
        with urlopen(f"{self.url}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, f"vLLM has no metric {name}"
        return int(sum(map(float, found)))

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return self.counter("vllm:generation_tokens_total")

    @property
    def in_flight(self) -> int:
        """Requests that it still works on."""
        return self.counter("vllm:num_requests_running") + self.counter("vllm:num_requests_waiting")


def require_vllm() -> None:
    """Skip where `make vllm` was not run; in CI that is an error."""
    if not PYTHON.exists():
        if os.environ.get("CI"):
            raise AssertionError(f"{PYTHON} is missing: run `make vllm`")
        pytest.skip("needs vLLM: run `make vllm`")


@contextmanager
def vllm(model: Path, log: Path, *options: str, max_model_len: int, dtype: str = "float32") -> Iterator[Vllm]:
    """Serve a model while the block runs."""
    require_vllm()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "policy"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len), "--dtype", dtype]
    argv, environment = [*command, *where, *OPTIONS, *options], {**os.environ, **ENVIRONMENT}
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=environment)
    server = Vllm(f"http://127.0.0.1:{port}", log)
    try:
        _wait_for(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(server: Vllm, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START_LIMIT_S
    while True:
        assert process.poll() is None, f"vLLM ended: {server.log.read_text()[-4000:]}"
        assert time.monotonic() < ends, f"vLLM is not up within {START_LIMIT_S} s: {server.log.read_text()[-4000:]}"
        try:
            urlopen(f"{server.url}/health", timeout=10).close()
        except OSError:
            time.sleep(0.5)  # it is another process, and says nothing until it answers
        else:
            return
