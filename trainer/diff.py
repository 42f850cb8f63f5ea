"""Where two runs part, and why: the first step that is not the same in both, traced to what came before it.

    changed      a record is no longer the one that was decided on (either log)
    groups       the step holds other groups: one was dropped, used in another step, or not complete in the other run
    samples      the same groups, but a sibling ended, was graded or was sampled differently, from a token on
    order        the same samples in another order
    advantages   the same batch, other advantages: the configuration says why
    weights      the same batch and advantages made other weights (advantages that a model made are in no log)
    length       one run has steps that the other does not have

Everything before the first difference is the same, so what is named is a cause and not a consequence; what may lie
behind it (configuration) is listed beside it. Nothing is decided or sampled here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from infra.bus import Bus
from infra.clock import Clock
from schemas.decisions import Member
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.transcript import Transcript
from trainer.evidence import Change
from trainer.story import Place, Sample, Story, read_one, read_story

OF_A_RUN = frozenset({"run", "directory", "publish", "start"})
"""Settings that two runs never share; they change nothing that is trained."""


class Kind(StrEnum):
    """What is the first difference."""

    CHANGED = "changed"
    GROUPS = "groups"
    SAMPLES = "samples"
    ORDER = "order"
    ADVANTAGES = "advantages"
    WEIGHTS = "weights"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first difference."""

    step: int
    """The first step that is not the same."""
    kind: Kind
    """What of it."""
    cause: str
    """For a person: what differs, and why as far as the logs tell."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What there is between two runs."""

    runs: tuple[str, str]
    """Their names."""
    steps: tuple[int, int]
    """Steps of each."""
    same_steps: int
    """Steps that are the same, from the first on."""
    divergence: Divergence | None
    """The first difference; none if there is none."""
    settings: Mapping[str, tuple[Any, Any]]
    """Settings that differ, by dotted name."""

    @property
    def empty(self) -> bool:
        """Tell whether no step differs."""
        return self.divergence is None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "empty": self.empty}

    def summary(self) -> str:
        """Return one line for a person."""
        if self.divergence is None:
            return f"no difference: {self.same_steps} steps with the same batches, advantages and weights"
        return f"{self.same_steps} steps are the same; step {self.divergence.step} differs: {self.divergence.cause}"


async def diff(bus: Bus, clock: Clock, first: str, second: str) -> Diff:
    """Compare two runs, which may be one and the same: then its log is compared with what it says was decided.

    Raises:
        ConfigError: no trainer ever started on one of them, or the log no longer holds what a step was made of.
    """
    stories = (await read_story(bus, clock, first), await read_story(bus, clock, second))
    found = await _first_difference(bus, clock, stories)
    counts = (len(stories[0].steps), len(stories[1].steps))
    return Diff(
        runs=(first, second),
        steps=counts,
        same_steps=min(counts) if found is None else found.step - 1,
        divergence=found,
        settings=dict(_other_settings(stories[0].history.config, stories[1].history.config)),
    )


Stories = tuple[Story, Story]

Batch = Mapping[Place, tuple[Member, ...]]
"""Members of a step by place, in order."""


async def _first_difference(bus: Bus, clock: Clock, stories: Stories) -> Divergence | None:
    ours, theirs = stories
    for step in range(1, max(len(ours.steps), len(theirs.steps)) + 1):
        for story, other in (stories, stories[::-1]):
            if step not in story.steps:
                ended = story.history.ended
                why = f"it ended: {ended.reason}" if ended else "it goes no further"
                return Divergence(
                    step=step, kind=Kind.LENGTH, cause=f"{other.run} has it, {story.run} does not ({why})"
                )
        for story in stories:
            for change in story.evidence.changes(story.steps[step]):
                cause = f"{story.run}: {_name(story, change)}: {change.what}"
                return Divergence(step=step, kind=Kind.CHANGED, cause=cause)
        found = await _in_batch(bus, clock, stories, step)
        if found is not None:
            return found
    return None


