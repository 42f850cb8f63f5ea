"""Which version of a run's weights may not be loaded nor sampled by, as `control` has it.

A version is in quarantine for the life of the trainer that announced it; one that is started again may announce the
same version anew, after somebody has put its files right.
"""

from __future__ import annotations

from infra.control import ControlView
from infra.inference.base import Weights
from schemas.control import PolicyVersion, Quarantine


def announced(control: ControlView, run: str) -> PolicyVersion | None:
    """Return the version that a run's trainer announced last; None if it has announced none."""
    return control.get(f"policy/{run}", PolicyVersion)


def quarantined(control: ControlView, run: str) -> Quarantine | None:
    """Return why the version that a run announced last is not to be loaded, if it is not."""
    last, found = announced(control, run), control.get(f"quarantine/{run}", Quarantine)
    if last is None or found is None:
        return None
    return found if (last.epoch, last.version) == (found.epoch, found.version) else None


def refused(control: ControlView) -> dict[Weights, str]:
    """Return the weights of which no token may be taken, each with what was found."""
    found: dict[Weights, str] = {}
    for one in control.all(Quarantine):
        last = announced(control, one.run)
        if last is None or last.epoch <= one.epoch:
            found[Weights(one.version, one.run)] = one.cause
    return found
