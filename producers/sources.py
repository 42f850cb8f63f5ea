"""Task sources by description: the `[tasks]` section of RUN.toml.

    [tasks]                          [tasks]
    jsonl = "train.jsonl"            family = "keydoor"
    repeat = true                    payload = { size = 5 }

The section is checked here and nowhere else; what its tasks mean is the family's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from infra.errors import ConfigError
from producers.generated import GeneratedSource
from producers.jsonl import JsonlSource
from producers.source import TaskSource
from schemas.message import Part
from schemas.messages import TASK_RANGES, Budgets
from schemas.transcript import Repetition, Sampling, sampling_flaw

Limit = Annotated[int, msgspec.Meta(ge=1, le=TASK_RANGES["max_sampled_tokens"][1])]


class Described(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `[tasks]` may say."""

    jsonl: str | None = None
    """File of instances, relative to RUN.toml."""
    repeat: bool = True
    """Pass the file again and again."""
    family: str | None = None
    """Family that generates its instances."""
    payload: dict[str, Any] = {}
    """Payload of every generated instance; `index` is added."""
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of generated instances; endless if absent."""
    name: str | None = None
    """The source's name in group ids."""
    max_tokens: Limit = 256
    """Most tokens of one turn."""
    max_sampled_tokens: Limit = 4096
    """Most sampled tokens of an episode."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Token ids that end a turn where they were sampled one behind the other."""
    repetition: Repetition | None = None
    """Which answers count as loops, and end their episode; none unless given."""
    budgets: Budgets = Budgets()
    """Time inside each stage."""

    def sampling(self, temperature: float) -> Sampling:
        """Return how the policy samples at a temperature."""
        return Sampling(
            temperature=temperature,
            max_tokens=self.max_tokens,
            stop_sequences=self.stop_sequences,
            repetition=self.repetition,
        )


def describe(section: dict[str, Any], where: str = "tasks") -> Described:
    """Return a checked section of tasks. Raises ConfigError.

    Args:
        section: what it says.
        where: its name, for errors.
    """
    try:
        found = msgspec.convert(section, Described)
        _require_known(section, "budgets", Budgets)
        _require_known(section, "repetition", Repetition)
        found.budgets.check()
        if (wrong := sampling_flaw(found.sampling(1.0))) is not None:
            raise ConfigError(f"[{where}]: {wrong.removeprefix('sampling.')}")
    except ValueError as error:  # msgspec's ValidationError is one
        text, _, place = str(error).partition(" - at `$.")
        if place.startswith("stop_sequences"):
            text += (
                "; it is a list of lists of token ids, such as [[13, 198]], since one text has many spellings in tokens"
            )
        elif place.startswith("repetition"):
            text += f"; it is a table of {', '.join(Repetition.__struct_fields__)}"
        raise ConfigError(f"[{where}]: {place.removesuffix('`')}: {text}" if place else f"[{where}]: {text}") from error
    return found


def _require_known(section: dict[str, Any], name: str, kind: type[Part]) -> None:
    """Raise ValueError for a misspelt field of a part; messages, which share the type, may have more."""
    if unknown := section.get(name, {}).keys() - set(kind.__struct_fields__):
        raise ValueError(f"{name} has unknown fields {sorted(unknown)}; it has {', '.join(kind.__struct_fields__)}")


def make_source(described: Described, folder: Path, where: str = "tasks") -> TaskSource:
    """Return the source that a section of tasks describes.

    Args:
        described: the section.
        folder: relative paths in it start here.
        where: its name, for errors.

    Raises:
        ConfigError: it describes no source, or two.
    """
    if described.jsonl and not described.family:
        return JsonlSource(folder / described.jsonl, name=described.name, repeat=described.repeat)
    if described.family and not described.jsonl:
        return GeneratedSource(described.family, described.payload, name=described.name, count=described.count)
    raise ConfigError(f"[{where}] needs either `jsonl` (a file) or `family` (with `payload`), and not both")