async def _in_batch(bus: Bus, clock: Clock, stories: Stories, step: int) -> Divergence | None:
    ours, theirs = (story.batch(step) for story in stories)
    if ours.keys() != theirs.keys():
        return Divergence(step=step, kind=Kind.GROUPS, cause=_other_groups(stories, step, ours, theirs))
    for place in ours:
        cause = await _other_sample(bus, clock, stories, place)
        if cause:
            return Divergence(step=step, kind=Kind.SAMPLES, cause=cause)
    if list(ours) != list(theirs):
        apart = next(f"{a} stands where {b} does" for a, b in zip(ours, theirs, strict=True) if a != b)
        return Divergence(step=step, kind=Kind.ORDER, cause=f"the same samples in another order: {apart}")
    return _other_figures(stories, step, ours, theirs)


def _other_figures(stories: Stories, step: int, ours: Batch, theirs: Batch) -> Divergence | None:
    """Compare what was made of the same samples in the same order."""
    if _rewards(ours) != _rewards(theirs):
        place = next(p for p in ours if _rewards({p: ours[p]}) != _rewards({p: theirs[p]}))
        cause = f"the rewards of {place} are shaped otherwise: {_of(ours[place])} and {_of(theirs[place])}"
        return Divergence(step=step, kind=Kind.ADVANTAGES, cause=cause)
    first, second = (story.steps[step] for story in stories)
    if first.advantage_digest != second.advantage_digest:
        cause = "the same batch with other advantages: the estimator's settings differ"
        return Divergence(step=step, kind=Kind.ADVANTAGES, cause=cause)
    digests = [{v.step: v.digest for v in story.history.versions}.get(step) for story in stories]
    if None not in digests and digests[0] != digests[1]:
        cause = (
            "the same batch made other weights: other settings of the optimizer or threads (see the settings that "
            "differ), other weights to begin with, or arithmetic that is not deterministic (a GPU)"
        )
        return Divergence(step=step, kind=Kind.WEIGHTS, cause=cause)
    return None


def _rewards(batch: Batch) -> list[float]:
    return [member.reward for members in batch.values() for member in members]


def _of(members: tuple[Member, ...]) -> str:
    return ", ".join(f"{member.reward:g}" for member in members)


def _name(story: Story, change: Change) -> str:
    place = story.places.get(change.group)
    return f"{change.group}/{change.sample}" + (f" ({place})" if place else "")


# ---- other groups


def _other_groups(stories: Stories, step: int, ours: Mapping[Place, object], theirs: Mapping[Place, object]) -> str:
    """Return why a step holds a group in one run alone."""
    for batch, other_batch, (story, other) in ((ours, theirs, stories), (theirs, ours, stories[::-1])):
        place = next((place for place in batch if place not in other_batch), None)
        if place is not None:
            return f"{story.run} trains on {place}, {other.run} does not: {_instead(story, other, place, step)}"
    raise AssertionError("asked for a difference between equal sets")


def _instead(story: Story, other: Story, place: Place, step: int) -> str:
    """Return what became of a place in the run that did not train on it in this step."""
    there, here = other.groups.get(place, {}), story.groups[place]
    if not there:
        return "no sample of it ended there"
    used = other.used_in(place)
    if used is not None:
        return (
            f"there it is in step {used}. It was complete at offset {_complete_at(there)} of `trajectories`, here at "
            f"{_complete_at(here)}: groups became complete in another order"
        )
    group = next(iter(there.values())).group
    drop = other.history.drops.get(group)
    if drop is not None:
        why = f"there it was dropped as {drop.reason.value}"
        return f"{why} with success {_successes(there)}; here it is {_successes(here)}"
    missing = sorted(here.keys() - there.keys())
    if missing:
        return f"sample {missing[0]} has not ended there"
    return f"it is complete there at offset {_complete_at(there)}, after step {step} was decided"


def _complete_at(samples: Mapping[int, Sample]) -> int:
    return max(sample.offset for sample in samples.values())


def _successes(samples: Mapping[int, Sample]) -> str:
    ordered = (samples[number] for number in sorted(samples))
    return ", ".join(f"{s.success:g}" if s.outcome == "completed" else s.outcome for s in ordered)


# ---- other samples


