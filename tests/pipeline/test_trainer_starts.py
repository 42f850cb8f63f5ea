"""A start that cannot be is refused with the setting that is at fault, and leaves no run behind."""

from __future__ import annotations

import asyncio

import pytest
from synthetic_run import RUN, decisions, memory_bus, record_trajectories, run_config

from infra.clock import SystemClock
from infra.errors import ConfigError
from rollmill.commands.train import manifest_and_digests, write_manifest
from schemas.decisions import TrainerStarted
from schemas.topics import CONTROL, DECISIONS
from trainer import loop

CLOCK = SystemClock()

LIMIT_S = 300.0
"""Longest wait for a training that takes seconds."""


class Manifest:
    """Writes the run's manifest, as `rollmill train` does, and counts how often."""

    def __init__(self, config, bus):
        self.written = 0
        self._config, self._bus = config, bus

    async def __call__(self):
        self.written += 1
        return await write_manifest(manifest_and_digests(self._config), self._bus, CLOCK)


async def train(config, bus, manifest):
    async with asyncio.timeout(LIMIT_S):
        return await loop.run(config, bus, CLOCK, manifest=manifest)


def damaged(directory, tmp_path, name, content):
    """Return a copy of a model with one file of another content."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).write_bytes(content if file.name == name else file.read_bytes())
    return copy


REFUSED = {
    "a folder that is no model": (lambda model, path: {"model": path / "no"}, r"^model = .*no: no tokenizer\.json in"),
    "weights that are none": (
        lambda model, path: {"model": damaged(model, path, "model.safetensors", b"garbage")},
        r"^model = .*copy: it cannot be loaded: SafetensorError: ",
    ),
    "a shape that is none": (
        lambda model, path: {"model": damaged(model, path, "config.json", b"{")},
        r"^model = .*copy: it cannot be loaded: ",
    ),
    "a device that there is not": (
        lambda model, path: {"device": "abacus"},
        r"^device = 'abacus': it cannot be used: ",
    ),
    "a device that holds nothing": (lambda model, path: {"device": "meta"}, r"^device = 'meta': it cannot be used: "),
    "a directory that is a file": (
        lambda model, path: {"directory": model / "config.json" / "d"},
        r"^directory = .*/d: nothing can be written there: Not a directory$",
    ),
    "versions where nothing can be": (
        lambda model, path: {"publish": model / "config.json" / "v"},
        r"^publish = .*/v: nothing can be written there: Not a directory$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_start_that_cannot_be_names_the_setting_and_leaves_no_run(model, tmp_path, case):
    """Nothing is in the log, so `rollmill runs` lists nothing, and the name stays free."""
    change, says = REFUSED[case]
    bus = await memory_bus()
    good = run_config(tmp_path, model)
    manifest = Manifest(good, bus)

    with pytest.raises(ConfigError, match=says):
        await train(good.model_copy(update=change(model, tmp_path)), bus, manifest)

    assert manifest.written == 0
    assert {0} == {*(await bus.end_offsets(CONTROL.name)).values(), *(await bus.end_offsets(DECISIONS.name)).values()}


async def test_a_start_that_is_refused_by_what_the_run_was_leaves_its_manifest_alone(model, tmp_path):
    """The run is there: a second start of it, without --resume, adds nothing."""
    bus = await memory_bus()
    config = run_config(tmp_path, model, stop={"max_steps": 1})
    manifest = Manifest(config, bus)
    await manifest()  # what lies in the log before it is none of the run's
    await record_trajectories(bus)
    await train(config, bus, manifest)
    before = await bus.end_offsets(CONTROL.name)

    with pytest.raises(ConfigError, match="give --resume"):
        await train(config, bus, manifest)

    assert manifest.written == 2
    assert before == await bus.end_offsets(CONTROL.name)


async def test_the_run_begins_where_its_manifest_says(model, tmp_path):
    """What lies in the log before belongs to whoever had the name then."""
    bus = await memory_bus()
    await record_trajectories(bus)
    config = run_config(tmp_path, model)
    wanted = manifest_and_digests(config)
    start = await write_manifest(wanted, bus, CLOCK)

    async def stopped():
        stop = asyncio.Event()
        stop.set()
        await loop.run(config, bus, CLOCK, stop=stop, manifest=lambda: write_manifest(wanted, bus, CLOCK))

    async with asyncio.timeout(LIMIT_S):
        await stopped()

    (started,) = [decision for _, decision in await decisions(bus) if isinstance(decision, TrainerStarted)]
    assert start > 0
    assert (RUN, start, start) == (started.run, started.start, started.config["start"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tasks": {"family": "nosuch"}}, r"^tasks\.family = 'nosuch': unknown family 'nosuch'; known: "),
        ({"tasks": {"family": "keydoor", "budgets": {"run_s": -1}}}, r"^\[tasks\]: budgets\.run_s is -1"),
        ({"tasks": {"family": "keydoor", "max_tokens": 0}}, r"^\[tasks\]: max_tokens: Expected `int` >= 1"),
    ],
)
def test_tasks_that_cannot_be_are_refused_before_a_model_is_loaded(model, tmp_path, changes, says):
    """With the key."""
    with pytest.raises(ConfigError, match=says):
        manifest_and_digests(run_config(tmp_path, model, **changes))


@pytest.mark.parametrize("content", [b"[1", b"\xff", b"[1]"])
def test_a_chat_template_that_cannot_be_read_is_the_models_fault(model, tmp_path, content):
    """It is part of what the run is."""
    copy = damaged(model, tmp_path, "tokenizer_config.json", content)

    with pytest.raises(ConfigError, match=r"^model = .*copy: .*(cannot be read|holds no JSON object)"):
        manifest_and_digests(run_config(tmp_path, copy))
