"""What an optimizer remembers of each parameter: whole for a checkpoint, cut for the ranks that share parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.ranks import Ranks


def whole_state(optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """Return what an optimizer remembers, whole; all ranks have to ask."""
    state = optimizer.state_dict()
    kept = {
        number: {name: ranks.whole(value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": kept}


def put_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], ranks: Ranks) -> None:
    """Put what `whole_state` returned in place; rates and decay stay what this optimizer was made with."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def part(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        # The count of steps is one number, whatever is shared.
        return ranks.part(value, parameter) if value.shape == parameter.shape else value

    cut = {
        number: {name: part(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    # A checkpoint's hyperparameters are those of the trainer that wrote it: a resumed run may change them.
    optimizer.load_state_dict({"state": cut, "param_groups": optimizer.state_dict()["param_groups"]})
