"""The three stages with simulated work: `python -m benchmarks.simulated init|run|eval`, a process each.

Everything around the handlers is the product: process, member, middleware, topics, messages. The handlers wait for as
long as the task's payload says (`init_s`, `run_s`, `eval_s`; 0 is no wait at all) and make real messages: an Episode, a
Rollout with a valid transcript of `tokens` tokens, a graded Trajectory. There is no environment host and no policy.
RUN notes in the verdict when it took the task, so that the log alone tells how busy it was.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click
import numpy as np

from infra.clock import Clock
from infra.inference.base import PROCESSED_LOGPROBS
from infra.stage import Done, Member
from schemas import transcript
from schemas.messages import Episode, Rollout, Task, Trajectory
from schemas.outcome import Completed, StopReason
from schemas.transcript import SampledSpan, Transcript, Turn, pack_logprobs, pack_tokens
from stages.process import Surroundings, stage_command
from stages.wiring import eval_stage, init_stage, run_stage

FAMILY = "simulated"
"""Family of the tasks; no handler of the registry has this name."""

PROMPT_TOKENS = 8
"""Tokens of the transcript that were not sampled."""


class Simulated:
    """The handlers of the three stages."""

    def __init__(self, clock: Clock, worker: str) -> None:
        self._clock = clock
        self._worker = worker

    async def init(self, task: Task) -> Done[Episode]:
        """Wait as INIT waits for an environment."""
        await self._wait(task, "init_s")
        messages = ({"role": "user", "content": "go"},)
        return Done(Episode(task=task, host="simulated", lease=f"{task.group}/{task.sample}", messages=messages))

    async def run(self, episode: Episode) -> Done[Rollout]:
        """Wait as RUN waits for a policy and an environment."""
        began_ms = self._clock.now_ms()
        await self._wait(episode.task, "run_s")
        return Done(
            Rollout(
                task=episode.task,
                transcript=made_transcript(episode.task.payload["tokens"]),
                verdict={"began_ms": began_ms},
                stop=StopReason.DONE,
                backend="simulated",
                worker=self._worker,
                tokenizer_digest="",
            )
        )

    async def eval(self, rollout: Rollout) -> Done[Trajectory]:
        """Wait as EVAL waits for a grader."""
        await self._wait(rollout.task, "eval_s")
        return Done(
            Trajectory(
                task=rollout.task,
                outcome=Completed(components={"done": 1.0}, reward=1.0, success=1.0, truncated=False),
                transcript=rollout.transcript,
                verdict=rollout.verdict,
                stop=rollout.stop,
                backend=rollout.backend,
                stage="eval",
            )
        )

    async def _wait(self, task: Task, stage: str) -> None:
        seconds: Any = task.payload[stage]
        if seconds > 0:
            await self._clock.sleep(seconds)


@functools.cache
def made_transcript(tokens: int) -> Transcript:
    """Return a valid transcript: one turn, a short prompt, the rest sampled."""
    total = max(tokens, PROMPT_TOKENS + 1)
    sampled = np.arange(total) >= PROMPT_TOKENS
    turn = Turn(
        start=0,
        sampled=PROMPT_TOKENS,
        stop=total,
        valid=True,
        action="go",
        finish="stop",
        began_ms=0,
        generated_ms=0,
        ended_ms=0,
    )
    span = SampledSpan(
        start=PROMPT_TOKENS,
        stop=total,
        version=0,
        sampling=transcript.Sampling(),
        dtype="float32",
        logprobs_mode=PROCESSED_LOGPROBS,
    )
    made = Transcript(
        tokens=pack_tokens(np.arange(total) % 1000),
        mask=sampled.astype(np.uint8).tobytes(),
        logprobs=pack_logprobs(np.where(sampled, -0.5, 0.0)),
        spans=(span,),
        turns=(turn,),
    )
    transcript.check(made)
    return made


@asynccontextmanager
async def init_member(around: Surroundings) -> AsyncIterator[Member]:
    """Give one INIT member."""
    stage = init_stage(Simulated(around.clock, around.worker).init)
    yield around.member(stage, around.config.init, first=True)


@asynccontextmanager
async def run_member(around: Surroundings) -> AsyncIterator[Member]:
    """Give one RUN member."""
    yield around.member(run_stage(Simulated(around.clock, around.worker).run), around.config.run)


@asynccontextmanager
async def eval_member(around: Surroundings) -> AsyncIterator[Member]:
    """Give one EVAL member."""
    yield around.member(eval_stage(Simulated(around.clock, around.worker).eval), around.config.eval)


command = click.Group(
    commands=[
        stage_command("init", init_member),
        stage_command("run", run_member),
        stage_command("eval", eval_member),
    ]
)

if __name__ == "__main__":
    command()
