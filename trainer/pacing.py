"""Which admitted groups are on their way, when each was let out, and whether the next step must wait for one of them.

Everything here follows from the log and the decisions before, never from `control` or a clock:

* given out: after s steps and r resolved groups the credit admits numbers below r + (max_lag + 1) * groups; it never
  falls. A group is *born* at the number of steps made when its number was first below that.
* started: numbers below the highest one that an accepted record carries, and given out. The feeder publishes in order
  and awaits each group, so a number that was met means that all lower ones are in the log; a number that was given out
  and never met may not exist at all (the source has ended), and nobody must wait for it.
* alive: given out and not decided.

Under `late = wait` a group is sampled by the weights of its birth or by later ones (`credit.py`), so it must be used by
step born + max_lag + 1. A step uses the complete groups with the lowest numbers. `must_wait` holds step k while a
started, incomplete group with a lower number than the step's last one would be left behind such that more groups born
by some step j stay alive than the steps up to j + max_lag + 1 can use:

    alive after step k, born by j  >  groups * (j + max_lag + 1 - k)

What is left unheld is always usable in time: as long as no such group is passed over, the steps take the oldest first,
and the credit never lets out more than max_lag + 1 batches. Nothing is held for a group that is complete, so a step
waits for records only, and the reaper ends every sample. Where the rules became stricter on a resume, what is too late
already is masked, and waited for no longer than until it has ended. Foreign groups have no number: nothing is waited
for on their account, and their late tokens are masked.
"""

from __future__ import annotations

from collections.abc import Collection

from schemas.message import Part


class PacingState(Part, frozen=True, kw_only=True):
    """What must be remembered of it."""

    lowest: int
    """Every admission number below is decided."""
    decided: tuple[int, ...] = ()
    """Numbers above that are decided."""
    seen: int = 0
    """One more than the highest number that an accepted record carried."""
    given: tuple[tuple[int, int], ...] = ()
    """(steps made, numbers below this were given out by then), oldest first."""


class Pacing:
    """The admission numbers of one run."""

    def __init__(self, state: PacingState) -> None:
        self._lowest = state.lowest
        self._decided = set(state.decided)
        self._seen = state.seen
        self._given: list[tuple[int, int]] = [(steps, limit) for steps, limit in state.given]

    def state(self) -> PacingState:
        """Return what must be remembered now."""
        return PacingState(
            lowest=self._lowest, decided=tuple(sorted(self._decided)), seen=self._seen, given=tuple(self._given)
        )

    def give(self, steps: int, limit: int) -> None:
        """Take note that the numbers below a limit were given out after so many steps."""
        if limit <= max((given for _, given in self._given), default=0):
            return
        if self._given and self._given[-1][0] == steps:
            self._given.pop()
        self._given.append((steps, limit))

    def meet(self, admission: int | None) -> None:
        """Take note of a number that an accepted record carries."""
        if admission is not None:
            self._seen = max(self._seen, admission + 1)

    def decide(self, admission: int | None) -> None:
        """Take note that a group is decided."""
        if admission is None or admission < self._lowest:
            return
        self._decided.add(admission)
        while self._lowest in self._decided:
            self._decided.remove(self._lowest)
            self._lowest += 1
        # Numbers that all lie below `lowest` were born at steps that nobody asks about any more.
        while len(self._given) > 1 and self._given[0][1] <= self._lowest:
            del self._given[0]

    def must_wait(
        self, step: int, chosen: Collection[int], kept: Collection[int], *, groups: int, max_lag: int, foreign: bool
    ) -> bool:
        """Tell whether a step would leave a started group behind that could not be used in time.

        Args:
            step: number of the step.
            chosen: admission numbers of its groups.
            kept: admission numbers of all complete groups that wait for their step, the chosen ones too.
            groups: groups that a step uses.
            max_lag: most steps between the weights that sampled a token and those it trains.
            foreign: the step has a group without a number: such groups come after all others.
        """
        ceiling = self._seen if foreign else max(chosen, default=0)
        alive = [
            number
            for number in range(self._lowest, self._given[-1][1] if self._given else 0)
            if number not in self._decided and number not in chosen
        ]
        behind = [number for number in alive if number < min(ceiling, self._seen) and number not in kept]
        if not behind:
            return False
        oldest = min(behind)
        for born, limit in self._given:
            if limit > oldest and sum(number < limit for number in alive) > groups * (born + max_lag + 1 - step):
                return True
        return False
