"""What docs/tuning.md and docs/troubleshooting.md name is there: metrics, settings, commands, figures, pages."""

import re
from pathlib import Path

import pytest

from infra.config import Config
from producers.sources import Described
from rollmill.cli import COMMANDS
from trainer import presets
from trainer.config import RunConfig
from trainer.plan_config import PlanConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / name for name in ("tuning.md", "troubleshooting.md")]
CODE = re.compile(r"`([^`\n]+)`|'(trainer\.[a-z0-9_]+)'")
METRIC = re.compile(r'"(trainer\.[a-z0-9_]+)"')
PLANNED = re.compile(r'"((?:trainer|engine|log|step|run|episode)\.[a-z_]+)"')


def said(page):
    """Return the pieces of code on a page."""
    return [code or metric for code, metric in CODE.findall(page.read_text(encoding="utf-8"))]


def found(pattern, file):
    return set(pattern.findall((ROOT / file).read_text(encoding="utf-8")))


def setting(name):
    """Tell whether a dotted name is one of RUN.toml or of the services' configuration."""
    if name.startswith("tasks."):
        return name.partition(".")[2].partition(".")[0] in Described.__struct_fields__
    if name.startswith("plan."):
        return name.partition(".")[2] in PlanConfig.model_fields
    for model in (RunConfig, Config):
        at = model
        for part in name.split("."):
            fields = getattr(at, "model_fields", {})
            if part not in fields:
                break
            at = fields[part].annotation
        else:
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_metric_is_one_that_the_trainer_writes(page):
    """Or a figure of the plan; the source is read, since importing the trainer takes long."""
    known = (
        found(METRIC, "trainer/progress.py")
        | found(METRIC, "trainer/exclusion.py")
        | found(METRIC, "trainer/evaluating.py")
        | found(PLANNED, "trainer/plan_figures.py")
    )
    named = {name for code in said(page) for name in re.findall(r"\b(?:trainer|log)\.[a-z0-9_]+", code)}

    assert len(named) > 3
    assert sorted(named - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_setting_can_be_set(page):
    """A renamed key is renamed here too."""
    prefixes = r"algorithm|checkpoints|stop|curriculum|tasks|plan|envhost|bus|run|init|eval"
    names = {name for code in said(page) for name in re.findall(rf"^((?:{prefixes})\.[a-z_.]+)", code)}

    assert len(names) > 3
    assert sorted(name for name in names if not setting(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_exists(page):
    """As it is typed."""
    commands = {code.split()[1] for code in said(page) if code.startswith("rollmill ")}

    assert len(commands) > 1
    assert sorted(commands - set(COMMANDS)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_leads_somewhere(page):
    """To a file, and on a page to a heading."""
    for target in re.findall(r"\]\(([^)#]*(?:#[^)]*)?)\)", page.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        slugs = [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not heading or heading in slugs, target


def test_the_presets_are_all_named():
    """Where a reader looks for values to begin from."""
    text = PAGES[0].read_text(encoding="utf-8")

    assert [name for name in presets.names() if f"`{name}`" not in text and f'"{name}"' not in text] == []
