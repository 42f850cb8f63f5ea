"""The public reader of `trajectories`: one run's accepted outcomes, one by one or as groups of siblings.

    async with TrajectoryReader.open(bootstrap="...", run="my-run", consumer="my-trainer") as reader:
        async for group in reader.groups():
            ...
            await reader.commit(group)

Promises: each sample has one outcome, whatever was delivered twice or late (`schemas/arbiter.py`); each group is
handed out once, in the order in which groups become complete in the log; records decide, never the clock; memory
follows open groups and one poll. A consumer's progress is one position in the log, so a restart reads the run again
from its start, silently up to there: only that tells a late duplicate of an old group from a new group.

A consumer is one reader. The last to store its progress goes on, and a reader stores when it is opened; another one
learns at its next commit that it was replaced. So it is the one that was opened last, unless an older one was storing
in that very moment: the log compares nothing, and one of the two ends either way. This file knows no trainer and needs
neither torch nor pydantic.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Final, Self

import msgspec

from infra.blobs import BlobsAway
from infra.blobs.directory import DirectoryBlobs
from infra.bus import Bus, Committed, Reader, Record, TopicPartition
from infra.clock import Clock, SystemClock
from infra.control import control_now
from infra.errors import BusError, ConfigError, OffsetLost, RollmillError, WaitTimeout
from infra.kafka import KafkaBus
from infra.reading import partition_of, read_between
from infra.security import PLAINTEXT, Security
from infra.wire import Received, unpack
from schemas.arbiter import Ruling
from schemas.codec import DecodeError
from schemas.control import RunManifest
from schemas.grouping import Grouping, SiblingGroup
from schemas.messages import Trajectory
from schemas.topics import DEFAULT_PREFIX, TRAJECTORIES

POLL_S: Final = 0.5
"""One poll lasts at most this long, seconds."""

BATCH: Final = 100
"""Most records of one poll."""

AWAY_S: Final = 1.0
"""Pause before a log that is away is read again, seconds."""

OUTAGE_S: Final = 300.0
"""Longest outage of the log that a reader waits out, seconds."""

SILENCE_S: Final = 60.0
"""Longest wait for a record that is known to be in the log, seconds."""

SAY_EVERY_S: Final = 30.0
"""A reader that waits says what it waits for this often, seconds."""

log = logging.getLogger(__name__)


class ReaderReplaced(RollmillError):
    """Another reader goes on as the same consumer."""


def trajectories_of(run: str) -> TopicPartition:
    """Return where a run's terminal records lie."""
    return partition_of(TRAJECTORIES, run)


async def read_trajectory(record: Record, run: str, bus: Bus) -> Received[Trajectory] | None:
    """Return the terminal record of a run that a record is; None if it is another run's, or nothing readable.

    Raises:
        infra.blobs.BlobsAway: its value is in the log's blob store, which does not answer.
    """
    try:
        received = await unpack(TRAJECTORIES, record, bus)
    except DecodeError as error:
        # Its writer is to blame, and the sink has it in `dead`; to whoever counts outcomes it says nothing.
        log.warning("`trajectories` offset %d is not a trajectory, ignored: %s", record.offset, error)
        return None
    return received if received.message.task.run == run else None


async def read_run(bus: Bus, clock: Clock, run: str, start: int, end: int) -> AsyncGenerator[Received[Trajectory]]:
    """Yield the terminal records of a run in [start, end) of its partition, accepted or not.

    Raises:
        WaitTimeout: nothing came for long although the end is not reached.
        infra.errors.OffsetLost: retention has removed the start.
        infra.blobs.BlobsAway: a value is in the log's blob store, which does not answer.
    """
    partition = trajectories_of(run)
    async with aclosing(read_between(bus, clock, {partition: start}, {partition: end})) as records:
        async for record in records:
            received = await read_trajectory(record, run, bus)
            if received is not None:
                yield received


class Nothing(Enum):
    """Why the next record brought no outcome."""

    PASSED = auto()
    """It is another run's, or unreadable; what comes behind it is next."""
    AWAY = auto()
    """Its value is in the log's blob store, which does not answer; it stays the next one."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a consumer is, as it is kept beside the committed offset."""

    start: int
    """Where it began."""
    position: int
    """What lies before was handed out as far as it could be."""
    enough: int | None
    """Its rule for handing groups out."""
    holder: str
    """The reader that wrote this."""


