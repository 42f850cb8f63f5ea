"""A trainer's process that dies at a chosen instant: at a publication, in the middle of a file, between two passes.

`Fate` counts the instants of a process; at its hour everything that the process still tries raises `Killed`, and what
its error handlers would tidy up stays as it is, as after SIGKILL. A run without an hour tells which instants there are.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import contextmanager

import pytest
from synthetic_run import Killed

from trainer import checkpoint, weights
from trainer.learner import Learner
from trainer.spool import Spool


class Fate:
    """The instants of one process, and the one at which it dies."""

    def __init__(self, at=None, *, when=None, skip=0):
        """Die at the at-th instant, or at the one named `when` after `skip` others of that name, or never."""
        self.passed = []
        self.dead = False
        self._at, self._when, self._skip = at, when, skip

    def instant(self, name):
        """Pass an instant, or die at it."""
        if self.dead:
            raise Killed(name)
        self.passed.append(name)
        named = self.passed.count(name) > self._skip if name == self._when else False
        if named or len(self.passed) == self._at:
            self.dead = True
            raise Killed(name)


class MortalBus:
    """The bus of a process with a fate."""

    def __init__(self, bus, fate):
        self._bus = bus
        self._fate = fate

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def publish(self, topic, value, **options):
        """Publish, dying before or after the record is in the log."""
        name = name_of(options["headers"])
        self._fate.instant(f"before {name}")
        position = await self._bus.publish(topic, value, **options)
        self._fate.instant(f"after {name}")
        return position


class SleepyBus:
    """The bus of a process that stands still for a while at the second record of a kind, before or behind it."""

    def __init__(self, bus, kind, behind):
        self.sleeping, self.wake = asyncio.Event(), asyncio.Event()
        self._bus, self._kind, self._behind, self._left = bus, kind, behind, 2

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def publish(self, topic, value, **options):
        """Publish, and sleep if it is time."""
        self._left -= name_of(options["headers"]) == self._kind
        asleep = self._left == 0 and not self.wake.is_set()
        if asleep and not self._behind:
            await self._sleep()
        position = await self._bus.publish(topic, value, **options)
        if asleep and self._behind:
            await self._sleep()
        return position

    async def _sleep(self):
        self.sleeping.set()
        await self.wake.wait()


@contextmanager
def mortal(fate):
    """Let files and passes of this process have a fate too."""
    remove, write, sync, step = shutil.rmtree, weights.write_durably, weights.sync_directory, Learner.step
    read = Spool._read

    def mortal_remove(path, *args, **options):
        if fate.dead:
            return
        fate.instant("before a removal")
        if files := [file for file in sorted(path.iterdir()) if file.is_file()]:
            files[0].unlink()
            fate.instant("half a removal")
        remove(path, *args, **options)

    def mortal_write(file, data):
        fate.instant("before a file")
        file.write_bytes(data[: len(data) // 2])
        fate.instant(f"half of {file.name} in {'a checkpoint' if checkpoint_of(file) else 'a version'}")
        write(file, data)

    def mortal_sync(directory):
        fate.instant("before a sync")  # of a directory that is about to be renamed, or of its parent afterwards
        sync(directory)

    async def mortal_read(spool, *args):
        fate.instant("before token records are read again")
        return await read(spool, *args)

    def mortal_step(learner, *args, **options):
        fate.instant("before a step's passes")
        metrics = step(learner, *args, **options)
        fate.instant("after a step's passes")
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", mortal_remove)
        for module in (checkpoint, weights):
            patch.setattr(module, "write_durably", mortal_write)
            patch.setattr(module, "sync_directory", mortal_sync)
        patch.setattr(Learner, "step", mortal_step)
        patch.setattr(Spool, "_read", mortal_read)
        yield


def name_of(headers):
    """Return the name of a message by its record's headers."""
    return dict(headers)["ce_type"].decode().removeprefix("rollmill.")


def checkpoint_of(file):
    """Tell whether a file is one of a checkpoint's."""
    return file.parent.parent.name == "checkpoints"
