"""Where an answer ends by its own ids: at a stop sequence, or in a loop.

Both are stopping rules of the ids sampled so far alone, so what stands before the end has the distribution that it was
sampled from, whether the engine stopped there by itself or sampled on and was cut. That makes engines alike: one that
knows a rule saves the tokens behind the end, one that does not loses them in `cut`. A loop is what vLLM calls so
(`repetition_detection`): the last `min_count * p` ids are one pattern of p ids, for any p that is looked for.

`ending` asks after each token, `cut` looks through a whole answer; they agree. This file does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from infra.inference.base import FinishReason, Generation, VersionSpan
from schemas.transcript import Repetition, Sampling, TokenIds

End = Literal["stop_sequence", "repetition"]
"""By which rule."""


def ending(ids: Sequence[int], sampling: Sampling) -> End | None:
    """Return the rule by which an answer ends with its last id; None if it goes on."""
    for sequence in sampling.stop_sequences:
        if ids[-1] == sequence[-1] and tuple(ids[-len(sequence) :]) == sequence:
            return "stop_sequence"
    if sampling.repetition is not None and _loops(ids, sampling.repetition):
        return "repetition"
    return None


def _loops(ids: Sequence[int], rule: Repetition) -> bool:
    last, count = ids[-1], len(ids)
    for size in range(rule.min_pattern_size, min(rule.max_pattern_size, count // rule.min_count) + 1):
        # The last id again, one pattern before: mostly it is another one, and nothing needs to be copied.
        if ids[-1 - size] == last:
            tail = ids[count - size * rule.min_count :]
            if tail[size:] == tail[:-size]:
                return True
    return False


def cut(answer: Generation, sampling: Sampling, stop_token_ids: Sequence[int]) -> Generation:
    """Return an answer up to where a rule ends it, with that as its reason; the same answer if none does.

    Args:
        answer: what an engine sampled.
        sampling: with the rules.
        stop_token_ids: ids that end an answer anyway.
    """
    ends: list[tuple[int, End]] = [
        (stop, "stop_sequence")
        for sequence in sampling.stop_sequences
        if (stop := _first_stop(answer.token_ids, sequence)) is not None
    ]
    if sampling.repetition is not None and (stop := _first_loop(answer.token_ids, sampling.repetition)) is not None:
        ends.append((stop, "repetition"))
    if not ends:
        return answer
    # Where both end it, the sequence does: `ending` looks for those first.
    stop, reason = min(ends, key=lambda end: (end[0], end[1] == "repetition"))
    if stop == len(answer.token_ids) and answer.token_ids[-1] in stop_token_ids:
        return answer  # as `ending` is asked only where no stop id has ended the answer
    return shortened(answer, stop, reason)


def shortened(answer: Generation, stop: int, reason: FinishReason) -> Generation:
    """Return the first tokens of an answer, as what ended there for this reason."""
    return replace(
        answer,
        token_ids=answer.token_ids[:stop],
        logprobs=answer.logprobs[:stop],
        finish_reason=reason,
        versions=tuple(
            VersionSpan(start=span.start, stop=min(span.stop, stop), version=span.version, run=span.run)
            for span in answer.versions
            if span.start < stop
        ),
    )


def _first_stop(ids: TokenIds, sequence: Sequence[int]) -> int | None:
    """Return the index after the first place where the sequence stands."""
    if len(ids) < len(sequence):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(sequence))
    return _after_first(np.all(windows == np.array(sequence), axis=1), len(sequence))


def _first_loop(ids: TokenIds, rule: Repetition) -> int | None:
    """Return the index after the id that completes the first loop."""
    ends: list[int] = []
    for size in range(rule.min_pattern_size, min(rule.max_pattern_size, len(ids) // rule.min_count) + 1):
        again = ids[size:] == ids[:-size]
        # A loop is (min_count - 1) patterns of ids in a row that are each the id one pattern before.
        needed = size * (rule.min_count - 1)
        sums = np.concatenate(([0], np.cumsum(again)))
        stop = _after_first(sums[needed:] - sums[:-needed] == needed, needed)
        if stop is not None:
            ends.append(stop + size)
    return min(ends, default=None)


def _after_first(found: npt.NDArray[np.bool_], length: int) -> int | None:
    """Return the index after what begins at the first place that was found."""
    first = int(found.argmax()) if found.size else 0
    return first + length if found.size and found[first] else None
