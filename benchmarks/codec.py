"""A long trajectory to bytes and back: ours, and the same as msgpack lists.

One trajectory of 32k tokens with a log-prob and a mask entry each, as the trainer reads it: encoded by `schemas/codec`,
decoded, and its arrays taken. The rival writes the three sequences as what msgpack has without further thought, lists
of integers and of 64-bit floats, and makes arrays of what it reads, since that is what is computed with. Neither side
compresses. A round is a number of pairs of encoding and decoding; what comes back must be what went in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgpack
import numpy as np

from benchmarks.result import Result
from benchmarks.rounds import interleaved
from benchmarks.work import make_tasks
from schemas import codec
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.transcript import LogProbs, SampledSpan, Sampling, TokenIds, Transcript, Turn, pack_logprobs, pack_tokens

TOKENS = 32_768
"""Tokens of the trajectory."""

SEED = 7
"""Of its content."""

VOCABULARY = 151_936
"""Ids are drawn below this: as many as Qwen's tokenizer has."""

TURN = 1024
"""Tokens of a turn, half of them sampled: 32k tokens over the 30 turns of AgentGym-RL."""

PAIRS = {"ours": 40, "rival": 4}
"""Side -> pairs of encoding and decoding in a round."""


class Arrays(NamedTuple):
    """What is computed with; all of shape (TOKENS,)."""

    tokens: TokenIds
    """int32."""
    logprobs: LogProbs
    """float32; 0 where nothing was sampled."""
    mask: np.ndarray
    """uint8: 1 where the policy sampled."""


def made() -> Arrays:
    """Return the content of the trajectory."""
    draw = np.random.default_rng(SEED)
    mask = (np.arange(TOKENS) % TURN >= TURN // 2).astype(np.uint8)
    logprobs = (-draw.exponential(1.0, TOKENS) * mask).astype(np.float32)
    return Arrays(draw.integers(0, VOCABULARY, TOKENS).astype(np.int32), logprobs, mask)


def trajectory_of(arrays: Arrays) -> Trajectory:
    """Return the arrays as a trajectory, with spans and turns."""
    starts = range(0, TOKENS, TURN)
    spans = tuple(
        SampledSpan(
            start=start + TURN // 2,
            stop=start + TURN,
            version=start // TURN,
            sampling=Sampling(),
            dtype="bfloat16",
            logprobs_mode="processed_logprobs",
        )
        for start in starts
    )
    turns = tuple(
        Turn(
            start=start,
            sampled=start + TURN // 2,
            stop=start + TURN,
            valid=True,
            action="go",
            finish="stop",
            began_ms=start,
            generated_ms=start,
            ended_ms=start,
        )
        for start in starts
    )
    transcript = Transcript(
        tokens=pack_tokens(arrays.tokens),
        mask=arrays.mask.tobytes(),
        logprobs=pack_logprobs(arrays.logprobs),
        spans=spans,
        turns=turns,
    )
    (task,) = make_tasks("codec", [{}], family="benchmarks")
    outcome = Completed(components={"success": 1.0}, reward=1.0, success=1.0, truncated=False)
    return Trajectory(task=task, outcome=outcome, stage="eval", transcript=transcript)


def ours_to_bytes(trajectory: Trajectory) -> bytes:
    """Encode as the product does."""
    return codec.encode(trajectory)


def ours_to_arrays(data: bytes) -> Arrays:
    """Decode as the trainer does."""
    found = codec.decode(data, Trajectory)
    assert found.transcript is not None, "it was given one"
    return Arrays(found.transcript.token_ids, found.transcript.logprob_array, found.transcript.mask_array)


def rival_to_bytes(arrays: Arrays) -> bytes:
    """Encode as lists."""
    lists = {"tokens": arrays.tokens.tolist(), "logprobs": arrays.logprobs.tolist(), "mask": arrays.mask.tolist()}
    packed: bytes = msgpack.packb(lists)
    return packed


def rival_to_arrays(data: bytes) -> Arrays:
    """Decode lists and make arrays of them."""
    found = msgpack.unpackb(data)
    return Arrays(
        np.array(found["tokens"], np.int32),
        np.array(found["logprobs"], np.float32),
        np.array(found["mask"], np.uint8),
    )


def measure(*, quick: bool) -> Result:
    """Measure the codec."""
    return asyncio.run(_measure(rounds=5 if quick else 15))


async def _measure(*, rounds: int) -> Result:
    arrays = made()
    trajectory = trajectory_of(arrays)
    pairs: dict[str, Callable[[], Arrays]] = {
        "ours": lambda: ours_to_arrays(ours_to_bytes(trajectory)),
        "rival": lambda: rival_to_arrays(rival_to_bytes(arrays)),
    }
    for side, pair in pairs.items():
        assert all(np.array_equal(a, b) for a, b in zip(pair(), arrays, strict=True)), f"{side} gives something else"

    async def per_second(side: str, _: int) -> float:
        began = time.perf_counter()
        for _pair in range(PAIRS[side]):
            pairs[side]()
        return PAIRS[side] / (time.perf_counter() - began)

    figures = await interleaved({side: partial(per_second, side) for side in pairs}, rounds=rounds)
    ours, rival = figures["ours"], figures["rival"]
    sizes = {"ours": len(ours_to_bytes(trajectory)), "rival": len(rival_to_bytes(arrays))}
    return Result(
        name="codec",
        ours=ours.median,
        rival=rival.median,
        unit="trajectories/s, encoded and decoded",
        ratio=ours.median / rival.median,
        detail={
            "bytes_ratio": sizes["ours"] / sizes["rival"],
            "bytes": sizes,
            "tokens": TOKENS,
            "spread": {"ours": ours.spread(), "rival": rival.spread()},
        },
    )
