"""What is told of a run beside its log: rollouts of some steps as text, and figures for other programs.

It never changes what is trained, nor how fast: the work is done in a thread of its own, behind the step, and what goes
wrong with it is said once and ends that part of it. A trainer that cannot keep up telling leaves steps out. What is
told of a step that is made again is the same, so its text is written over the one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from schemas.transcript import TokenIds
from trainer.config import RunConfig
from trainer.groups import Step
from trainer.rollout_page import PRINTED_CHARACTERS, page, picks

log = logging.getLogger(__name__)

PENDING = 8
"""Most steps that wait to be told: each holds its token records."""

CLOSE_S = 10.0
"""A trainer that ends waits so long for what is still to be told, seconds."""


class Report:
    """Tells of one run by one trainer."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        """Set up.

        Args:
            config: the run.
            say: takes the text that a person at a terminal is shown.
        """
        self._config = config
        self._every = config.report.rollouts_every
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: set[str] = set()
        self._tokenizer: Tokenizer | None = None

    def step(self, step: Step) -> None:
        """Tell of a step that was made, with its token records."""
        if self._every is not None and step.number % self._every == 0:
            self._begin("rollouts", lambda: self._rollouts(step), self._say)

    async def close(self) -> None:
        """Let what is still to be told be told, within CLOSE_S."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, part: str, work: Callable[[], str], then: Callable[[str], None]) -> None:
        if part in self._broken:
            return
        if len(self._tasks) >= PENDING:
            log.warning("run %s: %d steps wait to be told, this one is left out of %s", self._config.run, PENDING, part)
            return
        task = asyncio.create_task(self._tell(part, work, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, part: str, work: Callable[[], str], then: Callable[[str], None]) -> None:
        try:
            then(await asyncio.get_running_loop().run_in_executor(self._thread, work))
        except Exception as error:  # noqa: BLE001 - a full disk or a foreign library must not end a run of days
            if part not in self._broken:
                self._broken.add(part)
                log.warning("run %s goes on without its %s: %s", self._config.run, part, error)

    def _rollouts(self, step: Step) -> str:
        """Write some rollouts of a step, and return what a terminal is shown; blocking."""
        chosen = picks(step, self._config.seed)
        file = rollouts_file(self._config, step.number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(self._config.run, step.number, chosen, self._decode), encoding="utf-8")
        printed = page(self._config.run, step.number, chosen, self._decode, PRINTED_CHARACTERS)
        return f"{printed}in full: {file}"

    def _decode(self, ids: TokenIds) -> str:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self._config.model / "tokenizer.json"))
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text


def rollouts_file(config: RunConfig, step: int) -> Path:
    """Return where rollouts of a step are written."""
    return config.rollouts_directory / f"step-{step:06d}.txt"