async def _other_sample(bus: Bus, clock: Clock, stories: Stories, place: Place) -> str:
    """Return what is the first difference between the siblings of a place; empty if there is none."""
    ours, theirs = (story.groups[place] for story in stories)
    for number in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(number), theirs.get(number)
        where = f"{place}, sample {number}"
        if here is None or there is None:
            return f"{where} ended in {stories[0].run if here else stories[1].run} alone"
        if here.content == there.content:
            continue
        pair = [await read_one(bus, clock, s.run, one.offset) for s, one in zip(stories, (here, there), strict=True)]
        if pair[0] is None or pair[1] is None:
            return f"{where} can no longer be read in one of the logs"
        cause = other_trajectory(pair[0], pair[1])
        if cause:
            return f"{where}: {cause}"
    return ""


def other_trajectory(first: Trajectory, second: Trajectory) -> str:
    """Return how two outcomes of the same sample differ, in what training sees; empty if in nothing.

    Stamps, attempts and names of workers are no part of that.
    """
    if first.task.payload_digest != second.task.payload_digest:
        return "another payload: the source was changed"
    for name in ("seed", "horizon", "sampling"):
        one, other = getattr(first.task, name), getattr(second.task, name)
        if one != other:
            return f"the task's {name} is {one} and {other}"
    if first.transcript is not None and second.transcript is not None:
        cause = other_tokens(first.transcript, second.transcript)
        if cause:
            return cause
    one, other = first.outcome, second.outcome
    if type(one) is not type(other):
        return f"it ended as {type(one).__name__.lower()} and as {type(other).__name__.lower()}"
    if isinstance(one, Completed) and isinstance(other, Completed) and one != other:
        return (
            f"the same tokens were graded otherwise, reward {one.reward:g} and {other.reward:g} (success "
            f"{one.success:g} and {other.success:g}): another grader, or one that is not deterministic"
        )
    return ""


def other_tokens(first: Transcript, second: Transcript) -> str:
    """Return where two token records part; empty if they do not."""
    ours, theirs = first.token_ids, second.token_ids
    length = min(len(ours), len(theirs))
    apart = np.flatnonzero(ours[:length] != theirs[:length])
    at = int(apart[0]) if len(apart) else length
    if len(apart) or len(ours) != len(theirs):
        return _from_token(first, second, at)
    if not np.array_equal(first.mask_array, second.mask_array):
        return "the same tokens, but other ones of them count as sampled"
    apart = np.flatnonzero(first.logprob_array != second.logprob_array)
    if len(apart):
        at = int(apart[0])
        values = f"{first.logprob_array[at]:.6g} and {second.logprob_array[at]:.6g}"
        return f"the same tokens with other log-probs from token {at} on ({values}): {_versions(first, second, at)}"
    return ""


def _from_token(first: Transcript, second: Transcript, at: int) -> str:
    tokens = [str(int(t.token_ids[at])) if at < len(t.token_ids) else "its end" for t in (first, second)]
    where = f"tokens differ from {at} on (turn {_turn(first, at)}; {tokens[0]} and {tokens[1]})"
    sampled = [bool(t.mask_array[at]) for t in (first, second) if at < len(t.mask_array)]
    if not any(sampled):
        return f"{where}: an observation or prompt, so the environment or the prompt is not the same"
    return f"{where}: sampled by the policy, {_versions(first, second, at)}"


def _turn(transcript: Transcript, at: int) -> int:
    return sum(turn.stop <= at for turn in transcript.turns)


def _versions(first: Transcript, second: Transcript, at: int) -> str:
    found = [next((s.version for s in t.spans if s.start <= at < s.stop), None) for t in (first, second)]
    if found[0] != found[1]:
        return f"by version {found[0]} and by version {found[1]}"
    return (
        f"both by version {found[0]}: other weights under that number, or an engine whose arithmetic depends on what "
        f"else is in its batch"
    )


def _other_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    ours, theirs = dict(_flat(first)), dict(_flat(second))
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in OF_A_RUN and ours.get(name) != theirs.get(name):
            yield name, (ours.get(name), theirs.get(name))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