class TrajectoryReader:
    """Reads one run. Made by `open` or `on`."""

    def __init__(self, bus: Bus, clock: Clock, run: str, reader: Reader, progress: Progress, group: str | None) -> None:
        """Read on; the reader stands at the start of the progress."""
        self._bus = bus
        self._clock = clock
        self._run = run
        self._reader = reader
        self._resumed = progress
        self._group = group
        self._grouping = Grouping(progress.start, enough=progress.enough)
        self._grouped: bool | None = None
        self._pending: deque[Record] = deque()
        self._said_at = clock.monotonic()
        self._away_since: float | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        bootstrap: str,
        run: str,
        consumer: str | None = None,
        enough: int | None = None,
        start: int | None = None,
        prefix: str = DEFAULT_PREFIX,
        blobs: Path | None = None,
        security: Security = PLAINTEXT,
    ) -> AsyncIterator[Self]:
        """Connect to Kafka and read a run.

        Args:
            bootstrap: addresses of the brokers.
            run: the run.
            consumer: name under which `commit` stores progress, and whose progress is gone on from; the Kafka group
                is `<prefix><consumer>.<run>`, whose lag any Kafka tool shows.
            enough: hand a group out with the record that brings its so many-th graded sibling; with its last sibling
                unless given.
            start: offset at which a consumer without progress begins; where the run begins unless given.
            prefix: put before every topic name.
            blobs: directory of values too large for a record, as in `bus.blobs` of the services.
            security: how both sides prove themselves.

        Raises:
            BusError: nothing answers, or the log no longer holds the start (OffsetLost).
            ConfigError: the topic differs from the table, or the consumer's progress is of another rule or log.
            ReaderReplaced: another reader stored its progress as the same consumer in this very moment.
        """
        store = None if blobs is None else DirectoryBlobs(blobs, SystemClock())
        bus = KafkaBus(bootstrap, prefix=prefix, client_id=consumer or "reader", blobs=store, security=security)
        try:
            await bus.start()
            await bus.check_topics([TRAJECTORIES])
            async with cls.on(bus, SystemClock(), run, consumer=consumer, enough=enough, start=start) as reader:
                yield reader
        finally:
            await bus.close()

    @classmethod
    @asynccontextmanager
    async def on(
        cls,
        bus: Bus,
        clock: Clock,
        run: str,
        *,
        consumer: str | None = None,
        enough: int | None = None,
        start: int | None = None,
    ) -> AsyncIterator[Self]:
        """Read a run on a bus that is connected already; otherwise as `open`."""
        if enough is not None and enough < 1:
            raise ConfigError(f"enough = {enough}: a group is handed out with one graded sibling at least")
        group = None if consumer is None else f"{consumer}.{run}"
        known = None if group is None else await _known(bus, group, run, enough)
        if known is None:
            begin = await _begin(bus, clock, run) if start is None else start
            known = begin, Progress(start=begin, position=begin, enough=enough, holder="")
        low, progress = known[0], msgspec.structs.replace(known[1], holder=secrets.token_hex(8))
        source = await bus.read({trajectories_of(run): progress.start})
        try:
            reader = cls(bus, clock, run, source, progress, group)
            if group is not None:
                await reader._store(low, progress.position)  # from now on another reader's commits are refused
            yield reader
        finally:
            await source.close()

    # What it reads.

    async def groups(self, *, follow: bool = True) -> AsyncIterator[SiblingGroup]:
        """Yield each group once, in the order in which they become complete.

        Args:
            follow: wait for what comes; otherwise end where the log ends now.

        Raises:
            BusError: the log is away for longer than OUTAGE_S.
            WaitTimeout: it answers, and brings nothing for SILENCE_S although its end is not reached; not with follow.
        """
        self._use(grouped=True)
        until = None if follow else await self._end()
        while (found := await self._next(until)) is not None:
            _, group = self._grouping.feed(found.record.offset, found.message)
            if group is not None and group.position > self._resumed.position:
                yield group

    async def accepted(self, *, follow: bool = True) -> AsyncIterator[Trajectory]:
        """Yield the accepted outcome of each sample once, in log order; otherwise as `groups`."""
        async for found in self.received(follow=follow):
            yield found.message

    async def received(self, *, follow: bool = True) -> AsyncIterator[Received[Trajectory]]:
        """Yield what `accepted` yields, with the record that each came in."""
        self._use(grouped=False)
        until = None if follow else await self._end()
        while (found := await self._next(until)) is not None:
            if self._accepts(found):
                yield found

    async def poll(self) -> list[Trajectory]:
        """Return the accepted outcomes among what one poll brings; none when nothing came within POLL_S."""
        self._use(grouped=False)
        found = []
        await self._fetch()
        while self._pending:
            received = await self._take()
            if received is Nothing.AWAY:
                break  # the caller has limits of its own
            if not isinstance(received, Nothing) and self._accepts(received):
                found.append(received.message)
        return found

    # What it knows.

    @property
    def position(self) -> int:
        """Offset of the next record to look at."""
        return self._grouping.position

    @property
    def low(self) -> int:
        """Lowest offset of an accepted record of a group that was not handed out; else the position."""
        return self._grouping.low

    @property
    def open_groups(self) -> int:
        """Groups some of whose siblings have ended."""
        return self._grouping.open_groups

    @property
    def superseded(self) -> int:
        """Records ignored because their sample had an outcome already, since the start of the run."""
        return self._grouping.rulings[Ruling.SUPERSEDED]

    @property
    def conflicts(self) -> int:
        """Records ignored because they speak of another task under the same id, since the start of the run."""
        return self._grouping.rulings[Ruling.CONFLICT]

    @property
    def late(self) -> int:
        """Accepted siblings that came after their group was handed out with `enough` of them."""
        return self._grouping.late

    # How far it is.

    async def commit(self, group: SiblingGroup | None = None) -> None:
        """Store that everything handed out so far is done with, or everything up to a group.

        Raises:
            ReaderReplaced: another reader goes on as this consumer.
            BusError: it could not be stored.
        """
        if self._group is None:
            raise ConfigError("a reader without a name keeps no progress: open it with consumer=NAME")
        low, position = (self.low, self.position) if group is None else (group.low, group.position)
        await self._require_held(self._group, position)
        if position > self._resumed.position:  # else the run is being read again, and nothing new was handed out
            await self._store(low, position)

    async def _store(self, low: int, position: int) -> None:
        assert self._group is not None
        now = msgspec.structs.replace(self._resumed, position=position)
        text = msgspec.json.encode(now).decode()
        await self._bus.commit(self._group, {trajectories_of(self._run): Committed(low, text)})
        await self._require_held(self._group, position)  # nobody compared: another reader may have stored since

    async def _require_held(self, group: str, position: int) -> None:
        """Raise ReaderReplaced if the progress was stored by another reader."""
        known = (await self._bus.committed(group, TRAJECTORIES.name)).get(trajectories_of(self._run).partition)
        if known is not None and _decoded(known.metadata).holder != self._resumed.holder:
            raise ReaderReplaced(
                f"another reader of run {self._run!r} goes on as the same consumer (Kafka group {group}, at "
                f"offset {known.offset}); this one has handed out up to {position} and ends here. Give each reader a "
                f"`consumer` of its own"
            )

    # Reading.

    def _use(self, *, grouped: bool) -> None:
        """Settle how the run is read: records that were fed one way cannot be had the other way."""
        if self._grouped not in {None, grouped}:
            raise RuntimeError("a reader gives groups or single outcomes, not both: open another one")
        if self._grouped is None and not grouped:
            self._grouping = Grouping(self._resumed.start, enough=0)
        self._grouped = grouped

    def _accepts(self, found: Received[Trajectory]) -> bool:
        ruling, _ = self._grouping.feed(found.record.offset, found.message)
        return ruling is Ruling.ACCEPTED and found.record.offset >= self._resumed.position

    async def _end(self) -> int:
        return (await self._bus.end_offsets(TRAJECTORIES.name))[trajectories_of(self._run).partition]

    async def _next(self, until: int | None) -> Received[Trajectory] | None:
        """Return the next terminal record of the run; None once there is none before an offset."""
        self._said_at = self._clock.monotonic()  # what the caller did meanwhile is no silence
        while until is None or self.position < until:
            if not self._pending:
                await self._fetch()
                self._say(until)
            elif until is not None and self._pending[0].offset >= until:
                return None
            elif not isinstance(received := await self._take(), Nothing):
                return received
        return None

    async def _take(self) -> Received[Trajectory] | Nothing:
        """Look at the next record that was read; it stays there while its value is away."""
        record = self._pending[0]
        try:
            received = await read_trajectory(record, self._run, self._bus)
        except BlobsAway as error:
            if self._bus.blobs is None:
                raise  # nobody told where the store is
            await self._wait_out(error)
            return Nothing.AWAY
        self._away_since = None
        self._pending.popleft()
        if received is None:
            self._grouping.pass_to(record.offset + 1)
            return Nothing.PASSED
        return received

    async def _fetch(self) -> None:
        """Poll once, if there is nothing left of the last poll; nothing comes while the log is away."""
        if self._pending:
            return
        try:
            self._pending.extend(await self._reader.poll(BATCH, POLL_S))
        except OffsetLost:
            raise  # waiting brings nothing back
        except BusError as error:
            await self._wait_out(error)
            return
        self._away_since = None
        if self._pending:
            self._said_at = self._clock.monotonic()
        else:
            self._grouping.pass_to(self._reader.position(trajectories_of(self._run)))

    async def _wait_out(self, error: BusError) -> None:
        """Pause, unless the log or its store has been away for too long."""
        now = self._clock.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since > OUTAGE_S:
            raise error
        log.info("the log is away, trajectories of run %s are waited for: %s", self._run, error)
        await self._clock.sleep(AWAY_S)
        self._said_at = self._clock.monotonic()  # an outage, with a limit of its own, is no silence

    def _say(self, until: int | None) -> None:
        """Say what is waited for; what is known to be in the log is not waited for without a limit (WaitTimeout)."""
        silent_s = self._clock.monotonic() - self._said_at
        if until is not None and silent_s > SILENCE_S:
            raise WaitTimeout(
                f"waited {SILENCE_S:g} s for offset {until} of {trajectories_of(self._run)}; read up to "
                f"{self.position}. Is the broker healthy?"
            )
        if until is None and silent_s >= SAY_EVERY_S:
            self._said_at = self._clock.monotonic()
            log.info(
                "run %s: nothing new behind offset %d for %.0f s; %d groups are incomplete, the oldest since offset %d",
                *(self._run, self.position, silent_s, self.open_groups, self.low),
            )


