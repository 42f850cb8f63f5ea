"""What people call a version: `best`, `last`, `step:N`; each follows from the records alone. Pure.

Only versions of steps that were not undone are meant. Weights that were made or announced again have the number that
they were announced under last.
"""

from __future__ import annotations

from infra.errors import ConfigError
from schemas.decisions import Evaluated, VersionPublished
from trainer.evaluation import best
from trainer.history import History


def named(history: History, name: str) -> VersionPublished:
    """Return the version that a name means in a run.

    Args:
        history: the run.
        name: `best` is the one that its evaluations found to achieve most, `last` the newest, `step:N` that of a step.

    Raises:
        ConfigError: there is none, or the name is none.
    """
    live = history.made_by
    by_step = {found.step: found for found in history.versions if found.version in live}
    if not by_step:
        raise ConfigError(f"{name!r}: the run has published no version yet")
    step = _step_of(history, name, max(by_step))
    if step not in by_step:
        raise ConfigError(
            f"{name!r}: no version of step {step} was published; there are those of steps {_list(sorted(by_step))}"
        )
    return by_step[step]


def evaluated(history: History, name: str) -> Evaluated:
    """Return the evaluation of the version that a name means in a run.

    Raises:
        ConfigError: there is no such version, or it was not evaluated.
    """
    step = named(history, name).step
    if step not in history.evaluations:
        known = _list(sorted(history.evaluations)) or "none"
        raise ConfigError(
            f"{name!r}: the version of step {step} was not evaluated; of steps with an evaluation there are: {known} "
            f"([evaluation] in RUN.toml says which are to be)"
        )
    return history.evaluations[step]


def _step_of(history: History, name: str, last: int) -> int:
    kind, _, number = name.partition(":")
    if name == "last":
        return last
    if name == "best":
        found = best({step: each.scores for step, each in history.evaluations.items()})
        if found is None:
            raise ConfigError("'best': the run has no complete evaluation ([evaluation] in RUN.toml); name `last`")
        return found
    if kind == "step" and number.isascii() and number.isdigit():
        return int(number)
    raise ConfigError(f"{name!r} names no version: use `best`, `last` or `step:N`")


def _list(steps: list[int]) -> str:
    """Return numbers as text, the first and last ones of many."""
    few = [str(step) for step in steps]
    return ", ".join(few if len(few) <= 10 else [*few[:5], "...", *few[-5:]])
