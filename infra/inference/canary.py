"""A prompt whose log-probs under new weights are known: whoever brings weights into an engine asks it for them.

A file that is half there, a tensor in the wrong place or last week's directory load without an error, and sample
fluently. What the trainer's own forward pass says to fixed ids tells them apart from the weights that were announced.
Number formats move it by about a tenth of a nat in the mean (bfloat16 and int8, 135 million parameters), one lost layer
by half a nat or more; weights of the step before may be closer than either, and those are told by their label.

No engine, no torch: ids and arithmetic.
"""

from __future__ import annotations

import numpy as np

from schemas.control import Canary
from schemas.transcript import LogProbs, TokenIds, pack_logprobs, pack_tokens

CANARY_IDS = 32
"""Ids of the prompt."""

LIMIT_NATS = 0.3
"""Mean distance of log-probs from which on weights are taken to be others, nats."""


def canary_prompt(vocabulary: int, context: int | None) -> TokenIds:
    """Return the prompt, shape (n,), int32: any ids will do, the same ones for every version of a model.

    Args:
        vocabulary: number of ids that the model knows.
        context: most ids that it takes, with the one that an answer has at least; where that is known.
    """
    return np.random.default_rng(vocabulary).integers(
        vocabulary, size=CANARY_IDS if context is None else max(2, min(CANARY_IDS, context - 1)), dtype=np.int32
    )


def canary_of(prompt: TokenIds, logprobs: LogProbs) -> Canary:
    """Return what an engine is to be asked and what it has to answer."""
    return Canary(tokens=pack_tokens(prompt), logprobs=pack_logprobs(logprobs))


def apart(canary: Canary, found: LogProbs) -> float:
    """Return how far an engine's log-probs are from the expected ones, mean absolute nats; infinite if not comparable.

    Args:
        canary: the prompt of n ids.
        found: of each id behind the first one, shape (n - 1,).
    """
    expected = canary.expected
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).mean())
