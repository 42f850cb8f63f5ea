"""What tests of several folders share: one real Kafka for the whole session, started when the first test asks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from infra import broker
from infra.broker.errors import JarsNotResolved, JavaNotFound, MavenNotFound

# An example may take any time: a machine that is busy with something else breaks no promise of ours.
settings.register_profile("rollmill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollmill")


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real Apache Kafka; tests keep apart by prefix. Where it cannot run: a skip, in CI an error."""
    try:
        running = broker.start(tmp_path_factory.mktemp("kafka"), detached=False)
    except (JavaNotFound, MavenNotFound, JarsNotResolved) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Kafka: {error}")
    address = running.status().bootstrap
    assert address is not None
    yield address
    running.stop()
