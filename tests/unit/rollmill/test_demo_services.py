"""The services of the demo, before anything is started."""

from __future__ import annotations

from rollmill.demo.processes import ProcessMachine


def test_the_demo_starts_services_that_it_has(tmp_path):
    """All of a local system's but the live board, and training beside them."""
    machine = ProcessMachine(
        tmp_path / "demo", tmp_path / "model", tmp_path / "run.toml", "demo-0", bootstrap=None, say=lambda _: None
    )

    assert set(machine._base) | {"follow", "feeder", "trainer"} == set(machine._supervisor._services)
    assert "board" not in machine._base
