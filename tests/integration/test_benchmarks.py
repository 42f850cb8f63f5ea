"""The benchmarks as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.kafka import log_with_topics
from benchmarks.pipeline import Pipeline
from benchmarks.stage_processes import simulated_stages
from infra.config import BusConfig

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

QUICK_LIMIT_S = 50.0
"""A benchmark promises to end within this with `--quick`, on two cores that are its own."""

BUSY_FACTOR = 3.0
"""Tests run on machines that do other things as well."""


async def test_simulated_stages_on_a_real_log(kafka):
    """Three processes, started as the product starts them, bring every job to the end."""
    config = BusConfig(bootstrap=kafka, prefix="benchmark-test.")
    async with log_with_topics(config) as bus, simulated_stages(config):
        assert await Pipeline(bus, slots=64).no_ops("r", 50) > 0


def quickly(name):
    """Run a benchmark as a user does and return its object, the last line."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--json", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=QUICK_LIMIT_S * BUSY_FACTOR,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["name", "ours", "rival", "unit", "ratio", "detail"]
    assert found["name"] == name
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_the_pipeline_quickly():
    """The figures of both rivals; it ends in time."""
    began = time.monotonic()
    found = quickly("pipeline")
    took_s = time.monotonic() - began

    assert found["ratio"] == found["ours"] / found["rival"] > 0.8
    assert found["detail"]["process_per_job"]["ratio"] > 5
    assert took_s < QUICK_LIMIT_S * BUSY_FACTOR


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_cancels_quickly():
    """Every environment was seen to be closed, and every generation aborted."""
    found = quickly("cancel")

    assert found["ratio"] is None
    assert found["detail"]["environments"] == 200
    assert 0 <= found["detail"]["p50_s"] <= found["detail"]["p99_s"] < 10


def test_routing_quickly():
    """Time is simulated: what holds here holds everywhere."""
    found = quickly("routing")

    assert found["ratio"] == found["ours"] / found["rival"] >= 1.5
    assert found["detail"]["prefix_hits_ratio"] >= 0.95
    assert found["detail"]["least_outstanding"]["ratio"] > 1


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_a_hop_quickly():
    """Both rivals ran, and Faust is the real one."""
    found = quickly("hop")

    assert found["ratio"] == found["ours"] / found["rival"] > 0.1
    assert found["detail"]["no_events"]["ratio"] > 0.1
    assert found["detail"]["faust"]["ratio"] > 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_scaling_quickly():
    """Eight workers do much more than four."""
    found = quickly("scaling")

    assert found["ratio"] == found["ours"] / found["rival"] > 0.6
    assert found["detail"]["of_linear"].keys() == {"1", "2", "4", "8"}


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_recovery_quickly():
    """What counts holds on any machine: nothing is lost, and what was in flight is done again."""
    found = quickly("recovery")

    assert found["ratio"] is None
    assert found["detail"]["lost"] == 0
    assert found["detail"]["in_flight"] == 64 <= found["detail"]["repeated"] <= 128
    assert 0 < found["detail"]["back_s"] < 60


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_a_soak_quickly():
    """Every stage was watched to the end."""
    found = quickly("soak")

    assert found["ratio"] is None
    assert found["detail"]["slopes"].keys() == {"init[0]", "run[0]", "run[1]", "eval[0]"}
    assert found["detail"]["rss_slope"] == max(found["detail"]["slopes"].values()) < 1.0


def test_the_codec_quickly():
    """Both sides carried the same; half of the bytes are the same on both."""
    found = quickly("codec")

    assert found["ratio"] == found["ours"] / found["rival"] > 5
    assert 0.5 < found["detail"]["bytes_ratio"] < 0.8


@pytest.mark.slow
def test_the_policy_server_quickly():
    """Its answers were all of the wanted length, and so were those of both rivals."""
    found = quickly("serve")

    assert found["ratio"] == found["ours"] / found["rival"] > 1
    assert found["detail"]["batched_generate"]["ratio"] > 0.3
