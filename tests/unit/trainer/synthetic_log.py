"""Terminal records made up for the pure parts of the trainer: which groups, in which order, how they ended."""

from __future__ import annotations

import random
from dataclasses import replace

from trainer.algorithm_config import Estimator, Filter
from trainer.groups import AssemblerState
from trainer.rules import GroupRules
from trainer.terminal import Terminal

START = AssemblerState.fresh(0)


def rules(**changes):
    """Return rules for groups of two, two groups per step, unless told otherwise."""
    values = {
        "groups": 2,
        "siblings_needed": 2,
        "filter": Filter.SUCCESS,
        "max_lag": 1,
        "estimator": Estimator.GRPO,
        "std": True,
        "recent": 8,
    }
    return GroupRules(**{**values, **changes})


def end(offset, group, sample, success=0.0, **changes):
    """Return the record that ends one sample of a group of two, sampled by version 0."""
    values = {
        "offset": offset,
        "group": group,
        "sample": sample,
        "samples": 2,
        "admission": ord(group[0]) - ord("a"),
        "digest": group,
        "content": f"content-{group}-{sample}",
        "completed": True,
        "reward": success,
        "success": success,
        "sampled": ((0, 3),),
    }
    return Terminal(**{**values, **changes})


def failed(offset, group, sample, **changes):
    """Return the record of a sample that has no reward."""
    return end(offset, group, sample, completed=False, sampled=(), **changes)


def random_log(seed, groups=14, siblings=3):
    """Return interleaved records of many groups, with repeats, conflicts, failures and gaps between offsets."""
    draw = random.Random(seed)
    pending = [(g, s) for g in range(groups) for s in range(siblings)]
    # Siblings end near each other, as they do in a run.
    pending.sort(key=lambda item: item[0] + draw.random() * 5)
    luck = [draw.random() for _ in range(groups)]
    log, offset = [], 0
    for number, sample in pending:
        name = f"g{number:03d}"
        base = end(
            0,
            name,
            sample,
            float(draw.random() < luck[number]),
            samples=siblings,
            admission=None if number % 5 == 4 else number,
            sampled=((draw.choice([0, 0, 0, 99]), 3),),
        )
        if draw.random() < 0.08:
            base = replace(base, completed=False, reward=0.0, success=0.0, sampled=())
        copies = [base]
        if draw.random() < 0.15:
            copies.append(replace(base, reward=7.0, content="second attempt"))
        if draw.random() < 0.1:
            copies.append(replace(base, digest="another task", sample=(sample + 1) % siblings))
        for copy in copies:
            offset += draw.choice([1, 1, 2, 5])
            log.append(replace(copy, offset=offset))
    return log
