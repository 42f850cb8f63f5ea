"""The one thread that touches the model: everything heavy and blocking of a trainer runs here, in order.

The log's connection lives on meanwhile. A cancelled run waits for the thread, which gives up between two passes, and
never leaves it writing beside a successor. What the work is, is not known here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from trainer.learner import Interrupted

T = TypeVar("T")


class LearnerThread:
    """Runs blocking work, one piece at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._given_up = threading.Event()

    def given_up(self) -> bool:
        """Tell whether the run was cancelled: asked by the work between two passes."""
        return self._given_up.is_set()

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work, and never leave it running behind."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._given_up.set()
            await asyncio.wait({future})
            with suppress(Interrupted):
                await future
            raise

    def close(self) -> None:
        """Take no more work."""
        self._thread.shutdown(wait=False)
