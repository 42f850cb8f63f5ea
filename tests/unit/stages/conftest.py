"""What tests of the stages share: the toy families, an environment host in this process, a renderer."""

from __future__ import annotations

import pytest

from infra.clock import SystemClock
from infra.envhost.local import LocalEnvHost
from stages.handlers.registry import environment
from stages.run.render import Renderer
from tests import toys
from tests.model_directory import word_model


@pytest.fixture
def families(tmp_path, monkeypatch):
    """The toy families, installed."""
    toys.install(tmp_path / "site", monkeypatch)


@pytest.fixture
async def host(families):
    """An environment host whose environments are those of the installed families."""
    async with LocalEnvHost(environment, clock=SystemClock()) as local:
        yield local


@pytest.fixture(scope="session")
def toy_renderer(tmp_path_factory):
    """The renderer of a model that knows the toys' words."""
    return Renderer(word_model(tmp_path_factory.mktemp("toys"), toys.WORDS))
