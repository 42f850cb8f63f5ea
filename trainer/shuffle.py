"""The control: siblings trade their shaped rewards, so that a reward no longer says anything about its sample.

Each sibling gets the reward of another one or its own, every order as likely as any: its expected advantage is then 0,
whatever it did, and a run that learns all the same learns from something else than its reward. What a group earned in
all, its success, and whether it is kept, stay as they were. The order follows from the seed and the siblings' names
alone, by a hash and no generator, so replay finds it again on any machine. Process rewards belong to turns, of which
siblings have different numbers: there is no such trade for them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from infra.errors import ConfigError
from trainer.group import Group
from trainer.terminal import Terminal


def shuffled(group: Group, seed: int) -> Group:
    """Return a group whose graded siblings have traded rewards.

    Raises:
        ConfigError: a sibling has process rewards.
    """
    for sibling in group.completed:
        if sibling.turn_rewards:
            raise ConfigError(
                f"{group.id}/{sibling.sample} at offset {sibling.offset} has process rewards, and `shuffle_seed` can "
                f"only trade rewards of whole samples; leave it out, or grade family {sibling.family!r} by outcome"
            )
    givers = sorted(group.completed, key=lambda sibling: _drawn(seed, sibling))
    pairs = zip(group.completed, givers, strict=True)
    return replace(
        group,
        completed=tuple(replace(taker, reward=giver.reward, components=giver.components) for taker, giver in pairs),
    )


def _drawn(seed: int, sibling: Terminal) -> bytes:
    return hashlib.blake2b(f"{seed} {sibling.group} {sibling.sample}".encode(), digest_size=16).digest()
