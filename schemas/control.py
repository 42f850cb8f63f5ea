"""Current state, one record per key on a compacted topic.

Every record replaces the last of its key. Numbers in it are cumulative and readers take the maximum, so a late or
repeated record does no harm; of a run's manifests the first one counts, and whoever finds another one last in the log
writes the first one again. Replay and the trainer never read this topic: what they need is in `decisions` and in the
tasks themselves.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import numpy as np

from schemas.identity import backend_name, run_name
from schemas.message import Message, Part
from schemas.messages import Budgets, Shaping
from schemas.transcript import LogProbs, Sampling, TokenIds

SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-3, 1e3
"""Bounds of an engine's weight: what is meant to have nothing is drained."""


def _can_be_called(url: str) -> bool:
    """Tell whether an engine may be at an address, and the address be shown: it holds no password."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in {"http", "https"}
            and bool(parts.hostname)
            and parts.port != 0
            and parts.username is None
            and url.isprintable()
            and " " not in url
        )
    except ValueError:  # no such port, brackets that do not close
        return False


CONFIGURED = "configured"
"""Name of the engine at the address in the settings, which is there while none is registered."""


class RunManifest(Message, frozen=True, kw_only=True, tag="rollmill.run"):
    """What a run is: key `run/<run>`, written by whoever publishes to it first; the first one in the log counts."""

    run: str
    """The run."""
    seed: int
    """Seed of all derived seeds."""
    samples: int
    """Siblings per group."""
    budgets: Budgets = Budgets()
    """Time inside each stage."""
    horizon: int = 16
    """Most turns of an episode."""
    max_sampled_tokens: int = 4096
    """Most sampled tokens of an episode."""
    sampling: Sampling = Sampling()
    """How the policy samples."""
    start_within_s: float = 86_400.0
    """A task not started this long after its publication expires, seconds."""
    paced: bool = False
    """A trainer paces the run by credit; otherwise everything is published at once."""
    created_ms: int = 0
    """When the manifest was written, milliseconds since the epoch."""
    trajectories_start: int = 0
    """End of the run's partition of `trajectories` when the manifest was written: where replay begins."""
    extra: dict[str, Any] = {}
    """Digests of code, prompts and tokenizer, for the record."""


class Credit(Message, frozen=True, kw_only=True, tag="rollmill.credit"):
    """How many groups the feeder may admit: key `credit/<run>`, written by the trainer alone."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the trainer; lower ones are ignored."""
    admit_up_to: int
    """The feeder publishes groups with an admission number below this (cumulative)."""
    min_version: int
    """Lowest policy version that may sample the groups admitted now."""
    horizon: int
    """Most turns, stamped at admission."""
    temperature: float
    """Sampling temperature, stamped at admission."""
    closed: bool = False
    """The trainer wants no more groups: the run has ended."""
    phase: int = 0
    """Phase of the curriculum, stamped at admission."""
    shaping: Shaping | None = None
    """How much the parts of a reward count, stamped at admission."""
    decided: int = -1
    """Offset in `decisions` of the last one when this was given: what the feeder may know of how rows did."""


class Cursor(Message, frozen=True, kw_only=True, tag="rollmill.cursor"):
    """How far the feeder is: key `cursor/<run>`."""

    run: str
    """The run."""
    admitted: int
    """Groups published and acknowledged (cumulative)."""
    passed: int = 0
    """Instances of the source that were admitted or skipped (cumulative); 0 where none was skipped."""
    taking: bool = False
    """The instance behind those is chosen and may be published in part: whoever feeds on takes it."""


class FeederStarted(Message, frozen=True, kw_only=True, tag="rollmill.feeder_started"):
    """A feeder feeds the run from here on, and any earlier one stops: key `feeder/<run>`."""

    run: str
    """The run."""
    feeder: str
    """Name of the process."""
    source: str
    """Name of the source that it reads."""


class Canary(Part, frozen=True, kw_only=True):
    """A prompt, and what the announced weights say to it."""

    tokens: bytes
    """Ids, int32 little-endian, n entries."""
    logprobs: bytes
    """Log-prob of each id behind the first one, given those before it, at temperature 1; float32 little-endian."""

    @property
    def prompt(self) -> TokenIds:
        """The ids, shape (n,), int32."""
        return np.frombuffer(self.tokens, dtype="<i4")

    @property
    def expected(self) -> LogProbs:
        """The log-probs, shape (n - 1,), float32."""
        return np.frombuffer(self.logprobs, dtype="<f4")

    def check(self) -> None:
        """Raise ValueError unless there is a log-prob for each id behind the first one."""
        if len(self.tokens) % 4 or len(self.tokens) < 8 or len(self.logprobs) != len(self.tokens) - 4:
            raise ValueError(f"a canary has {len(self.tokens)} bytes of ids and {len(self.logprobs)} of log-probs")


