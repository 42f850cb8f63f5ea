"""What is told of a run beside its log: rollouts of some steps as text, and figures for other programs.

It never changes what is trained, nor how fast: the work is done in a thread of its own, behind the step, and what goes
wrong with it is said once and ends that part of it. A trainer that cannot keep up telling leaves steps out. What is
told of a step that is made again is the same, so its text is written over the one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from schemas.telemetry import MetricPoint
from schemas.transcript import TokenIds
from trainer.config import RunConfig, WriterName
from trainer.groups import Step
from trainer.rollout_page import PRINTED_CHARACTERS, page, picks
from trainer.writers import WRITERS, Opening, Writer, figures, require

log = logging.getLogger(__name__)

PENDING_ROLLOUTS = 8
"""Most steps whose rollouts wait to be written: each holds its token records."""

PENDING_FIGURES = 10_000
"""Most steps whose figures wait for a writer."""

CLOSE_S = 10.0
"""A trainer that ends waits so long for what is still to be told, seconds."""


class Report:
    """Tells of one run by one trainer."""

    def __init__(
        self,
        config: RunConfig,
        say: Callable[[str], None],
        writers: Mapping[WriterName, tuple[str, Opening]] = WRITERS,
    ) -> None:
        """Set up.

        Args:
            config: the run.
            say: takes the text that a person at a terminal is shown.
            writers: those that there are.

        Raises:
            ConfigError: a writer's package is missing.
        """
        require(config.report.writers, writers)
        self._known = writers
        self._config = config
        self._every = config.report.rollouts_every
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._working: set[asyncio.Future[None]] = set()
        self._pending: Counter[str] = Counter()
        self._broken: set[str] = set()
        self._writers: dict[WriterName, Writer] = {}
        self._tokenizer: Tokenizer | None = None

    def begin(self, after: int, branch: int) -> None:
        """Open the writers.

        Args:
            after: step behind which the run goes on.
            branch: how often it went back to an earlier step.
        """
        for name in self._config.report.writers:
            self._begin(name, PENDING_FIGURES, partial(self._open, name, after, branch))

    def step(self, step: Step, points: Sequence[MetricPoint]) -> None:
        """Tell of a step that was made: its token records, and its figures."""
        if self._every is not None and step.number % self._every == 0:
            self._begin("rollouts", PENDING_ROLLOUTS, lambda: self._rollouts(step))
        self.figures("step", points)

    def figures(self, stream: str, points: Sequence[MetricPoint]) -> None:
        """Tell the figures of one step, or of its evaluation."""
        for name in self._config.report.writers:
            self._begin(name, PENDING_FIGURES, partial(self._write, name, stream, points))

    async def close(self) -> None:
        """Let what is still to be told be told, within CLOSE_S."""
        for name in self._config.report.writers:
            self._begin(name, PENDING_FIGURES, partial(self._end, name))
        if self._working:
            await asyncio.wait(set(self._working), timeout=CLOSE_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, part: str, most: int, work: Callable[[], str | None]) -> None:
        """Do some work in the thread, unless `most` of its kind wait there, and print what it returns."""
        if part in self._broken:
            return
        if self._pending[part] >= most:
            log.warning("run %s: %d steps wait for %s, this one is left out", self._config.run, most, part)
            return
        self._pending[part] += 1
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._work, part, work, loop)
        self._working.add(future)
        future.add_done_callback(partial(self._done, part))

    def _done(self, part: str, future: asyncio.Future[None]) -> None:
        self._working.discard(future)
        self._pending[part] -= 1

    def _work(self, part: str, work: Callable[[], str | None], loop: asyncio.AbstractEventLoop) -> None:
        """Do some work; what fails is not tried again."""
        if part in self._broken:
            return
        try:
            text = work()
        except Exception as error:  # noqa: BLE001 - a full disk or a foreign library must not end a run of days
            self._broken.add(part)
            log.warning("run %s goes on without %s: %s", self._config.run, part, error)
            return
        if text is not None:
            loop.call_soon_threadsafe(self._say, text)

    def _open(self, name: WriterName, after: int, branch: int) -> None:
        _, opening = self._known[name]
        self._writers[name] = opening(self._config, after, branch)

    def _write(self, name: WriterName, stream: str, points: Sequence[MetricPoint]) -> None:
        if points and name in self._writers:
            self._writers[name].write(stream, points[0].step, figures(points), points[0].at_ms)

    def _end(self, name: WriterName) -> None:
        if name in self._writers:
            self._writers.pop(name).close()

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
