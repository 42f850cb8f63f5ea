"""The random player and the expert on the demo's hunts: the lower and the upper bar of its chart.

They are played without a model and without the pipeline: they are no rollouts, only a yardstick.
"""

from __future__ import annotations

from rollmill.demo.evaluation import Score, Suite, wilson
from stages.handlers.keydoor_policies import Policy, play


def baseline(policy: Policy, suite: Suite, seed: int) -> Score:
    """Return the score of a scripted policy on the hunts of a suite."""
    wins, turns = 0, 0
    for index in range(suite.episodes):
        payload = {"size": suite.size, "turns": suite.turns, "split": "held_out", "index": index}
        shown = play(policy, payload, dice=f"{seed} {index}", seed=seed)
        if shown.verdict["opened"]:
            wins += 1
            turns += sum(message["role"] == "assistant" for message in shown.messages)
    low, high = wilson(wins, suite.episodes)
    return Score(
        success=wins / suite.episodes,
        low=low,
        high=high,
        turns=turns / wins if wins else 0.0,
        valid=1.0,
        missing=0,
        trajectories=(),
    )
