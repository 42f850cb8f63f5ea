"""A disk that takes no more, told in one way: what was to be written where, how much is free there, what to do.

The system's own words name neither the file (a `write` does not know it) nor the place to look at. Whoever writes what
somebody will miss does it in `room_for`; `described` says what can be said of an error that comes from anywhere else.
Nothing is waited for here: whoever supervises a service starts it again, and it goes on once there is room.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import ServiceError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a disk says that takes no more: it is full, a quota is used up, a file may not grow (`ulimit -f`)."""

ADVICE = "make room there (or raise the quota, or `ulimit -f`)"
"""What to do about it."""


class NoSpace(ServiceError):
    """A disk takes no more."""


def is_full(error: BaseException) -> bool:
    """Tell whether an error says that a disk takes no more."""
    return isinstance(error, OSError) and error.errno in FULL


@contextmanager
def room_for(what: str, path: Path, *, then: str) -> Iterator[None]:
    """Turn a full disk that is met in the block into a NoSpace.

    Args:
        what: what is written, such as `the checkpoint of step 4`.
        path: where it is written to.
        then: what has become of it, and how things go on once there is room.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise NoSpace(f"writing {what} to {path}: {_found(error, path)}; {ADVICE}. {then}") from error


def described(error: OSError, places: Iterable[Path] = ()) -> str:
    """Return what a person is told of an error of a disk that nothing more is known of.

    Args:
        error: the error.
        places: where the program writes, to be named if one of them is full.
    """
    name = error.filename if isinstance(error.filename, str) else None
    text = f"{error.strerror or error}: {name}" if name else str(error.strerror or error)
    if not is_full(error):
        return text
    looked_at = [Path(name)] if name else [*places, Path.cwd(), Path(tempfile.gettempdir())]
    free = ", ".join(f"{_free(path)} in {path}" for path in dict.fromkeys(looked_at))
    return f"{text} ({free}); {ADVICE} and call it again: nothing that was written down is lost"


def _found(error: OSError, path: Path) -> str:
    return f"{error.strerror or error}, {_free(path)}"


def _free(path: Path) -> str:
    """Return how much is free where a path is, or will be."""
    for place in (path, *path.absolute().parents):
        try:
            return f"{shutil.disk_usage(place).free / 1e6:.0f} MB are free"
        except OSError:
            continue
    return "nobody knows how much is free"
