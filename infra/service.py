"""What every service process does around its work: logging, signals, an exit code.

SIGTERM and SIGINT ask the service to stop; a second one cancels it. An expected error ends the process with its text
and code 1, without a trace.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from infra.disk import described, is_full
from infra.errors import RollmillError

YOUNG_OBJECTS = 5_000
"""The collector looks for circles once so many more objects were made than freed: 64 records in work are more than the
700 of Python's default, so it looked again and again at what was about to go by itself."""

Stop = Callable[[], None]

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, as shells have it."""


_LIFE = secrets.token_hex(2)
"""Tells this process from any other that has its number on a host of its name."""


def worker_name(service: str) -> str:
    """Return this process's name in events and records.

    It is no other process's: in a container that is started again host and process number are those of before, and
    what the new one writes to `control` must not take the place of what the old one said.
    """
    return f"{name_begin(service, os.getpid())}{_LIFE}@{socket.gethostname()}"


def name_begin(service: str, pid: int) -> str:
    """Return what the name of a process of this host begins with, for whoever started it."""
    return f"{service}-{pid}."


def set_up_logging(level: str = "INFO") -> None:
    """Log to standard error, one line each, with time and module."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Each rebalance and each failed reconnect writes several lines there; what matters comes as an error of ours.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


async def until_stopped(work: Awaitable[None], stop: Stop | None = None) -> None:
    """Do the work until it ends or a signal arrives.

    Args:
        work: what the service does.
        stop: called at the first signal; without it, or at the second signal, the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if stop is None or asked:
            task.cancel()
        else:
            stop()
        asked = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def run_service(
    main: Callable[[], Coroutine[Any, Any, None]], *, codes: Mapping[type[RollmillError], int] | None = None
) -> int:
    """Run a service's main coroutine and return the process's exit code.

    Args:
        main: what the process does.
        codes: exit codes of some errors; all others of ours end with 1.
    """
    # What is loaded by now stays for the life of the process: the collector need not walk over it again and again.
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    try:
        asyncio.run(main())
    except RollmillError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the last word of a process goes to its terminal
        return next((code for kind, code in (codes or {}).items() if isinstance(error, kind)), 1)
    except OSError as error:
        if not is_full(error):
            raise
        print(f"error: {described(error)}", file=sys.stderr)  # noqa: T201 - as above
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED  # before the service took over the signals: nothing was begun
    return 0
