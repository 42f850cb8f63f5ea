"""Which tokens lie in which row of the key-value cache, and who may use them: pure numpy, no model.

A slot is one row of the cache. It holds the ids whose keys and values were computed, in order, and stays as it is when
its request ends, so that the next turn of the episode, whose prompt extends this one, computes only what is new.

Invariants:

- `tokens[slot, :computed[slot]]` are exactly the ids behind the cached keys and values of that slot;
- a busy slot belongs to one request; a free one is only evidence for reuse and may be overwritten;
- only content of the current weights is found again (`forget` at a weight update): a slot that saw two versions
  serves its running request to the end and is worth nothing afterwards.

The longest common prefix is searched over all slots, busy ones too: siblings of a group start with one prompt, and
copying keys is far cheaper than computing them. This file does not know tensors or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schemas.transcript import TokenIds


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where a prompt goes and what of it is there already."""

    slot: int
    """The row of the cache that the request owns from now on."""
    copy_from: int | None
    """Row to copy the first `reused` positions from; None if they lie in `slot` already or nothing is reused."""
    reused: int
    """How many ids of the prompt need no computing; always fewer than all, since the last one gives the logits."""


class SlotTable:
    """Rows of a key-value cache with the tokens they stand for."""

    def __init__(self, slots: int, max_len: int) -> None:
        if slots < 1 or max_len < 2:
            raise ValueError(f"{slots} slots of {max_len} tokens cannot hold a request")
        self.tokens = np.zeros((slots, max_len), dtype=np.int32)
        """Ids by slot and position; beyond `computed` they are not yet in the cache."""
        self.computed = np.zeros(slots, dtype=np.int64)
        """How many positions of each slot are in the cache."""
        self._busy = np.zeros(slots, dtype=bool)
        self._mixed = np.zeros(slots, dtype=bool)
        self._used = np.zeros(slots, dtype=np.int64)
        self._tick = 0

    @property
    def free(self) -> int:
        """Number of slots without a request."""
        return int(len(self._busy) - self._busy.sum())

    def assign(self, prompt: TokenIds) -> Assignment:
        """Take a slot for a prompt, preferring the one that holds most of it; write the prompt into the table.

        Raises:
            LookupError: no slot is free; callers ask `free` first.
        """
        if not self.free:
            raise LookupError("no free slot: ask `free` before `assign`")
        common = self._common_prefix(prompt)
        best = int(common.argmax())
        reused = int(common[best])
        slot = self._place(best, reused)
        copy_from = best if reused and slot != best else None
        self._tick += 1
        self._busy[slot], self._mixed[slot], self._used[slot] = True, False, self._tick
        self.tokens[slot, : len(prompt)] = prompt
        self.computed[slot] = reused
        return Assignment(slot=slot, copy_from=copy_from, reused=reused)

    def release(self, slot: int) -> None:
        """Free a slot; its content stays findable unless two versions of the weights wrote it."""
        self._tick += 1
        self._busy[slot], self._used[slot] = False, self._tick
        if self._mixed[slot]:
            self.computed[slot], self._mixed[slot] = 0, False

    def forget(self) -> None:
        """Make all content unfindable, as after a change of weights; running requests keep theirs."""
        self.computed[~self._busy] = 0
        self._mixed |= self._busy

    def _common_prefix(self, prompt: TokenIds) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return, per slot, how many leading ids it shares with the prompt; the prompt's last id never counts."""
        length = len(prompt) - 1
        if length == 0:
            return np.zeros(len(self.computed), dtype=np.int64)
        differs = self.tokens[:, :length] != prompt[:length]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), length)
        return np.where(self._mixed, 0, np.minimum(first, self.computed))

    def _place(self, best: int, reused: int) -> int:
        """Choose the slot: the one that holds the prefix if nothing else is lost by it, else the least recent."""
        if not self._busy[best] and reused and reused == self.computed[best]:
            return best
        # Empty slots first, then the longest unused; both orders in one key.
        age = np.where(self.computed == 0, 0, self._used)
        age = np.where(self._busy, np.iinfo(np.int64).max, age)
        return int(age.argmin())
