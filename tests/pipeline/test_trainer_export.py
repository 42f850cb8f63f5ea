"""A version of a run becomes a folder that others load as it is, and that says where it comes from."""

from __future__ import annotations

import asyncio
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from suites import SUITE, MadeUpSuite
from synthetic_run import RUN, VOCABULARY, decisions, memory_bus, record_trajectories, run_config, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.clock import SystemClock
from infra.errors import ConfigError
from rollmill.commands.export import command
from trainer import loop
from trainer.aliases import named
from trainer.export import export
from trainer.history import History
from trainer.weights import weights_digest

CLOCK = SystemClock()


@pytest.fixture(scope="module", params=[None, {"rank": 2}], ids=["whole", "adapters"])
def run(tmp_path_factory, request):
    """A run of six steps, whose version of step 2 was the best of those that were evaluated, with a value head."""
    root = tmp_path_factory.mktemp("run")
    small_model(root / "model")
    algorithm = {"estimator": "gae", "value_lr": 0.01, "lora": request.param}
    limits = {"stop": {"max_steps": 6}, "checkpoints": {"keep": 1, "keep_versions": 2}}
    config = run_config(root, root / "model", evaluation=SUITE, algorithm=algorithm, **limits)

    async def whole():
        bus = await memory_bus()
        await record_trajectories(bus, groups=60)
        async with asyncio.timeout(60):
            await loop.run(config, bus, CLOCK, evaluator=MadeUpSuite(lambda step, version: 30 if step == 2 else 20))
        return History.of(await decisions(bus))

    return config, asyncio.run(whole())


def loaded(directory):
    """Return model and tokenizer of a folder, as anybody loads them."""
    return (kind.from_pretrained(directory, local_files_only=True) for kind in (AutoModelForCausalLM, AutoTokenizer))


@pytest.mark.parametrize(("name", "step"), [("best", 2), ("last", 6), ("step:5", 5), ("step:2", 2), ("step:0", 0)])
def test_a_version_is_exported_from_wherever_its_weights_still_are(run, tmp_path, name, step):
    """Among the kept versions, in a checkpoint, or in the model that the run began with; always with its digest."""
    _, history = run
    found = export(history, name, tmp_path / "out")

    assert (found.step, found.version, found.digest) == (step, step, named(history, name).digest)
    assert weights_digest((tmp_path / "out" / "model.safetensors").read_bytes()) == found.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_exported_folder_loads_in_transformers_as_it_is(run, tmp_path):
    """Whole, without a value head; the tokenizer has the chat template."""
    config, history = run
    export(history, "best", tmp_path / "out")
    model, tokenizer = loaded(tmp_path / "out")

    assert {path.name for path in config.model.iterdir()} | {"README.md"} == {
        path.name for path in (tmp_path / "out").iterdir()
    }
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "w1 w2"}], return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert model(**ids).logits.shape[-1] == VOCABULARY
    before, _ = loaded(config.model)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in before.named_parameters()}
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert any(changed)


def test_the_page_says_where_the_model_is_from_and_what_was_measured(run, tmp_path):
    """Run, version, digest, and one line for each evaluation."""
    _, history = run
    export(history, "best", tmp_path / "best")
    export(history, "step:5", tmp_path / "other")
    page = (tmp_path / "best" / "README.md").read_text()

    assert page.startswith("---\nlibrary_name: transformers\n")
    assert f"| run | `{RUN}` |\n| step | 2 |\n| version | 2 |" in page
    assert f"`{named(history, 'best').digest}`" in page
    assert f"`{history.config['model_digest']}`" in page
    known = "100.0% of 400 | 0 of 40"
    assert f"| 0 | 0 | 0.500 | 0.352 to 0.648 | 40 | 0.500 (k = 1, 0.352 to 0.648) | {known} |  |" in page
    assert (
        f"| 2 | 2 | 0.750 | 0.598 to 0.858 | 40 | 0.750 (k = 1, 0.598 to 0.858) | {known} | this model, best |" in page
    )
    assert '| `algorithm.estimator` | `"gae"` |' in page
    assert "was not evaluated itself" not in page
    assert "was not evaluated itself" in (tmp_path / "other" / "README.md").read_text()


def test_weights_that_are_gone_or_were_changed_are_not_exported(run, tmp_path):
    """The error says where they were looked for."""
    _, history = run
    with pytest.raises(ConfigError, match=r"weights of step 3 .* no longer in .*v000003.*checkpoints"):
        export(history, "step:3", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

    config, copy = history.config, tmp_path / "copy"
    shutil.copytree(config["directory"], copy)
    for file in copy.rglob("model.safetensors"):
        file.write_bytes(b"other weights")
    started = next(reversed(history.started.values()))
    moved = type(started)(
        **{**{f: getattr(started, f) for f in started.__struct_fields__}, "config": {**config, "directory": str(copy)}}
    )
    elsewhere = History(started={0: moved}, versions=history.versions, steps=history.steps)
    with pytest.raises(ConfigError, match="weights of step 6"):
        export(elsewhere, "last", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("step:9", "no version of step 9 was published; there are those of steps 0, 1, 2, 3, 4, 5, 6"),
        ("newest", "use `best`, `last` or `step:N`"),
        ("step:two", "use `best`, `last` or `step:N`"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_those_that_do(run, tmp_path, name, complaint):
    """Before anything is written."""
    with pytest.raises(ConfigError, match=complaint):
        export(run[1], name, tmp_path / "out")


def test_a_folder_that_exists_is_left_alone(run, tmp_path):
    """Nothing is mixed into it."""
    with pytest.raises(ConfigError, match="exists"):
        export(run[1], "last", tmp_path)


def test_int8_without_its_package_is_refused_before_anything_is_written(run, tmp_path, monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it was not there

    with pytest.raises(ConfigError, match=r"package torchao, .* not installed: pip install 'rollmill\[int8\]'"):
        export(run[1], "last", tmp_path / "out", int8=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["r", "@best", "r@"])
def test_run_and_version_are_named_together(version):
    """The call is wrong, and says how it is right."""
    found = CliRunner().invoke(command, [version, "--to", "out"])

    assert (found.exit_code, "RUN@best, RUN@last or RUN@step:N" in found.output) == (2, True)
