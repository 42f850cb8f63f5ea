"""Generalised advantage estimation, where discounting counts turns; numpy only (Schulman et al. 2016).

    delta_t = r_t + gamma_t V_(t+1) - V_t
    A_t     = delta_t + gamma_t lambda_t A_(t+1)
    return  = A_t + V_t                                    what V_t is trained towards

`credit = turn`: t counts turns, V_t is the value at the last prompt token of a turn, and all sampled tokens of the turn
share A_t. `credit = token`: t counts sampled tokens and jumps observations; gamma = lambda = 1 inside a turn, gamma and
lambda at its end. V_t is always the value of what was there before a sampled token: both agree on a turn's first one.

A turn earns its process reward, the last one the shaped reward of the episode too. After the last turn V is 0; where a
limit cut the episode off, it is the value at the end of the record (an option): the state was worth something.
Advantages are not whitened: the papers differ, and the clip does not need it. (lambda -> 1 is low bias, high variance.)

A turn without a sampled token decided nothing and has no value; what it earned goes to the turn before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.algorithm_config import AlgorithmConfig

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class GaeRules:
    """What the estimate depends on, apart from rewards and values."""

    credit: Literal["turn", "token"]
    """What has an advantage of its own."""
    gamma: float
    """Discount per turn."""
    lam: float
    """Weight of what comes later, per turn."""
    bootstrap: bool
    """Value the end of an episode that a limit cut off."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> GaeRules:
        """Return the rules that a configuration states."""
        return cls(
            credit=algorithm.credit,
            gamma=algorithm.gamma,
            lam=algorithm.gae_lambda,
            bootstrap=algorithm.bootstrap_truncated,
        )


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One sample of a step: what it earned, and which of the step's sequences are its."""

    sequences: tuple[int, ...]
    """Indices into all sequences of the step, in the order of its segments."""
    rewards: tuple[float, ...]
    """What each turn earned."""
    truncated: bool
    """A limit cut it off; otherwise it came to an end."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenCredit:
    """What follows for the sampled tokens of an episode; (P,) each."""

    advantages: Floats
    """Of each token."""
    returns: Floats
    """What the value before each token is trained towards; 0.0 where it is not."""
    valued: Floats
    """1.0 where the value before the token is trained."""


def episode_rewards(turn_rewards: Sequence[float], reward: float, turns: int) -> tuple[float, ...]:
    """Return what each turn earned: its process reward, and the last one the episode's reward too."""
    earned = list(turn_rewards) if turn_rewards else [0.0] * turns
    if earned:
        earned[-1] += reward
    return tuple(earned)


def token_credit(episode: Episode, turns: Ints, values: Floats, final: float, rules: GaeRules) -> TokenCredit:
    """Return the credit of an episode's sampled tokens.

    Args:
        episode: what was earned.
        turns: the turn of each sampled token, rising, (P,) with P > 0.
        values: value of what was there before each of them, (P,).
        final: value of the end of the record.
        rules: how credit is given.
    """
    acting, starts, which = np.unique(turns, return_index=True, return_inverse=True)
    ends = np.append(starts[1:], len(turns)) - 1
    earned = _earned(episode.rewards, acting)
    beyond = final if episode.truncated and rules.bootstrap else 0.0
    count = len(turns)
    if rules.credit == "turn":
        worth = np.asarray(values[starts], dtype=np.float64)
        every = np.ones(len(acting))
        of_turns = gae(earned, worth, beyond, rules.gamma * every, rules.lam * every)
        returns, valued = np.zeros(count), np.zeros(count)
        returns[starts], valued[starts] = of_turns + worth, 1.0
        return _rounded(of_turns[which], returns, valued)
    rewards, gammas, lambdas = np.zeros(count), np.ones(count), np.ones(count)
    rewards[ends], gammas[ends], lambdas[ends] = earned, rules.gamma, rules.lam
    advantages = gae(rewards, values, beyond, gammas, lambdas)
    return _rounded(advantages, advantages + values, np.ones(count))


def gae(rewards: npt.ArrayLike, values: npt.ArrayLike, beyond: float, gammas: Doubles, lambdas: Doubles) -> Doubles:
    """Return the advantage of each step of an episode, (T,).

    Args:
        rewards: earned by each step, (T,).
        values: of the state before each step, (T,).
        beyond: value of the state after the last step.
        gammas: discount from each step to the next, (T,).
        lambdas: weight of what follows each step, (T,).
    """
    worth = np.append(np.asarray(values, dtype=np.float64), beyond)
    deltas = np.asarray(rewards, dtype=np.float64) + gammas * worth[1:] - worth[:-1]
    advantages = np.zeros(len(deltas))
    following = 0.0
    for t in reversed(range(len(deltas))):
        following = deltas[t] + gammas[t] * lambdas[t] * following
        advantages[t] = following
    return advantages


def _earned(rewards: Sequence[float], acting: Ints) -> Doubles:
    """Return what each turn with a sampled token earned, with that of the turns without one that follow it."""
    at = np.searchsorted(acting, np.arange(len(rewards)), side="right") - 1
    earned = np.zeros(len(acting))
    np.add.at(earned, np.maximum(at, 0), np.asarray(rewards, dtype=np.float64))
    return earned


def _rounded(advantages: Doubles, returns: Doubles, valued: Doubles) -> TokenCredit:
    return TokenCredit(
        advantages=advantages.astype(np.float32),
        returns=returns.astype(np.float32),
        valued=valued.astype(np.float32),
    )
