"""One terminal record as the trainer sees it: what decides, apart from the tokens.

Deciding needs numbers, training needs the token record too; replay decides again without keeping any tokens. This
file does not know groups. What cannot be trained on is no completed record when it comes here
(`Trajectory.as_read`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infra.wire import Received
from schemas.batch import content_hash
from schemas.decisions import Member, SampleRef
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.transcript import SampledSpan, Transcript
from trainer.advantages import soft_overlong
from trainer.algorithm_config import Overlong

OTHER_RUN = -1
"""In place of a version: the weights were another run's."""


def version_of(span: SampledSpan) -> int:
    """Return the version of this run's weights that sampled a span; OTHER_RUN if another run's did."""
    return OTHER_RUN if span.weights_of else span.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The end of one sample."""

    offset: int
    """Where the record lies in the run's partition of `trajectories`."""
    group: str
    """Group of the sample."""
    sample: int
    """Sibling number."""
    samples: int
    """Siblings that the group has."""
    admission: int | None
    """The feeder's dense group number; none for a task of a foreign producer."""
    digest: str
    """Digest of the task's payload."""
    content: str
    """SHA-256 of the record's uncompressed wire bytes."""
    completed: bool
    """It was graded; otherwise it failed, was cancelled or expired."""
    family: str = ""
    """Family of its task."""
    row: int = 0
    """Place of its task in its source."""
    phase: int = 0
    """Phase of the curriculum in which its group was admitted."""
    reward: float = 0.0
    """Shaped reward as used in training."""
    success: float = 0.0
    """Unshaped success."""
    truncated: bool = False
    """A limit ended the episode, not the policy or the task."""
    turns: int = 0
    """Turns of the episode."""
    turn_rewards: tuple[float, ...] = ()
    """Process reward of each turn; none where the family gives none."""
    components: tuple[tuple[str, float], ...] = ()
    """(name, value) of what the reward is made of, for people."""
    sampled: tuple[tuple[int, int], ...] = ()
    """(version, sampled tokens), one per span."""
    transcript: Transcript | None = None
    """The token record; none where only the decision is made again."""

    @property
    def ref(self) -> SampleRef:
        """Its name in a decision."""
        return SampleRef(group=self.group, sample=self.sample, offset=self.offset)

    @property
    def member(self) -> Member:
        """Its entry in a batch."""
        return Member(
            group=self.group, sample=self.sample, offset=self.offset, content=self.content, reward=self.reward
        )


def terminal(received: Received[Trajectory], overlong: Overlong | None, *, keep_tokens: bool = True) -> Terminal:
    """Return what the trainer needs to know of a record.

    Args:
        received: the record.
        overlong: punishment to add to the reward.
        keep_tokens: hold on to the token record.
    """
    trajectory, task = received.message, received.message.task
    outcome, transcript = trajectory.outcome, trajectory.transcript
    common = Terminal(
        offset=received.record.offset,
        group=task.group,
        sample=task.sample,
        samples=task.samples,
        admission=task.admission,
        digest=task.payload_digest,
        content=content_hash(received.raw),
        completed=False,
        family=task.family,
        row=task.row,
        phase=task.phase,
    )
    if not isinstance(outcome, Completed):
        return common
    turns = len(transcript.turns) if transcript else 0
    spans = transcript.spans if transcript else ()
    tokens = transcript.sampled_count if transcript else 0
    punishment = soft_overlong(tokens, overlong)
    return replace(
        common,
        completed=True,
        reward=outcome.reward + punishment,
        success=outcome.success,
        truncated=outcome.truncated,
        turns=turns,
        turn_rewards=outcome.turn_rewards,
        components=(*outcome.components.items(), *([("overlong", punishment)] if overlong else [])),
        sampled=tuple((version_of(span), span.stop - span.start) for span in spans),
        transcript=transcript if keep_tokens else None,
    )
