"""Sampled tokens per second of the local policy server, and of what transformers offers beside it.

The demo's model, on one thread of torch on every side, float32, at temperature 1; our client, and the HTTP between,
are a process of their own, which the rivals have not. `ours` is a process of the product's
server, asked over HTTP by 64 episodes at once: each has TURNS turns, and every prompt holds all tokens before it. The
first rival makes one `generate` call per request, one after the other, as a server without batching does; so it has to
compute the same prompts and as many tokens, and is given the same episodes (fewer of them: it is a rate). The second
rival is one `generate` call for a batch of 64 prompts of equal length, which is the best that `generate` can do, since
it pads nothing and waits for nobody; ours samples the same prompts for that comparison, one turn each.

Every answer has the same length on every side: no id stops it. Sides are measured in turns.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.result import Result
from benchmarks.rounds import interleaved
from infra.errors import ServiceError, WaitTimeout
from infra.inference.vllm import VllmClient
from schemas.transcript import Sampling
from stages.handlers.keydoor import WORDS
from trainer.models import create_wordlevel_model

SEED = 11
"""Of the weights and the prompts."""

EPISODES = 64
"""Episodes at once; and prompts of the batch."""

ALONE = {True: 4, False: 16}
"""Quick or not -> episodes of the first rival in a round."""

TURNS = 6
"""Turns of an episode."""

OPENING, OBSERVATION, ANSWER = 60, 24, 8
"""Tokens of an episode's first prompt, of what each turn adds to it, and of an answer."""

BATCH_PROMPT, BATCH_ANSWER = 120, 32
"""Tokens of the prompts and answers that are compared with batched `generate`."""

START_S = 60.0
"""Longest wait for the server, seconds."""

SAYS = "policy at "
"""What the server prints before its address."""


@dataclass
class Sides:
    """What is measured, and with what."""

    client: VllmClient
    model: PreTrainedModel
    vocabulary: int
    quick: bool

    def draw(self, number: int, *, equal: bool = False) -> np.random.Generator:
        """Return the source of a round's prompts; the round that warms up is -1.

        Those of equal length share nothing with the others: no side finds in a cache what another one has to compute.
        """
        return np.random.default_rng([SEED, number + 1, equal])

    async def ours(self, number: int) -> float:
        """Return the tokens per second of all episodes at the server."""
        draw = self.draw(number)
        openings = [self._ids(draw, OPENING) for _ in range(EPISODES)]
        added = [[self._ids(draw, OBSERVATION) for _ in range(TURNS)] for _ in range(EPISODES)]
        began = time.perf_counter()
        pairs = enumerate(zip(openings, added, strict=True))
        await asyncio.gather(*(self._episode(f"{number}/{at}", *pair) for at, pair in pairs))
        return EPISODES * TURNS * ANSWER / (time.perf_counter() - began)

    async def _episode(self, name: str, opening: list[int], added: list[list[int]]) -> None:
        prompt = list(opening)
        for turn, observation in enumerate(added):
            prompt += await self._sampled(prompt, f"{name}/{turn}", turn, ANSWER)
            prompt += observation

    async def _sampled(self, prompt: list[int], name: str, seed: int, tokens: int) -> list[int]:
        answer = await self.client.generate(prompt, Sampling(max_tokens=tokens), seed=seed, request_id=name)
        ids: list[int] = answer.token_ids.tolist()
        assert len(ids) == tokens, "nothing stops an answer"
        return ids

    async def alone(self, number: int) -> float:
        """Return the tokens per second of a call of `generate` for each request."""
        draw, episodes = self.draw(number), ALONE[self.quick]
        began = time.perf_counter()
        for _ in range(episodes):
            prompt = self._ids(draw, OPENING)
            for _turn in range(TURNS):
                prompt = self._generated(torch.tensor([prompt]), ANSWER)[0].tolist()
                prompt += self._ids(draw, OBSERVATION)
        return episodes * TURNS * ANSWER / (time.perf_counter() - began)

    async def ours_equal(self, number: int) -> float:
        """Return the tokens per second of prompts of equal length at the server."""
        prompts = self._equal(number)
        began = time.perf_counter()
        await asyncio.gather(
            *(self._sampled(ids, f"equal/{number}/{at}", at, BATCH_ANSWER) for at, ids in enumerate(prompts))
        )
        return EPISODES * BATCH_ANSWER / (time.perf_counter() - began)

    async def batched(self, number: int) -> float:
        """Return the tokens per second of one call of `generate` for all of those."""
        prompts = torch.tensor(self._equal(number))
        began = time.perf_counter()
        self._generated(prompts, BATCH_ANSWER)
        return EPISODES * BATCH_ANSWER / (time.perf_counter() - began)

    def _equal(self, number: int) -> list[list[int]]:
        draw = self.draw(number, equal=True)
        return [self._ids(draw, BATCH_PROMPT) for _ in range(EPISODES)]

    def _generated(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self.model.generate(  # type: ignore[operator]
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        return found

    def _ids(self, draw: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = draw.integers(0, self.vocabulary, count).tolist()
        return ids


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[VllmClient]:
    """Run the product's server as a process of its own; gives its client."""
    command = ("-m", "rollmill", "policy", "serve", "--model", str(model), "--port", "0", "--threads", "1")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=subprocess.PIPE)
    try:
        async with VllmClient(await _address(process)) as client:
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Return where the server listens, as it says once it does. Raises WaitTimeout."""
    assert process.stdout is not None, "it is piped"
    try:
        async with asyncio.timeout(START_S):
            said = (await process.stdout.readline()).decode()
    except TimeoutError as error:
        raise WaitTimeout(f"waited {START_S:g} s for the policy server to listen") from error
    if not said.startswith(SAYS):
        raise ServiceError(f"the policy server said {said!r} and did not listen")
    return said.removeprefix(SAYS).strip()


def measure(*, quick: bool) -> Result:
    """Measure the server."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        return asyncio.run(_measure(Path(folder) / "model", quick=quick))


async def _measure(directory: Path, *, quick: bool) -> Result:
    create_wordlevel_model(directory, seed=SEED, words=WORDS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    async with served(directory) as client:
        sides = Sides(client, model, model.config.vocab_size, quick)
        measured = {"ours": sides.ours, "alone": sides.alone, "ours_equal": sides.ours_equal, "batched": sides.batched}
        for side in measured.values():
            await side(-1)
        figures = await interleaved(measured, rounds=3 if quick else 9)
    ours, alone, equal, batched = (figures[name] for name in measured)
    return Result(
        name="serve",
        ours=ours.median,
        rival=alone.median,
        unit="sampled tokens/s",
        ratio=ours.median / alone.median,
        detail={
            "batched_generate": {
                "ratio": equal.median / batched.median,
                "ours": equal.median,
                "rival": batched.median,
                "spread": {"ours": equal.spread(), "rival": batched.spread()},
            },
            "episodes": EPISODES,
            "turns": TURNS,
            "threads": 1,
            "spread": {"ours": ours.spread(), "rival": alone.spread()},
        },
    )