async def _begin(bus: Bus, clock: Clock, run: str) -> int:
    """Return where a run begins: its manifest says so; without one, at the first record there is."""
    manifest = (await control_now(bus, clock)).get(f"run/{run}", RunManifest)
    if manifest is not None:
        return manifest.trajectories_start
    return (await bus.begin_offsets(TRAJECTORIES.name))[trajectories_of(run).partition]


async def _known(bus: Bus, group: str, run: str, enough: int | None) -> tuple[int, Progress] | None:
    """Return the offset that a consumer committed and how far it was; None if it is new.

    Raises:
        ConfigError: that progress cannot be gone on from.
    """
    partition = trajectories_of(run).partition
    known = (await bus.committed(group, TRAJECTORIES.name)).get(partition)
    if known is None:
        return None
    progress = _decoded(known.metadata)
    if progress.enough != enough:
        raise ConfigError(
            f"Kafka group {group} has handed groups out with enough = {progress.enough}, now it is {enough}: which "
            f"groups are left cannot be told. Give the same value, or another `consumer`"
        )
    end = (await bus.end_offsets(TRAJECTORIES.name))[partition]
    if progress.position > end:
        raise ConfigError(
            f"Kafka group {group} has read up to offset {progress.position}, and partition {partition} of "
            f"`trajectories` ends at {end}: the topic was made anew. Give another `consumer`"
        )
    return known.offset, progress


def _decoded(metadata: str) -> Progress:
    try:
        return msgspec.json.decode(metadata, type=Progress)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the progress of this consumer was written by another program ({metadata[:80]!r}): give another "
            f"`consumer`, whose Kafka group nothing else uses"
        ) from error
