"""Write what verl 0.9.1 computes for fixed inputs: `python tests/unit/trainer/verl_reference.py FOLDER`.

FOLDER holds verl and what it imports, apart from torch, numpy and transformers, which the environment has:

    uv pip install --target FOLDER --no-deps verl==0.9.1 omegaconf hydra-core antlr4-python3-runtime==4.9.3 \\
        tensordict ray codetiming pyvers orjson protobuf requests jsonschema referencing rpds-py attrs \\
        jsonschema-specifications

and whatever else its `ModuleNotFoundError` names on a machine that lacks it. The tests read the JSON file alone: verl
is far too large for them. Rewards are multiples of 1/8, so that float32 there and float64 here begin alike.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

TARGET = Path(__file__).with_name("verl_reference.json")


def rounded(values):
    """Return nested lists of numbers as short as float32 allows."""
    return [rounded(v) for v in values] if isinstance(values, list) else float(f"{values:.7g}")


def eighths(draw, *shape):
    """Return multiples of 1/8 between -1 and 1."""
    return (draw.integers(-8, 9, shape) / 8).astype(np.float32)


def group_case(core, torch, draw, sizes):
    """Return rewards of groups and their advantages; one token per sample."""
    rewards = eighths(draw, sum(sizes))
    index = np.repeat(np.arange(len(sizes)), sizes)
    given = {
        "token_level_rewards": torch.tensor(rewards)[:, None],
        "response_mask": torch.ones(len(rewards), 1),
    }
    found = {
        "grpo": core.compute_grpo_outcome_advantage(**given, index=index),
        "dr_grpo": core.compute_grpo_outcome_advantage(**given, index=index, norm_adv_by_std_in_grpo=False),
        "rloo": core.compute_rloo_outcome_advantage(**given, index=index),
        "reinforce++": core.compute_reinforce_plus_plus_outcome_advantage(**given, config=SimpleNamespace(gamma=1.0)),
    }
    advantages = {name: rounded(advantage[:, 0].tolist()) for name, (advantage, _) in found.items()}
    return {"sizes": list(sizes), "rewards": rewards.tolist(), "advantages": advantages}


def gae_case(core, torch, draw, *, length, gamma, lam, one_token):
    """Return an episode, where its sampled tokens are, and its returns; `one_token` per turn or several."""
    mask = np.zeros(length, dtype=np.float32)
    mask[1::2] = 1.0
    if not one_token:
        mask[draw.random(length) < 0.4] = 1.0
    rewards, values = eighths(draw, length), eighths(draw, length)
    # A turn ends where an observation follows; only there it is rewarded.
    ends = mask * (1 - np.append(mask[1:], 0))
    _, returns = core.compute_gae_advantage_return(
        torch.tensor(rewards * ends)[None], torch.tensor(values)[None], torch.tensor(mask)[None], gamma, lam
    )
    return {
        "gamma": gamma,
        "lambda": lam,
        "mask": mask.tolist(),
        "rewards": (rewards * ends).tolist(),
        "values": values.tolist(),
        "returns": rounded(returns[0].tolist()),
    }


def value_case(core, torch, draw, clip):
    """Return predictions, targets and verl's clipped value loss, a mean over the mask."""
    now, old, returns = (eighths(draw, 12) for _ in range(3))
    mask = (draw.random(12) < 0.7).astype(np.float32)
    row = [torch.tensor(v)[None] for v in (now, returns, old, mask)]
    loss, _ = core.compute_value_loss(*row, cliprange_value=clip)
    return {
        "clip": clip,
        "values": now.tolist(),
        "old": old.tolist(),
        "returns": returns.tolist(),
        "mask": mask.tolist(),
        "loss": rounded(float(loss)),
    }


def main(folder):
    """Compute and write."""
    sys.path.append(folder)
    import torch
    import verl
    from verl.trainer.ppo import core_algos as core

    draw = np.random.default_rng(20240914)
    settings = [(1.0, 1.0), (1.0, 0.95), (0.9, 1.0), (0.9, 0.5), (0.5, 0.0)]
    found = {
        "verl": verl.__version__,
        "groups": [group_case(core, torch, draw, sizes) for sizes in ([4, 4], [2, 5, 3], [8], [3, 3, 3, 3])],
        "gae_one_token": [
            gae_case(core, torch, draw, length=11, gamma=g, lam=lam, one_token=True) for g, lam in settings
        ],
        "gae_many_tokens": [
            gae_case(core, torch, draw, length=14, gamma=1.0, lam=1.0, one_token=False) for _ in range(3)
        ],
        "value_loss": [value_case(core, torch, draw, clip) for clip in (0.2, 0.5)],
    }
    TARGET.write_text(json.dumps(found, separators=(",", ":")).replace('],"', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
