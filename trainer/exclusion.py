"""Who is left out: samples that ended without a grade, and groups dropped as late, by family and length.

Both starve what is slow: a long episode meets more limits and lags more. A group's length is the mean of its graded
siblings' sampled tokens; a sibling that has no grade has no tokens either, and counts where its siblings do. Deciles
are those of the groups seen lately. For people only: nothing here decides anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque

import numpy as np

from schemas.telemetry import MetricPoint
from trainer.group import Group

WINDOW = 1_000
"""Groups over which shares and deciles are taken."""

ALARM_SHARE = 0.05
"""Above this share of samples without a grade the baselines no longer stand for the tasks."""

ALARM_SAMPLES = 200
"""No alarm before so many samples have ended: of few samples a share says nothing."""

UNKNOWN = "unknown"
"""Length of a group none of whose siblings was graded."""

Place = tuple[str, str]
"""(family, length: the decile from 0 to 9)."""


class Exclusion:
    """Counts what was left out."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[tuple[Place, int, int]] = deque(maxlen=WINDOW)
        """(place, siblings without a grade, siblings) of the last groups."""
        self._late: Counter[Place] = Counter()
        self._raised = False

    def take(self, group: Group, *, late: bool = False) -> None:
        """Take a complete group, kept or dropped."""
        place = self._place(group)
        self._recent.append((place, group.excluded, group.excluded + len(group.completed)))
        self._late[place] += late

    def share(self) -> float:
        """Return the share of the last samples that ended without a grade."""
        siblings = sum(count for _, _, count in self._recent)
        return sum(excluded for _, excluded, _ in self._recent) / siblings if siblings else 0.0

    def by_place(self) -> dict[Place, float]:
        """Return that share for each family and length."""
        sums: defaultdict[Place, list[int]] = defaultdict(lambda: [0, 0])
        for place, excluded, siblings in self._recent:
            sums[place][0] += excluded
            sums[place][1] += siblings
        return {place: excluded / siblings for place, (excluded, siblings) in sorted(sums.items())}

    def alarm(self) -> str | None:
        """Return a sentence when the share has come to lie above the bound; once each time."""
        enough = sum(count for _, _, count in self._recent) >= ALARM_SAMPLES
        above = enough and self.share() > ALARM_SHARE
        raised, self._raised = self._raised, above
        if not above or raised:
            return None
        (family, length), worst = max(self.by_place().items(), key=lambda item: item[1])
        return (
            f"{self.share():.1%} of the last samples failed, expired or were cancelled (alarm above "
            f"{ALARM_SHARE:.0%}); worst is family {family!r} at length decile {length} with {worst:.1%}. Their "
            f"outcomes name the causes"
        )

    def points(self, at_ms: int, step: int) -> list[MetricPoint]:
        """Return the metrics since the last call."""
        late, self._late = self._late, Counter()

        def point(name: str, value: float, place: Place) -> MetricPoint:
            labels = {"family": place[0], "length": place[1]}
            return MetricPoint(name=name, value=value, at_ms=at_ms, step=step, labels=labels)

        return [
            MetricPoint(name="trainer.excluded_recent_share", value=self.share(), at_ms=at_ms, step=step),
            MetricPoint(name="trainer.excluded_alarm", value=float(self._raised), at_ms=at_ms, step=step),
            *(point("trainer.excluded_place_share", share, place) for place, share in self.by_place().items()),
            *(point("trainer.groups_late", float(count), place) for place, count in sorted(late.items()) if count),
        ]

    def _place(self, group: Group) -> Place:
        if not group.completed:
            return group.family, UNKNOWN
        length = float(np.mean([sum(tokens for _, tokens in t.sampled) for t in group.completed]))
        self._lengths.append(length)
        ordered = sorted(self._lengths)
        return group.family, str(10 * bisect_left(ordered, length) // len(ordered))
