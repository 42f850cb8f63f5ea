"""Figures go to every writer that works, in order, and to none that failed."""

from __future__ import annotations

import pytest

from infra.errors import ConfigError
from schemas.telemetry import MetricPoint
from trainer.config import WriterName, make_config
from trainer.report import Report
from trainer.writers import figures


class Noting:
    """A writer that notes what it is told, and may break at a step."""

    def __init__(self, noted, breaks_at=None):
        self._noted = noted
        self._breaks_at = breaks_at

    def write(self, stream, step, figures, at_ms):
        if step == self._breaks_at:
            raise OSError("disk full")
        self._noted.append((stream, step, figures, at_ms))

    def close(self):
        self._noted.append("closed")


def points(step):
    return [MetricPoint(name="trainer.loss", value=step / 2, at_ms=10 * step, step=step)]


def config(tmp_path, *writers):
    return make_config({"run": "r", "model": tmp_path, "directory": tmp_path, "report": {"writers": writers}})


async def test_a_writer_is_told_in_order_and_closed(tmp_path):
    """Whichever purpose figures have."""
    noted, opened = [], []

    def opening(config, after, branch):
        opened.append((config.run, after, branch))
        return Noting(noted)

    report = Report(config(tmp_path, "wandb"), print, {WriterName.WANDB: ("json", opening)})
    report.begin(3, 1)
    report.figures("step", points(4))
    report.figures("evaluation", points(4))
    report.figures("step", points(5))
    await report.close()

    assert opened == [("r", 3, 1)]
    told = {"trainer/loss": 2.0}
    assert noted == [
        ("step", 4, told, 40),
        ("evaluation", 4, told, 40),
        ("step", 5, {"trainer/loss": 2.5}, 50),
        "closed",
    ]


async def test_a_writer_that_breaks_is_left_out_and_the_other_goes_on(tmp_path, caplog):
    """It is said once, with the cause."""
    broken, whole = [], []
    writers = {
        WriterName.WANDB: ("json", lambda *_: Noting(broken, breaks_at=2)),
        WriterName.TENSORBOARD: ("json", lambda *_: Noting(whole)),
    }
    report = Report(config(tmp_path, "wandb", "tensorboard"), print, writers)
    report.begin(0, 0)
    for step in range(1, 5):
        report.figures("step", points(step))
    await report.close()

    assert [each[1] for each in whole[:-1]] == [1, 2, 3, 4]
    assert [each[1] for each in broken] == [1], "what broke is not called again, not even to be closed"
    assert [record.message for record in caplog.records] == ["run r goes on without wandb: disk full"]


def test_a_missing_package_is_found_before_anything_is_trained(tmp_path):
    """The error says what to install."""
    with pytest.raises(ConfigError, match=r"names 'wandb', .* 'no_such_package' is not installed: pip install"):
        Report(config(tmp_path, "wandb"), print, {WriterName.WANDB: ("no_such_package", lambda *_: Noting([]))})


def test_a_writer_that_nobody_knows_is_refused(tmp_path):
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match=r"report.writers.*'tensorboard' or 'wandb'"):
        config(tmp_path, "mlflow")


def test_a_figure_is_named_as_in_metrics_with_its_labels_behind():
    point = MetricPoint(name="trainer.reward_component_mean", value=0.5, at_ms=1, step=1, labels={"component": "done"})

    assert figures([point]) == {"trainer/reward_component_mean/done": 0.5}
