"""The `[guards]` section of RUN.toml: what is watched, and what follows."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from schemas.decisions import Action
from trainer.config_types import Count, Frozen, Share


class GuardRule(Frozen):
    """When a guard raises an alarm, and what follows."""

    bound: float
    """Figures beyond it are not as they should be; `guards.py` says which side that is."""
    steps: Count = 3
    """Trainer steps in a row that must be beyond it."""
    action: Action = Action.TELL
    """What follows: a record and a warning (`tell`), half the learning rate (`slow`), an earlier version with half the
    learning rate (`back`), or the run's end (`stop`)."""


class BaselineRule(Frozen):
    """What training has to beat: a policy that nobody trained."""

    bound: Share | None = None
    """Its mean success."""
    rule: str | None = None
    """Name of a scripted rule of the family; `rollmill train` plays it on the run's tasks to find the bound."""
    tasks: Count = 200
    """Tasks that the rule plays."""
    steps: Count = 50
    """Trainer steps in a row without a mean success above the bound."""
    action: Action = Action.TELL
    """What follows."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.bound is None and self.rule is None:
            raise ValueError(
                "give `bound`, a mean success, or `rule`, the name of a scripted rule that is to be played"
            )
        return self


class GuardsConfig(Frozen):
    """What is watched for a policy that goes astray; none of it unless given."""

    entropy: GuardRule | None = None
    """Entropy below the bound, nats per sampled token."""
    repetition: GuardRule | None = None
    """Share of an episode's n-grams of sampled tokens that occurred in it before, above the bound."""
    ngram: Count = 4
    """Tokens of an n-gram there."""
    farming: GuardRule | None = None
    """Mean reward of the samples that failed above the bound, process rewards included."""
    kl: GuardRule | None = None
    """KL to the reference above the bound, nats per token; measured where `algorithm.kl` is above 0."""
    baseline: BaselineRule | None = None
    """Mean success of the last `stop.success_groups` groups not above that of a rule."""
