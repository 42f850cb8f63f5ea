"""`rollmill plan`: every example and every preset can be planned, and bad input is answered."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from infra.errors import ConfigError
from rollmill.commands.plan import command, shown
from trainer import presets
from trainer.config import load_config
from trainer.plan_figures import Figure

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.name != "pyproject.toml")

MINIMAL = 'run = "r"\nmodel = "nowhere"\ndirectory = "d"\n'
MODEL = """
[plan.model]
layers = 28
hidden = 3584
heads = 28
kv_heads = 4
intermediate = 18944
vocabulary = 152064
"""


def plan(path, *options):
    done = CliRunner().invoke(command, [str(path), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def write(tmp_path, text):
    path = tmp_path / "RUN.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_every_example_loads_and_can_be_planned(path):
    """Without its model, its tasks or its family."""
    config = load_config(path)

    found = json.loads(plan(path, "--json"))

    assert found["run"] == config.run
    assert found["problems"] == []
    assert found["figures"]["run.hours"] > 0
    assert found["figures"].keys() == found["follows_from"].keys()


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_can_be_planned(name, tmp_path):
    """On eight GPUs each, or one with adapters, it fits seven billion parameters; `debug` is for a small model."""
    small = "[plan.model]\nlayers = 2\nhidden = 64\nheads = 2\nintermediate = 128\nvocabulary = 263\n"
    gpus = ("--run-set", "plan.trainer_gpus=8", "--run-set", "plan.engine_gpus=8")
    path = write(tmp_path, MINIMAL + (small if name == "debug" else MODEL))

    found = json.loads(plan(path, "--preset", name, "--json", *(() if name in ("debug", "lora-1gpu") else gpus)))

    assert found["problems"] == []
    assert found["bottleneck"] in {"engine", "environment", "trainer"}


def test_a_table_says_what_each_figure_follows_from(tmp_path):
    """And where the bottleneck is, and what each stage of a curriculum takes."""
    said = plan(write(tmp_path, 'preset = "long-horizon"\n' + MINIMAL + MODEL))

    for word in ("trainer.weights_bytes", "follows from", "log.hour_bytes", "phases", "bottleneck:", "problem:"):
        assert word in said


def test_a_value_can_be_tried_without_the_file(tmp_path):
    """Twice the engines sample twice as fast."""
    path = write(tmp_path, MINIMAL + MODEL)
    alone, both = (
        json.loads(plan(path, "--json", "--run-set", f"plan.engine_gpus={gpus}", *speed))["figures"]
        for gpus, speed in ((1, SPEED), (2, SPEED))
    )

    assert both["step.engine_s"] == alone["step.engine_s"] / 2


SPEED = ("--run-set", "plan.engine_tokens_per_s=1000")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (MINIMAL, r"\[plan\.model\]"),
        (MINIMAL + "[plan]\nmfuu = 1\n" + MODEL, "mfuu"),
        (MINIMAL + "[plan]\nturn_tokens = 300\n" + MODEL, "tasks.max_tokens = 256"),
        (MINIMAL + "[tasks]\nmax_token = 3\n" + MODEL, r"\[tasks\].*max_token"),
        ('preset = "dapo-70b"\n' + MINIMAL + MODEL, "there is no preset 'dapo-70b'"),
        ('run = "r"\n' + MODEL, "model"),
        ("plan = 3\n" + MINIMAL, r"\[plan\]"),
    ],
)
def test_bad_input_is_answered_by_what_is_wrong(tmp_path, text, names):
    """One error, and no table."""
    with pytest.raises(ConfigError, match=names):
        plan(write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("a_bytes", 999.0, "999 B"),
        ("a_bytes", 1500.0, "1.5 kB"),
        ("a_bytes", 7.6e9, "7.6 GB"),
        ("a_share", 0.256, "26%"),
        ("a_s", 12.345, "12.3 s"),
        ("a_tokens_per_s", 32_477.2, "32,477"),
        ("turns", 7.5, "7.5"),
        ("tokens", 992_000.0, "992,000"),
    ],
)
def test_a_figure_is_shown_in_its_unit(name, value, text):
    """The name's last part is the unit."""
    assert shown(Figure(name, value, "")) == text
