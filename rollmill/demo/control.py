"""The demo's control: the same run with rewards that siblings have traded, which must not rise.

A control may fall, for it is moved at random, and there are more ways down than up. One that rises has learnt without
its reward, and then the demo's own rise proves nothing about the reward either.
"""

from __future__ import annotations

from schemas.scores import Scores


def rose(before: Scores, after: Scores) -> bool:
    """Tell whether success rose by more than chance: its 95 % intervals do not even touch."""
    return after.low > before.high
