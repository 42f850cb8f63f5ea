"""How much an episode repeats itself: n-grams of its sampled tokens that occurred in it before (Welleck et al. 2020).

    repetition = 1 - distinct n-grams / n-grams

The sampled tokens of all turns are taken one behind the other, so both an answer that stutters and an action that is
done again and again count. What the environment says is left out: a policy is not to blame for it. Pure; a policy that
turns in circles need not be wrong (a long corridor is walked step by step), so what is too much is the run's to say.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from schemas.transcript import TokenIds, Transcript


def mean_repetition(transcripts: Iterable[Transcript | None], n: int) -> float:
    """Return the mean over episodes that have an n-gram; 0 if none has.

    Args:
        transcripts: the token records, where there are any.
        n: tokens of an n-gram.
    """
    found = [repetition(one.token_ids[one.mask_array == 1], n) for one in transcripts if one is not None]
    known = [share for share in found if share is not None]
    return sum(known) / len(known) if known else 0.0


def repetition(tokens: TokenIds, n: int) -> float | None:
    """Return the share of the n-grams of some tokens that occurred before; none if there is no n-gram."""
    if len(tokens) < n:
        return None
    grams = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(tokens, n))
    # One opaque value per n-gram: sorting those is much faster than sorting rows.
    values = grams.view(np.dtype((np.void, grams.itemsize * n)))
    return 1 - len(np.unique(values)) / len(values)
