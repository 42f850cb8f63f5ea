"""The page that goes with an exported model: where it comes from, exactly, and what its run's evaluations found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.decisions import Evaluated, VersionPublished
from schemas.scores import Scores
from trainer.evaluation import best
from trainer.history import History

HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- reinforcement-learning
- rollmill
---"""
"""What model hubs read."""

INTRODUCTION = (
    "Trained by reinforcement learning with Rollmill, on rollouts that a durable log keeps. The weights are whole, "
    "without value head and optimizer."
)
"""What the model is."""

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```"""
"""How it is loaded."""

INT8 = (
    "The weights of its linear layers are int8 here, each row with a scale; what was evaluated is the version itself. "
    "Loading it takes the package torchao."
)
"""What else an int8 model is."""

SHOWN = ("estimator", "groups", "samples", "max_lag", "lr", "horizon", "temperature", "kl")
"""Settings of `[algorithm]` on the page; the run's log has all of them."""


def model_card(history: History, version: VersionPublished, *, int8: bool = False) -> str:
    """Return the page of a version, as Markdown."""
    config = history.config
    parts = [
        HEADER,
        f"# {version.run}, step {version.step}",
        f"{INTRODUCTION} {INT8}" if int8 else INTRODUCTION,
        _table(("what", "value"), _origin(config, version, int8=int8)),
        "## Evaluations",
        _evaluations(history, version),
        "## Settings",
        _table(("setting", "value"), _settings(config)),
        "## Use",
        USE,
    ]
    return "\n\n".join(parts) + "\n"


def _origin(config: Mapping[str, Any], version: VersionPublished, *, int8: bool) -> list[tuple[str, str]]:
    rows = [
        ("run", f"`{version.run}`"),
        ("step", str(version.step)),
        ("version", str(version.version)),
        ("SHA-256 of the version's weight file" if int8 else "SHA-256 of `model.safetensors`", f"`{version.digest}`"),
        ("SHA-256 of the weights it began with", f"`{config.get('model_digest', 'unknown')}`"),
        ("digest of tokenizer and chat template", f"`{config.get('tokenizer_digest', 'unknown')}`"),
    ]
    fork = config.get("forked_from")
    return [*rows, ("fork of", f"`{fork['run']}`, step {fork['step']}")] if fork else rows


def _evaluations(history: History, version: VersionPublished) -> str:
    found = history.evaluations
    if not found:
        return "The run has none."
    top = best({step: each.scores for step, each in found.items()})
    rows = [_evaluation(found[step], this=step == version.step, top=step == top) for step in sorted(found)]
    columns = ("step", "version", "success", "95 % interval", "tasks", "pass@k", "allowed actions", "missing", "")
    note = "Success is a mean over held-out tasks, its interval is over tasks."
    if version.step not in found:
        note += " The version of this folder was not evaluated itself."
    return f"{note}\n\n{_table(columns, rows)}"


def _evaluation(found: Evaluated, *, this: bool, top: bool) -> tuple[str, ...]:
    scores = found.scores
    notes = [name for name, holds in (("this model", this), ("best", top), ("incomplete", scores.incomplete)) if holds]
    return (
        str(found.step),
        str(found.version),
        f"{scores.success:.3f}",
        f"{scores.low:.3f} to {scores.high:.3f}",
        str(scores.tasks),
        _pass_at_most(scores),
        f"{scores.valid:.1%} of {scores.turns}",
        f"{scores.missing} of {scores.samples}",
        ", ".join(notes),
    )


def _pass_at_most(scores: Scores) -> str:
    """Return pass@k for the largest k, with its interval if that was written down."""
    if not scores.pass_at:
        return "-"
    between = f", {scores.pass_low[-1]:.3f} to {scores.pass_high[-1]:.3f}" if scores.pass_low else ""
    return f"{scores.pass_at[-1]:.3f} (k = {len(scores.pass_at)}{between})"


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    algorithm, tasks = config.get("algorithm", {}), config.get("tasks", {})
    rows = [(f"`algorithm.{name}`", f"`{json.dumps(algorithm[name])}`") for name in SHOWN if name in algorithm]
    return [*rows, *((f"`tasks.{name}`", f"`{json.dumps(value)}`") for name, value in tasks.items())]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
