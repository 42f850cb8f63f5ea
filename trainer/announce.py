"""Makes a step's weights known: a directory, then a decision, then the policy's control record.

Version numbers are never used twice for different weights: weights made again with the same digest keep their number,
others get the next one, and so does everything after a branch. The decision comes before the announcement, so that no
token carries a version that `decisions` does not map to its step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from infra.wire import Publisher
from schemas.control import Canary, PolicyVersion
from schemas.decisions import VersionPublished
from schemas.topics import CONTROL
from trainer.decision_log import DecisionLog
from trainer.weights import weights_digest, write_model_directory

ABANDONED_S = 3_600.0
"""What was begun so long ago and is not whole yet, nobody writes any more, seconds."""


class Announcer:
    """Publishes weight versions of one run."""

    def __init__(
        self,
        log: DecisionLog,
        publisher: Publisher,
        *,
        run: str,
        model: Path,
        directory: Path,
        keep: int,
        known: Iterable[VersionPublished],
        next_version: int,
    ) -> None:
        """Set up from what was announced before.

        Args:
            log: where versions are written down.
            publisher: for the control record.
            run: the run.
            model: the model directory whose other files every version carries.
            directory: where versions are written.
            keep: versions kept there.
            known: versions that keep their number when they are made again.
            next_version: the first number that was never used.
        """
        self._log = log
        self._publisher = publisher
        self._run = run
        self._model = model
        self._directory = directory
        self._keep = keep
        self._numbers = {(v.step, v.digest): v.version for v in known}
        self._next = next_version

    def number(self, step: int, digest: str) -> tuple[int, bool]:
        """Return the version number of weights, and whether it is new."""
        known = self._numbers.get((step, digest))
        return (self._next, True) if known is None else (known, False)

    def write(self, step: int, weights: bytes) -> tuple[Path, str]:
        """Write the weights of a step to their directory; blocking. Return it and the digest."""
        digest = weights_digest(weights)
        version, _ = self.number(step, digest)
        target = self._directory.absolute() / f"v{version:06d}-{digest[:12]}"
        write_model_directory(target, weights, self._model)
        for old in sorted(self._directory.glob("v*-*"))[: -self._keep]:
            if old != target:
                shutil.rmtree(old)
        self._sweep()
        return target, digest

    def _sweep(self) -> None:
        """Remove what a trainer left that was killed while it wrote; a young one may be another trainer's."""
        for partial in self._directory.glob(".v*-*.*"):
            with suppress(FileNotFoundError):
                if time.time() - partial.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(partial, ignore_errors=True)

    async def announce(self, step: int, directory: Path, digest: str, canary: Canary) -> int:
        """Write a version down, tell the policy what it is and how to tell it from others, and return its number."""
        version, new = self.number(step, digest)
        if new:
            await self._log.write(
                VersionPublished(run=self._run, epoch=self._log.epoch, step=step, version=version, digest=digest)
            )
            self._numbers[step, digest] = version
            self._next = version + 1
        else:
            await self._log.check()
        await self._publisher.publish(
            CONTROL,
            PolicyVersion(
                run=self._run,
                epoch=self._log.epoch,
                version=version,
                directory=str(directory),
                digest=digest,
                canary=canary,
            ),
        )
        return version
