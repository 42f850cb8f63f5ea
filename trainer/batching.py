"""Token records -> tensors: which tokens are trained, at what temperature they were drawn, and who shares a pass.

A transcript of k segments becomes k sequences with one advantage, or one per turn; each sampled token is in exactly one
of them. A sequence keeps, for each sampled token, its turn, its recorded log-prob, the temperature it was drawn at,
its lag, and whether it is trained on. Micro-batches only split a sum, so they never change the gradient. There are two
ways to fill them:

    buckets   sequences of like length, each in a row of its own, padded on the right: under causal attention no real
              token looks at what follows it, so no mask is needed and the padding's value does not matter
    packing   sequences one behind the other in a single row, with positions that begin anew at each: nothing is padded,
              and the model keeps them apart by their positions (`forward.py` makes sure that it does)

This file does not know groups or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from infra.errors import RollmillError
from infra.inference.base import PROCESSED_LOGPROBS
from schemas.transcript import SampledSpan, Transcript
from trainer.terminal import version_of

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class UntrainableTranscript(RollmillError):
    """Tokens were sampled in a way whose log-probs cannot be compared with the trainer's."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenSequence:
    """One token prefix; P sampled tokens in T."""

    tokens: Ints
    """Ids, (T,)."""
    positions: Ints
    """Indices of the sampled tokens, (P,), each at least 1."""
    rollout: Floats
    """Log-prob at sampling, (P,)."""
    temperature: Floats
    """Temperature each was drawn at, (P,)."""
    lag: Ints
    """Trainer steps between sampling and use, (P,)."""
    trained: Floats
    """1.0 where the token is trained on, (P,)."""
    advantage: float | Floats
    """Of all sampled tokens, or of each, (P,)."""
    turns: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Turn of the episode in which each was sampled, (P,); empty where nobody asks."""
    share: float = 1.0
    """Its part of the sample's trained tokens; less than 1 where a history was rewritten and a sample has segments."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained_count(self) -> float:
        """Tokens trained on."""
        return float(self.trained.sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch:
    """Sequences of one forward pass; B of them in L rows of length T, with P sampled tokens in all."""

    members: tuple[int, ...]
    """Which sequences, as indices into the list that was batched."""
    ids: torch.Tensor
    """(L, T): a row per sequence, padded on the right, or one row for all."""
    positions: torch.Tensor | None
    """Where each id stands in its sequence, (L, T), if a row holds several."""
    rows: torch.Tensor
    """Sequence of each sampled token, as index into `members`, (P,)."""
    lines: torch.Tensor
    """Row of `ids` that it is in, (P,)."""
    columns: torch.Tensor
    """Place in that row whose logits predict it, (P,)."""
    targets: torch.Tensor
    """Its id, (P,)."""
    end_lines: torch.Tensor
    """Row of the last token of each sequence, (B,)."""
    ends: torch.Tensor
    """Its place in that row, (B,)."""
    temperature: torch.Tensor
    """(P,)."""
    rollout: torch.Tensor
    """(P,)."""
    lag: torch.Tensor
    """(P,)."""
    trained: torch.Tensor
    """(P,)."""
    advantages: torch.Tensor
    """(P,)."""
    equal: torch.Tensor
    """What each trained token counts if every sample counts the same: 1 / (trained tokens of its sample), (P,)."""

    def by_member(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return values of the sampled tokens, (P,), by sequence."""
        counts = torch.bincount(self.rows.cpu(), minlength=len(self.members)).tolist()
        return dict(zip(self.members, torch.split(values, counts), strict=True))


def sequences(
    transcript: Transcript,
    advantage: float | Floats,
    *,
    lag: Callable[[int], int],
    max_lag: int,
    vocabulary: int,
    trained: bool = True,
    tail: bool = False,
) -> list[TokenSequence]:
    """Return the sequences of one sample; none if it holds no sampled token.

    Args:
        transcript: the token record.
        advantage: of the sample, or of each of its turns.
        lag: version -> trainer steps since.
        max_lag: tokens with a larger lag are not trained on.
        vocabulary: number of ids the model knows.
        trained: train on the tokens at all.
        tail: keep what follows the last sampled token, where the state at the end of the record is asked for.

    Raises:
        UntrainableTranscript: the record cannot be trained on by this model, or by any.
    """
    ids = transcript.token_ids.astype(np.int64)
    if len(ids) and int(ids.max()) >= vocabulary:
        raise UntrainableTranscript(f"token id {int(ids.max())} in a vocabulary of {vocabulary}: another tokenizer")
    temperature = np.ones(len(ids), dtype=np.float32)
    lags = np.zeros(len(ids), dtype=np.int64)
    for span in transcript.spans:
        _check_span(span)
        temperature[span.start : span.stop] = span.sampling.temperature
        lags[span.start : span.stop] = lag(version_of(span))
    turns = _turn_of_each(transcript)
    bounds = [*transcript.segments, len(ids)]
    found = []
    for start, stop in pairwise(bounds):
        positions = np.flatnonzero(transcript.mask_array[start:stop]).astype(np.int64)
        if not len(positions):
            continue
        # Observations after the last sampled token change nothing that is trained.
        last = stop - start if tail and stop == len(ids) else int(positions[-1]) + 1
        here = start + positions
        found.append(
            TokenSequence(
                tokens=ids[start : start + last],
                positions=positions,
                rollout=transcript.logprob_array[here],
                temperature=temperature[here],
                lag=lags[here],
                trained=((lags[here] <= max_lag) & trained).astype(np.float32),
                advantage=_of_tokens(advantage, turns[here]),
                turns=turns[here],
            )
        )
    total = sum(sequence.trained_count for sequence in found)
    return [replace(sequence, share=sequence.trained_count / total) for sequence in found] if total else found


def _turn_of_each(transcript: Transcript) -> Ints:
    """Return the turn that each token of a record was sampled in, (T,); -1 where it was sampled in none."""
    turns = np.full(len(transcript.mask), -1, dtype=np.int64)
    for number, turn in enumerate(transcript.turns):
        turns[turn.sampled : turn.stop] = number
    return turns


def _of_tokens(advantage: float | Floats, turns: Ints) -> float | Floats:
    values = np.asarray(advantage, dtype=np.float32)
    if not values.ndim:
        return float(values)
    if turns.min() < 0 or turns.max() >= len(values):
        raise UntrainableTranscript(f"tokens were sampled outside of the {len(values)} turns that have an advantage")
    return values[turns]


def _check_span(span: SampledSpan) -> None:
    sampling = span.sampling
    if span.logprobs_mode != PROCESSED_LOGPROBS:
        raise UntrainableTranscript(
            f"log-probs of mode {span.logprobs_mode!r}: start the engine with --logprobs-mode {PROCESSED_LOGPROBS}"
        )
    if sampling.temperature <= 0 or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        raise UntrainableTranscript(
            f"tokens drawn with {sampling}: the trainer can only divide logits by a temperature above 0; sample "
            f"training rollouts with top_p = 1, top_k = 0, min_p = 0"
        )


def micro_batches(
    batch: Sequence[TokenSequence],
    micro_tokens: int,
    chosen: Iterable[int] | None = None,
    *,
    packed: bool = False,
    device: str = "cpu",
) -> list[MicroBatch]:
    """Split sequences into passes of at most `micro_tokens` tokens each, padding included.

    A sequence longer than that has a pass of its own.

    Args:
        batch: all sequences.
        micro_tokens: tokens per pass.
        chosen: which of them; all unless given.
        packed: put sequences one behind the other instead of below each other.
        device: where the tensors live.
    """
    indices = range(len(batch)) if chosen is None else chosen
    by_length = sorted(indices, key=lambda i: (len(batch[i]), i))
    passes = _packs(batch, by_length, micro_tokens) if packed else _buckets(batch, by_length, micro_tokens)
    return [_tensors([batch[i] for i in members], tuple(members), device, packed=packed) for members in passes]


def _buckets(batch: Sequence[TokenSequence], by_length: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Return passes of like length, each padded to its longest sequence."""
    passes: list[list[int]] = []
    for index in by_length:
        if passes and (len(passes[-1]) + 1) * len(batch[index]) <= micro_tokens:
            passes[-1].append(index)
        else:
            passes.append([index])
    return passes


def _packs(batch: Sequence[TokenSequence], by_length: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Return passes without padding: each sequence, the longest first, goes where it fits first."""
    passes: list[list[int]] = []
    left: list[int] = []
    for index in reversed(by_length):
        length = len(batch[index])
        place = next((i for i, room in enumerate(left) if length <= room), None)
        if place is None:
            place = len(passes)
            passes.append([])
            left.append(micro_tokens)
        passes[place].append(index)
        left[place] -= length
    return passes


@dataclass(frozen=True, eq=False, kw_only=True)
class _Places:
    """Where the tokens of B sequences lie in a pass."""

    ids: Ints
    """(L, T)."""
    positions: Ints | None
    """(L, T)."""
    lines: Ints
    """Row of each sequence, (B,)."""
    starts: Ints
    """Place of its first token in that row, (B,)."""


def _padded(batch: Sequence[TokenSequence]) -> _Places:
    ids = np.zeros((len(batch), max(map(len, batch))), dtype=np.int64)
    for row, sequence in enumerate(batch):
        ids[row, : len(sequence)] = sequence.tokens
    return _Places(ids=ids, positions=None, lines=np.arange(len(batch)), starts=np.zeros(len(batch), dtype=np.int64))


def _packed(batch: Sequence[TokenSequence]) -> _Places:
    lengths = np.array([len(sequence) for sequence in batch])
    return _Places(
        ids=np.concatenate([sequence.tokens for sequence in batch])[None],
        positions=np.concatenate([np.arange(length) for length in lengths])[None],
        lines=np.zeros(len(batch), dtype=np.int64),
        starts=np.cumsum(lengths) - lengths,
    )


def _tensors(batch: Sequence[TokenSequence], members: tuple[int, ...], device: str, *, packed: bool) -> MicroBatch:
    places = _packed(batch) if packed else _padded(batch)
    rows = np.repeat(np.arange(len(batch)), [len(s.positions) for s in batch])
    lines = places.lines[rows]
    at = places.starts[rows] + np.concatenate([s.positions for s in batch])

    def tensor(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        members=members,
        ids=tensor(places.ids),
        positions=None if places.positions is None else tensor(places.positions),
        rows=tensor(rows),
        lines=tensor(lines),
        columns=tensor(at - 1),
        targets=tensor(places.ids[lines, at]),
        end_lines=tensor(places.lines),
        ends=tensor(places.starts + np.array([len(s) - 1 for s in batch])),
        temperature=tensor(np.concatenate([s.temperature for s in batch])),
        rollout=tensor(np.concatenate([s.rollout for s in batch])),
        lag=tensor(np.concatenate([s.lag for s in batch])),
        trained=tensor(np.concatenate([s.trained for s in batch])),
        advantages=tensor(np.concatenate([_one_each(s.advantage, len(s.positions)) for s in batch])),
        equal=tensor(
            np.concatenate([s.trained * s.share / max(s.trained_count, 1.0) for s in batch]).astype(np.float32)
        ),
    )


def _one_each(advantage: float | Floats, count: int) -> Floats:
    return np.broadcast_to(np.asarray(advantage, dtype=np.float32), count)