class PolicyVersion(Message, frozen=True, kw_only=True, tag="rollmill.policy_version"):
    """The weights that the policy should serve: key `policy/<run>`."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the trainer; lower ones are ignored."""
    version: int
    """Number of the version."""
    directory: str
    """Where the weights are, as seen by the policy."""
    digest: str
    """SHA-256 of the weight file: names it; whether an engine has these weights, the canary says."""
    canary: Canary | None = None
    """How to tell that an engine has these weights; not asked if none."""

    def check(self) -> None:
        """Raise ValueError for a canary that cannot be asked."""
        if self.canary is not None:
            self.canary.check()


class Quarantine(Message, frozen=True, kw_only=True, tag="rollmill.quarantine"):
    """A version that an engine loaded and did not have: key `quarantine/<run>`, the last one of the run.

    It is loaded no more, and no token of it is taken, until its trainer starts again.
    """

    run: str
    """The run."""
    epoch: int
    """Epoch of the trainer that announced it."""
    version: int
    """Its number."""
    address: str
    """The engine that found so."""
    cause: str
    """What was found."""
    at_ms: int
    """When, milliseconds since the epoch."""


class Cancel(Message, frozen=True, kw_only=True, tag="rollmill.cancel"):
    """A withdrawal: key `cancel/<id>`; the id is a run, `run/group` or `run/group/sample`."""

    target: str
    """What is withdrawn."""
    cause: str
    """Who or what withdrew it."""


class Outage(Part, frozen=True, kw_only=True):
    """A time during which a worker could not reach a service."""

    since_ms: int
    """The first call that failed, milliseconds since the epoch."""
    until_ms: int
    """Its end, or as far as it lasts and counts, milliseconds since the epoch."""


class Breaker(Message, frozen=True, kw_only=True, tag="rollmill.breaker"):
    """What one worker finds of a service: key `breaker/<service>/<address>/<stage>/<worker>`, written by it alone."""

    service: str
    """What is called: `policy` or `envhost`."""
    address: str
    """Where it is."""
    stage: str
    """What the worker does."""
    worker: str
    """Who finds so."""
    open: bool
    """The service is away: the worker does not call it."""
    since_ms: int
    """When the last outage began, milliseconds since the epoch."""
    open_ms: int
    """Open time of all outages together (cumulative)."""
    outages: tuple[Outage, ...] = ()
    """The last outages, oldest first; the one that goes on is the last of them."""
    cause: str = ""
    """What the last call said, while the breaker is open."""
    at_ms: int
    """When this was written, milliseconds since the epoch; every few seconds while the breaker is open."""


class Backend(Message, frozen=True, kw_only=True, tag="rollmill.backend"):
    """An engine that samples for whoever reads this log: key `backend/<name>`."""

    name: str
    """What it is called."""
    url: str
    """Where it is, as seen by RUN and by whoever brings weights into it."""
    weight: float = 1.0
    """Its share of the work, relative to what its speed would give it."""
    draining: bool = False
    """It is given nothing new."""
    run: str = ""
    """The run whose weights are brought into it; those of any run that is followed if empty."""

    def check(self) -> None:
        """Raise ValueError for what no command registers: every worker would call it, and give it work."""
        backend_name(self.name)
        if self.name == CONFIGURED:
            raise ValueError(f"{CONFIGURED!r} is what the engine in the settings is called; give this one another name")
        if self.run:
            run_name(self.run)
        if not _can_be_called(self.url):
            raise ValueError(f"url is {self.url[:80]!r}; it is http://host:port, or https, without a user")
        if not SMALLEST_WEIGHT <= self.weight <= LARGEST_WEIGHT:
            raise ValueError(f"weight is {self.weight}; it is {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}")


Control = RunManifest | Credit | Cursor | FeederStarted | PolicyVersion | Quarantine | Cancel | Breaker | Backend


def control_key(record: Control) -> str:
    """Return the compaction key of a control record."""
    match record:
        case RunManifest():
            key = f"run/{record.run}"
        case Credit():
            key = f"credit/{record.run}"
        case Cursor():
            key = f"cursor/{record.run}"
        case FeederStarted():
            key = f"feeder/{record.run}"
        case PolicyVersion():
            key = f"policy/{record.run}"
        case Quarantine():
            key = f"quarantine/{record.run}"
        case Cancel():
            key = f"cancel/{record.target}"
        case Backend():
            key = f"backend/{record.name}"
        case Breaker():
            key = f"breaker/{record.service}/{record.address}/{record.stage}/{record.worker}"
    return key
