"""Groups of siblings as a reader hands them out, with token records of all lengths and some without a reward."""

from __future__ import annotations

import numpy as np

from schemas.grouping import Grouping
from schemas.messages import Task, Trajectory
from schemas.outcome import Boundary, Completed, Failed, FailureKind
from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, check, pack_logprobs, pack_tokens

VOCABULARY = 50


def made_up_groups(count=5, siblings=4, seed=0):
    """Return groups with rewards that are multiples of 1/8; one sibling in six has none."""
    draw = np.random.default_rng(seed)
    grouping, found = Grouping(0), []
    for offset in range(count * siblings):
        number, sample = divmod(offset, siblings)
        # Two siblings at least are graded: otherwise there is nothing to compare.
        failed = sample > 1 and draw.random() < 1 / 6
        _, group = grouping.feed(
            offset, failure(number, sample, siblings) if failed else graded(number, sample, siblings, draw)
        )
        if group is not None:
            found.append(group)
    return found


def task(number, sample, samples):
    return Task(
        run="r",
        group=f"g{number}",
        sample=sample,
        samples=samples,
        source="made up",
        row=number,
        payload={},
        payload_digest=f"digest-{number}",
        family="doors",
        seed=number,
        start_by_ms=0,
    )


def graded(number, sample, samples, draw, *, turns=None):
    """Return a trajectory of one to four turns, with what the environment said last behind them."""
    turns = int(draw.integers(1, 5)) if turns is None else turns
    record = transcript([(int(draw.integers(1, 6)), int(draw.integers(1, 7))) for _ in range(turns)], draw)
    reward = int(draw.integers(-8, 9)) / 8
    outcome = Completed(
        components={"done": reward},
        reward=reward,
        success=float(reward > 0),
        truncated=bool(draw.random() < 0.3),
        turn_rewards=tuple(int(draw.integers(-4, 5)) / 4 for _ in range(turns)),
    )
    return Trajectory(task=task(number, sample, samples), outcome=outcome, transcript=record, verdict={}, stage="eval")


def failure(number, sample, samples):
    outcome = Failed(kind=FailureKind.INFRASTRUCTURE, boundary=Boundary.ENVIRONMENT, cause="made up")
    return Trajectory(task=task(number, sample, samples), outcome=outcome, stage="run")


def transcript(lengths, draw, *, behind=3):
    """Return a record of turns with (prompt, answer) tokens each."""
    mask, turns, spans = [], [], []
    for version, (prompt, answer) in enumerate(lengths):
        start, sampled = len(mask), len(mask) + prompt
        mask += [0] * prompt + [1] * answer
        turns.append(
            Turn(
                start=start,
                sampled=sampled,
                stop=len(mask),
                valid=True,
                action="go",
                finish="stop",
                began_ms=0,
                generated_ms=0,
                ended_ms=0,
            )
        )
        if not answer:
            continue
        spans.append(
            SampledSpan(
                start=sampled,
                stop=len(mask),
                version=version,
                sampling=Sampling(),
                dtype="float32",
                logprobs_mode="processed_logprobs",
            )
        )
    mask += [0] * behind
    found = Transcript(
        tokens=pack_tokens(draw.integers(1, VOCABULARY, len(mask))),
        mask=bytes(mask),
        logprobs=pack_logprobs(np.where(mask, draw.normal(-2, 0.5, len(mask)), 0.0)),
        spans=tuple(spans),
        turns=tuple(turns),
    )
    check(found)
    return found
