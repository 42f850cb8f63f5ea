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


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_the_pipeline_quickly():
    """One JSON object last, with the figures of both rivals; it ends in time and leaves nothing behind."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "pipeline", "--json", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=QUICK_LIMIT_S * BUSY_FACTOR,
        check=False,
    )
    took_s = time.monotonic() - began

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["name", "ours", "rival", "unit", "ratio", "detail"]
    assert found["ratio"] == found["ours"] / found["rival"] > 0.8
    assert found["detail"]["process_per_job"]["ratio"] > 5
    assert took_s < QUICK_LIMIT_S * BUSY_FACTOR


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # where Kafka cannot run, this is skipped
def test_cancels_quickly():
    """One JSON object last; every environment was seen to be closed, and every generation aborted."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "cancel", "--json", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=QUICK_LIMIT_S * BUSY_FACTOR,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["name"], found["ratio"]) == ("cancel", None)
    assert found["detail"]["environments"] == 200
    assert 0 <= found["detail"]["p50_s"] <= found["detail"]["p99_s"] < 10
