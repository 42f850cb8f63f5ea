"""How good a scripted rule is at a run's own tasks: what the guard `baseline` compares the trained policy with.

The rule plays the first tasks of the run's source with the run's seeds and its last horizon, in this process and
without the pipeline. What comes out is written into the configuration, and so into TrainerStarted; it is the same at
each start.
"""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path

from infra.errors import ConfigError, Failure
from producers.publish import tasks_of
from producers.sources import describe, make_source
from rollmill.manifest import manifest_of
from stages.handlers.registry import handler
from stages.handlers.rules import play, rule_of
from trainer.config import RunConfig
from trainer.guards_config import BaselineRule

log = logging.getLogger(__name__)


def with_baseline(run: RunConfig, folder: Path) -> RunConfig:
    """Return the run with the success of the rule that it is compared with, if it has one and does not say it.

    Args:
        run: the run.
        folder: relative paths of its tasks start here.

    Raises:
        ConfigError: the family has no such rule, or cannot be played by one.
    """
    rule = run.guards.baseline
    if rule is None or rule.rule is None or rule.bound is not None:
        return run
    bound = _success(run, rule, rule.rule, folder)
    log.info("run %s: the rule %r succeeds at %.3f of its tasks", run.run, rule.rule, bound)
    measured = rule.model_copy(update={"bound": bound})
    return run.model_copy(update={"guards": run.guards.model_copy(update={"baseline": measured})})


def _success(run: RunConfig, rule: BaselineRule, name: str, folder: Path) -> float:
    source, manifest = make_source(describe(dict(run.tasks)), folder), manifest_of(run)
    found = []
    for instance in islice(source.instances(), rule.tasks):
        task = tasks_of(manifest, source.name, instance, now_ms=0)[0]
        try:
            family = handler(instance.family)
            found.append(play(family, rule_of(family, name), task))
        except (Failure, ValueError) as error:
            raise ConfigError(
                f"guards.baseline: the rule {name!r} cannot play row {instance.row} of {source.name!r}: {error}"
            ) from error
    if not found:
        raise ConfigError(f"guards.baseline: {source.name!r} has no task that the rule {name!r} could play")
    return sum(found) / len(found)
