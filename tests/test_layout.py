"""The folders are the architecture: ours alone under their names, layered, and light to import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PACKAGES = ("rollmill", "producers", "stages", "trainer", "infra", "schemas")
"""Top-level packages; distributions of other people have some of these names."""

LIGHT = ("schemas", "stages.init", "stages.run", "stages.eval", "stages.pipeline", "producers", "rollmill")
"""What must start without a tensor library: a stage worker, a producer, the command line."""

LIGHT_PROCESSES = ("stages.init.__main__", "stages.run.__main__", "stages.eval.__main__", "rollmill.cli")
"""Processes that are started often."""

HEAVY = ("torch", "transformers", "chdb", "matplotlib", "vllm")
"""Libraries that cost seconds and hundreds of megabytes to import."""

FOLDERS = sorted(
    str(path.parent.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_name_leads_to_this_repository(package):
    """An installed distribution of the same name does not shadow ours."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin == str(ROOT / package / "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_else_has_the_name(package):
    """Two distributions with one top-level package overwrite each other's files."""
    assert set(packages_distributions().get(package, [])) <= {"rollmill"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_says_what_it_is(folder):
    """A newcomer reads the first lines of `__init__.py` and knows the folder's role."""
    docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")))
    assert docstring
    assert len(docstring.split()) >= 5


def test_every_folder_of_modules_is_a_package():
    """A folder without `__init__.py` is left out by tools that look for packages, and says nothing about itself."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert sorted({str(path.parent.relative_to(ROOT)) for path in modules} - set(FOLDERS)) == []


@pytest.fixture(scope="module")
def dragged_in() -> dict[str, list[str]]:
    """Import the light modules one after the other in a fresh process; return each one's new heavy libraries."""
    script = f"""
import importlib, json, sys
found, known = {{}}, set()
for name in {(*LIGHT, *LIGHT_PROCESSES)!r}:
    importlib.import_module(name)
    found[name] = sorted(set(sys.modules) & set({HEAVY!r}) - known)
    known.update(found[name])
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*LIGHT, *LIGHT_PROCESSES])
def test_it_starts_without_heavy_libraries(name, dragged_in):
    """Scaling a stage out, and asking the command line for help, stays cheap."""
    assert dragged_in[name] == []


def test_the_layers_hold():
    """No import goes upwards, and no stage knows another (contracts in pyproject.toml)."""
    checked = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
