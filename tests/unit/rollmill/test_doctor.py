import io
import json
import signal
import socket
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from infra.blobs import KEEP_MS
from infra.blobs.directory import DirectoryBlobs
from infra.clock import VirtualClock
from infra.security_config import SecurityConfig
from rollmill import doctor
from rollmill.commands.doctor import command
from rollmill.doctor import Check, Diagnosis, Verdict, diagnose, render


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without Java, Maven and Kafka's jars, on which the heavy packages are small ones of our own."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("torch", "transformers", "chdb"):
        (packages / f"{name}.py").write_text("__version__ = '9.9'\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return packages


def by_name(diagnosis: Diagnosis) -> dict[str, Check]:
    return {check.name: check for check in diagnosis.checks}


@pytest.mark.usefixtures("bare")
async def test_without_java_and_maven_it_names_the_packages_to_install(tmp_path):
    """They are missing, since the local Kafka needs them; optional tools are not."""
    diagnosis = await diagnose(tmp_path / "data")
    found = by_name(diagnosis)

    assert not diagnosis.healthy
    assert (found["Java"].verdict, found["Maven"].verdict) == (Verdict.MISSING, Verdict.MISSING)
    assert "openjdk-17-jre-headless" in found["Java"].advice
    assert "apt-get install maven" in found["Maven"].advice
    assert found["bwrap"].verdict is Verdict.INFO
    assert not (tmp_path / "data").exists()
    assert len(found) == len(diagnosis.checks), "each name once, so that scripts can look one up"


@pytest.mark.usefixtures("bare")
async def test_with_a_kafka_elsewhere_java_is_not_needed_but_the_kafka_is(tmp_path):
    """What matters depends on where the log is."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{link.getsockname()[1]}"
    diagnosis = await diagnose(tmp_path, bootstrap=address)
    found = by_name(diagnosis)

    assert (found["Java"].verdict, found["Maven"].verdict) == (Verdict.INFO, Verdict.INFO)
    assert found["Kafka"].verdict is Verdict.MISSING
    assert address in found["Kafka"].found


async def test_a_package_that_is_absent_broken_or_crashes_is_missing_with_the_extra_that_brings_it(bare, tmp_path):
    """A crash while importing does not take the doctor along."""
    (bare / "torch.py").write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})\n")
    (bare / "transformers.py").write_text("raise ImportError('libfoo.so.1 not found')\n")
    found = by_name(await diagnose(tmp_path))

    assert "signal 4" in found["torch"].found
    assert "libfoo.so.1 not found" in found["transformers"].found
    assert "rollmill[train]" in found["torch"].advice
    assert (found["chdb"].verdict, found["chdb"].found) == (Verdict.OK, "9.9")


def test_a_directory_that_cannot_be_written_is_named():
    """Where the data would go, even if it does not exist yet."""
    check = doctor._writable(Path("/proc/rollmill/data"))

    assert check.verdict is Verdict.MISSING
    assert "/proc" in check.found


@pytest.mark.parametrize("address", ["localhost", "localhost:x", ":9092"])
async def test_an_address_that_is_none_is_shown_the_right_form(address):
    """Before anything is asked."""
    assert "HOST:PORT" in (await doctor._kafka(address, SecurityConfig())).advice


def test_a_diagnosis_is_plain_data_and_reads_well():
    """JSON for scripts; for people one line per check, and square brackets survive."""
    diagnosis = Diagnosis((Check("torch", Verdict.MISSING, "No module", "pip install 'rollmill[train]'"),))
    out = io.StringIO()
    render(diagnosis, Console(file=out, width=100))

    assert json.loads(json.dumps(asdict(diagnosis)))["checks"][0]["verdict"] == "missing"
    assert "-> pip install 'rollmill[train]'" in out.getvalue()
    assert "missing: torch" in out.getvalue()


@pytest.fixture
async def store(tmp_path):
    """A blob store on a clock that only the test moves."""
    store = DirectoryBlobs(tmp_path / "blobs", VirtualClock())
    await store.create()
    return store


async def test_a_blob_store_is_written_to_and_counted(store):
    """What a collection would delete is named with the command; what is pinned or young is not among it."""
    clock = store._clock
    fresh = await doctor._blobs(store, clock)
    await store.put(b"o" * 2**20)
    await store.pin("run", [await store.put(b"p" * 2**20)])
    await clock.advance(KEEP_MS / 1000 + 1)
    await store.put(b"y" * 2**20)
    found = await doctor._blobs(store, clock)

    assert (Verdict.OK, "") == (fresh.verdict, fresh.advice)
    assert Verdict.WARNING is found.verdict
    assert "3 blobs, 3.0 MiB; 1 blobs, 1.0 MiB of them are over 91 days old and pinned by nobody" in found.found
    assert "rollmill blobs collect" in found.advice


async def test_a_blob_store_that_is_away_is_missing_and_none_is_no_fault(store, tmp_path):
    """No service would start with the one; without any, large messages are refused."""
    away = await doctor._blobs(DirectoryBlobs(tmp_path / "elsewhere", store._clock), store._clock)
    none = await doctor._blobs(None, store._clock)

    assert (Verdict.MISSING, Verdict.INFO) == (away.verdict, none.verdict)
    assert "elsewhere is no blob store" in away.found
    assert "bus.blobs" in away.advice
    assert "bus.blobs" in none.advice


@pytest.mark.usefixtures("bare")
def test_the_command_looks_at_the_store_that_the_configuration_names(store, tmp_path, monkeypatch):
    """The one of `rollmill up` here, unless told otherwise."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["--json", "--set", f"bus.blobs={store.root}"])
    checks = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}

    assert ("ok", True) == (checks["blob store"]["verdict"], "can be written; 0 blobs" in checks["blob store"]["found"])
