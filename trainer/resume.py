"""What a resumed run may change: one line per key of its configuration, and the refusal of what may not.

A run goes on from its decisions: whatever they, its tokens and its weights rest on stays as it was. Everything else may
change, and is written down in `TrainerStarted`, so that replay judges each step by the rules of the trainer that
decided it. A key that no line names takes that of its section. Where a fixed key must change, the run can be forked: a
new run, with decisions of its own, that begins with the weights of a checkpoint. This file compares plain values; it
does not know the log, and what a key means is said in `config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from infra.errors import ConfigError
from trainer.config import RunConfig


class Rule(NamedTuple):
    """What a resumed run may do with a key."""

    fixed: bool
    """It must be what it was."""
    why: str
    """The reason, or what becomes of a change."""


def _fixed(why: str) -> Rule:
    return Rule(fixed=True, why=why)


def _free(why: str) -> Rule:
    return Rule(fixed=False, why=why)


RULES: Mapping[str, Rule] = {
    "seed": _fixed("every derived seed follows from it"),
    "tokenizer_digest": _fixed("tokenizer and chat template: the tokens in the log would mean other texts"),
    "model_digest": _fixed("the weights that the run began with: all steps were made on them"),
    "forked_from": _fixed("where those weights come from"),
    "algorithm.samples": _fixed("siblings of one run must be alike"),
    "algorithm.lora": _fixed("checkpoints hold these adapters and nothing else"),
    "algorithm.overlong": _fixed("a constant of the reward: recorded digests contain it"),
    "algorithm.shuffle_seed": _fixed("a constant of the reward: recorded digests contain it"),
    "tasks.family": _fixed("groups of one run are of one kind"),
    "tasks.payload": _fixed("the tasks, and constants of their reward"),
    "tasks.name": _fixed("group ids follow from it"),
    "tasks": _free("taken by the feeder when it starts"),
    "run": _free("the name under which all this is looked up"),
    "model": _free("a directory may move; what it holds may not change"),
    "directory": _free("it may move, with its checkpoints"),
    "publish": _free("where the next versions are written"),
    "start": _free("the run's own beginning is in its decisions"),
    "threads": _free("sums are rounded another way from here on"),
    "device": _free("sums are rounded another way from here on"),
    "ranks": _free("sums are rounded another way from here on"),
    "algorithm": _free("for steps made from here on; recorded ones that are made again keep their batches"),
    "curriculum": _free("for groups admitted from here on"),
    "rewards": _fixed("constants of the reward; what changes by plan is `curriculum.weights`"),
    "evaluation": _free("for steps made from here on; what is recorded stays"),
    "stop": _free("when to end"),
    "guards": _free("what is watched from here on"),
    "buffer_bytes": _free("how much memory the trainer takes"),
    "report": _free("what is told beside the log"),
    "checkpoints": _free("what is kept from here on"),
}
"""Key, or section, of the configuration -> what a resumed run may do with it."""


def rule(key: str) -> Rule:
    """Return what may be done with a key: its own line, else that of its section."""
    return RULES.get(key) or RULES[key.partition(".")[0]]


def identity(config: RunConfig, tokenizer_digest: str, model_digest: str, *, ranks: int = 1) -> dict[str, Any]:
    """Return what is written down about a run when a trainer starts."""
    return {
        **config.model_dump(mode="json"),
        "tokenizer_digest": tokenizer_digest,
        "model_digest": model_digest,
        # One is what it was before there could be more.
        **({"ranks": ranks} if ranks > 1 else {}),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value then, value now) of what differs; a key that was not known then had its default."""
    defaults = RunConfig(run="r", model="", directory="").model_dump(mode="json")
    then, ours = {**_flat(defaults), **_flat(before)}, _flat(now)
    # What an older program wrote down and this one no longer has cannot matter to it.
    keys = dict.fromkeys([*ours, *(key for key in then if key.partition(".")[0] in defaults)])
    return {key: (then.get(key), ours.get(key)) for key in keys if _text(then.get(key)) != _text(ours.get(key))}


def refuse_changes(run: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a resumed run changes.

    Raises:
        ConfigError: a fixed key is among it; names each of them, and lists what may change.
    """
    found = changes(before, now)
    broken = [
        f"{key} was {_text(then)}, now it is {_text(ours)} ({rule(key).why})"
        for key, (then, ours) in found.items()
        if rule(key).fixed
    ]
    if broken:
        raise ConfigError(
            f"run {run!r} cannot go on like this: {'; '.join(broken)}. Change it back, or give --fork NEW_RUN: a new "
            f"run that begins with the weights of this one's last checkpoint. What --resume may change:\n{table()}"
        )
    return found


def table() -> str:
    """Return RULES as lines for a person."""
    width = max(map(len, RULES))
    return "\n".join(
        f"  {key:{width}}  {'fixed ' if each.fixed else 'may   '} {each.why}" for key, each in sorted(RULES.items())
    )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by `key` and `section.key`; what lies deeper is compared as a whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and key != "forked_from":
            flat.update({f"{key}.{part}": inner for part, inner in value.items()})
        else:
            flat[key] = value
    return flat


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=list)
