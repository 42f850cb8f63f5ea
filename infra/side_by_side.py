"""Work side by side: what breaks ends the rest, and its error leaves as it is.

asyncio's TaskGroup ends the others, too, but gives its errors as a group. Who waits for a BusError would not catch it
then, nor would a service end with its text (`service.run_service`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any


def first_error(several: BaseExceptionGroup) -> BaseException:
    """Return the first error in a group, whatever groups it lies in: the others followed, or tell the same."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def alongside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do some work while the block runs; the block's end cancels it, and its error cancels the block and leaves it."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            yield
            task.cancel()
    except BaseExceptionGroup as several:
        error = first_error(several)
        raise error from error.__cause__


async def together(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Do all of it and return once it is done; the first error cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as several:
        error = first_error(several)
        raise error from error.__cause__
