"""Builds a puzzle of any reasoning-gym generator by name, the same in every process.

reasoning-gym draws from seeded generators, but a few of them iterate over sets of texts, whose order changes with
the hash seed of the process; those are put in order here, and a scorer that takes any answer is replaced. A test
compares the questions of all generators between processes with different hash seeds. The package is imported when the
first puzzle is asked for: it takes seconds.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any, Final

NAMES_SHOWN: Final = 20
"""Known names listed in an error."""

SEED_RANGE: Final = 2**31
"""numpy's seeds, which some generators use, are small; a task's is taken modulo this, so that `seed + index` fits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Puzzle:
    """One question and how to score an answer to it."""

    question: str
    """What is asked."""
    expected: str | None
    """An answer that scores 1, where the generator gives one."""
    entry: dict[str, Any]
    """The generator's own record, which its scorer wants back."""


def generators() -> list[str]:
    """Return the names of all generators, sorted."""
    return sorted(_gym().factory.DATASETS)


def dataset(generator: Any, config: Mapping[str, Any], seed: int, index: int) -> Any:
    """Return the generator's data set, which makes puzzles and scores answers.

    Raises:
        ValueError: the generator is unknown, or it refuses the configuration.
    """
    known = _gym().factory.DATASETS
    if not isinstance(generator, str) or generator not in known:
        raise ValueError(_unknown(generator))
    if "seed" in config:
        raise ValueError("reasoning: the config must not hold `seed`; write it beside `config` in the payload")
    arguments = {"size": index + 1, **config, "seed": seed % SEED_RANGE}
    if generator == "composite":
        arguments["datasets"] = [_part(part) for part in config.get("datasets", ())]
    try:
        made = _gym().create_dataset(generator, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        fields = ", ".join(field.name for field in dataclasses.fields(known[generator][1]))
        raise ValueError(
            f"reasoning: {generator} refuses the config {dict(config)}: {error}; its fields: {fields}"
        ) from error
    if index >= len(made):
        raise ValueError(f"reasoning: index {index} is beyond the config's size {len(made)}; leave `size` out")
    _repair(generator, made)
    return made


def puzzle(generator: Any, config: Mapping[str, Any], seed: int, index: int) -> Puzzle:
    """Return one puzzle.

    Raises:
        ValueError: the generator is unknown, or it refuses the configuration.
    """
    entry = dataset(generator, config, seed, index)[index]
    expected = entry["answer"]
    return Puzzle(question=entry["question"], expected=None if expected is None else str(expected), entry=entry)


@cache
def _gym() -> Any:
    with warnings.catch_warnings():
        # A package below it compares with `is`, which is said once, when it is compiled.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym  # noqa: PLC0415 - seconds, and only workers that meet this family need it
    return reasoning_gym


def _unknown(generator: Any) -> str:
    names = generators()
    close = difflib.get_close_matches(str(generator), names)
    guess = f"; did you mean {' or '.join(close)}?" if close else "."
    shown = ", ".join(names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return f"reasoning: unknown generator {generator!r}{guess} Known: {shown} and {more} more ({len(names)} in all)"


def _part(part: Any) -> Any:
    from reasoning_gym.composite import DatasetSpec  # noqa: PLC0415 - as above

    try:
        return DatasetSpec(name=part["name"], weight=part.get("weight", 1.0), config=dict(part.get("config", {})))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"reasoning: composite wants datasets of name, weight and config, found {part!r}") from error


class _Ordered(AbstractSet[str]):
    """A set of texts that iterates in a fixed order, also after a difference."""

    def __init__(self, items: Iterable[str]) -> None:
        self._items = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _order_letters(made: Any) -> None:
    made.letters = _Ordered(sorted(made.letters))


def _order_monomials(made: Any) -> None:
    draw = made._get_monomials  # noqa: SLF001 - the one place where its order is lost
    made._get_monomials = lambda rng: sorted(draw(rng), key=str)  # noqa: SLF001


def _order_neighbours(made: Any) -> None:
    find = made._get_neighbors  # noqa: SLF001 - as above
    made._get_neighbors = lambda word, words: sorted(find(word, words))  # noqa: SLF001


def _repair_parts(made: Any) -> None:
    for name, part in made.datasets.items():
        _repair(name, part)


def _compare_answers(made: Any) -> None:
    # Its own scorer compares the truth of two texts, which are both true unless empty.
    made.score_answer = lambda answer, entry: float(str(answer).strip() == entry["answer"])


_REPAIRS: Final[Mapping[str, Callable[[Any], None]]] = {
    "composite": _repair_parts,
    "game_of_life_halting": _compare_answers,
    "isomorphic_strings": _order_letters,
    "polynomial_multiplication": _order_monomials,
    "ransom_note": _order_letters,
    "word_ladder": _order_neighbours,
}
"""Generators that lose their order or accept anything, and what is done about it."""


def _repair(generator: str, made: Any) -> None:
    if repair := _REPAIRS.get(generator):
        repair(made)
