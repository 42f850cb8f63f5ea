"""The random player and the expert on the demo's hunts: the lower and the upper bar of its chart.

They are played without a model and without the pipeline: they are no rollouts, only a yardstick.
"""

from __future__ import annotations

from rollmill.demo.evaluation import Suite
from schemas.scores import Scores
from stages.handlers.keydoor_policies import Policy, play
from trainer.evaluation import Played, scores


def baseline(policy: Policy, suite: Suite, seed: int) -> Scores:
    """Return the figures of a scripted policy on the hunts of a suite."""
    played = []
    for index in range(suite.episodes):
        payload = {"size": suite.size, "turns": suite.turns, "split": "held_out", "index": index}
        shown = play(policy, payload, dice=f"{seed} {index}", seed=seed)
        turns = sum(message["role"] == "assistant" for message in shown.messages)
        success = float(shown.verdict["opened"])
        played.append(Played(task=str(index), success=success, turns=turns, valid=turns))
    return scores("baseline", played)
