"""KeyDoor: a hunt for a key and then a door on an open grid, the demo's multi-turn task family.

The agent sees only a compass hint (`find key north east`, `key at`, `door south`) and answers with one action
(`go north`, `take`, `open`). Reward is 1 when the door was opened with the key inside the turn limit, else 0.

Invariants: a payload and a seed decide a layout, so siblings meet the same hunt and a retry meets it again; agent,
key and door stand on distinct cells; a layout belongs to exactly one split, by a hash of its cells, so nothing seen
in training can appear in an evaluation. A malformed action ends the episode.

It does not know models, tokens, processes or clocks. Who acts well or badly is in `keydoor_policies`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar, Final

from infra.envhost.environment import StepResult
from schemas.messages import Rollout, Task
from stages.handlers.base import Action, Grade, Invalid, Opening
from stages.handlers.rules import Rule

Cell = tuple[int, int]

MOVES: Final[Mapping[str, Cell]] = {"north": (-1, 0), "south": (1, 0), "east": (0, 1), "west": (0, -1)}
"""The directions and their steps as (row, column); row 0 is the northern edge."""

ACTIONS: Final = (*(f"go {name}" for name in MOVES), "take", "open")
"""Every well-formed action."""

SPLITS: Final = ("train", "held_out")
"""Where a layout may belong."""

HELD_OUT_EVERY: Final = 5
"""One layout in this many is held out."""

DEFAULT_SIZE: Final = 5
"""Rows and columns of the grid."""

DEFAULT_TURNS: Final = 14
"""Turns after which a hunt has failed; the mean optimum on the default grid is about 8.7."""

SIZE_LIMITS: Final = (3, 32)
"""Smallest and largest grid: a smaller one has too few layouts to split."""

TURNS_LIMITS: Final = (1, 1000)
"""Fewest and most turns a payload may allow."""

PROMPT_VERSION: Final = "keydoor.1"
"""Names the file of the system prompt; a changed prompt is a new file."""

PROMPT: Final = (resources.files(__package__) / "prompts" / f"{PROMPT_VERSION}.txt").read_text("utf-8").strip()
"""The system prompt."""

WORDS: Final[tuple[str, ...]] = tuple(
    sorted({*PROMPT.split(), *MOVES, "find", "key", "door", "at", "opened", "go", "take", "open"})
)
"""Every word of prompt, hints and actions: the vocabulary of a word-level model of this family."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything stands when the hunt begins."""

    size: int
    """Rows and columns."""
    agent: Cell
    """Where the agent starts, as (row, column)."""
    key: Cell
    """Where the key lies until it is taken."""
    door: Cell
    """Where the door stands."""

    def __post_init__(self) -> None:
        """Refuse cells that coincide or lie outside the grid."""
        cells = (self.agent, self.key, self.door)
        outside = [cell for cell in cells if not all(0 <= axis < self.size for axis in cell)]
        if outside:
            raise ValueError(
                f"keydoor: cells {outside} lie outside a {self.size}x{self.size} grid; rows and columns start at 0"
            )
        if len(set(cells)) < len(cells):
            raise ValueError(f"keydoor: agent, key and door must stand on distinct cells, got {cells}")

    @property
    def split(self) -> str:
        """The one split this layout belongs to."""
        cells = (self.size, *self.agent, *self.key, *self.door)
        digest = hashlib.blake2b(",".join(map(str, cells)).encode(), digest_size=8).digest()
        return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0 else "train"

    @property
    def optimum(self) -> int:
        """The fewest turns in which this hunt can end: both walks, one `take`, one `open`."""
        return _distance(self.agent, self.key) + _distance(self.key, self.door) + 2


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def layout_of(payload: Mapping[str, Any], seed: int) -> Layout:
    """The layout a payload names: its explicit cells, or a draw from its split.

    `index` makes the draw the same for every seed, which is how an evaluation meets the same hunts twice; without
    it the task's seed decides.
    """
    size = _integer(payload, "size", DEFAULT_SIZE, SIZE_LIMITS)
    if any(name in payload for name in ("agent", "key", "door")):
        return Layout(size=size, agent=_cell(payload, "agent"), key=_cell(payload, "key"), door=_cell(payload, "door"))
    split = payload.get("split", "train")
    if split not in SPLITS:
        raise ValueError(f"keydoor: unknown split {split!r}; known: {', '.join(SPLITS)}")
    source = f"index {payload['index']}" if "index" in payload else f"seed {seed}"
    # A string seeds Random by its SHA-512, so the draw is the same in every process.
    rng = random.Random(f"keydoor {size} {split} {source}")
    cells = [(row, column) for row in range(size) for column in range(size)]
    # Ends soon: the smallest grid already has 504 layouts, and each split holds its share of them.
    while True:
        agent, key, door = rng.sample(cells, 3)
        layout = Layout(size=size, agent=agent, key=key, door=door)
        if layout.split == split:
            return layout


def _integer(payload: Mapping[str, Any], name: str, default: int, limits: tuple[int, int]) -> int:
    value = payload.get(name, default)
    low, high = limits
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"keydoor: {name} must be an integer from {low} to {high}, got {value!r}")
    return value


def _cell(payload: Mapping[str, Any], name: str) -> Cell:
    match payload.get(name):
        case [int(row), int(column)] | (int(row), int(column)):
            return row, column
        case other:
            raise ValueError(
                f"keydoor: {name} must be [row, column], got {other!r}; explicit layouts give agent, key and door"
            )


class Hunt:
    """One running hunt: the environment of a task, living in the environment host."""

    fast = True
    """Every call takes microseconds: the host need not hand it to a thread."""

    def __init__(self, layout: Layout, turn_limit: int) -> None:
        self.layout = layout
        self.turn_limit = turn_limit
        self.reset()

    def reset(self) -> str:
        """Put everything back where it began; returns the first hint."""
        self.agent = self.layout.agent
        self.has_key = False
        self.opened = False
        self.turns = 0
        return self.hint

    @property
    def done(self) -> bool:
        """Whether the hunt has ended, by success or by the turn limit."""
        return self.opened or self.turns >= self.turn_limit

    @property
    def target(self) -> Cell:
        """The cell the hint points to now."""
        return self.layout.door if self.has_key else self.layout.key

    @property
    def bearings(self) -> tuple[str, ...]:
        """The directions that bring the agent nearer to the target; empty when it stands there."""
        rows, columns = self.target[0] - self.agent[0], self.target[1] - self.agent[1]
        steps = {"north": -rows, "south": rows, "east": columns, "west": -columns}
        return tuple(name for name, distance in steps.items() if distance > 0)

    @property
    def hint(self) -> str:
        """What the agent is told: the target and where it lies."""
        if self.opened:
            return "door opened"
        if self.has_key:
            return " ".join(["door", *(self.bearings or ("at",))])
        return " ".join(["find", "key", *self.bearings]) if self.bearings else "key at"

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Do one action; a useless one (a wall, `take` without a key in reach) costs its turn and changes nothing."""
        if self.done:
            raise ValueError(f"keydoor: the hunt ended after {self.turns} turns; reset it before another step")
        name = action["name"]
        in_place = not self.bearings
        if name == "go":
            self._walk(action["arguments"]["direction"])
        elif name == "take":
            self.has_key = self.has_key or in_place
        elif name == "open":
            self.opened = self.has_key and in_place
        else:
            raise ValueError(f"keydoor: unknown action {name!r}; known: go, take, open")
        self.turns += 1
        return StepResult(observation=self.hint, done=self.done)

    def _walk(self, direction: str) -> None:
        rows, columns = MOVES[direction]
        row, column = self.agent[0] + rows, self.agent[1] + columns
        if 0 <= row < self.layout.size and 0 <= column < self.layout.size:
            self.agent = (row, column)

    def verdict(self) -> dict[str, Any]:
        """What grading needs of the state at the end."""
        return {
            "opened": self.opened,
            "has_key": self.has_key,
            "turns": self.turns,
            "optimum": self.layout.optimum,
            "split": self.layout.split,
        }

    def close(self) -> None:
        """Nothing to release: a hunt is plain memory."""


def any_action(_seen: Sequence[str], dice: random.Random) -> str:
    """Say any well-formed action."""
    return dice.choice(ACTIONS)


def by_compass(seen: Sequence[str], _dice: random.Random) -> str:
    """Walk the first direction of the hint; in place, `take` the key and `open` the door."""
    match seen[-1].split():
        case ["key", "at"]:
            return "take"
        case ["door", "at"]:
            return "open"
        case words:
            return f"go {next(word for word in words if word in MOVES)}"


class KeyDoor:
    """The handler of the family: how a hunt opens, what its words mean, what it is worth."""

    family = "keydoor"
    """Name by which tasks ask for it."""
    prompt_version = PROMPT_VERSION
    """Version of its prompt."""
    rules: ClassVar[Mapping[str, Rule]] = {"random": any_action, "compass": by_compass}
    """Whom a trained policy is compared with."""
    invalid_ends = True
    """A malformed action ends the episode, so that the format is worth learning."""

    def environment(self, payload: Mapping[str, Any], seed: int) -> Hunt:
        """The hunt that a task names. Bad payloads raise ValueError, which says what was found."""
        return Hunt(layout_of(payload, seed), _integer(payload, "turns", DEFAULT_TURNS, TURNS_LIMITS))

    def init(self, task: Task, observation: str) -> Opening:
        """The system prompt and the first hint; actions are words, so there are no tools."""
        return Opening(messages=({"role": "system", "content": PROMPT}, {"role": "user", "content": observation}))

    def act(self, text: str) -> Action | Invalid:
        """Read exactly one action; anything around it makes the answer malformed."""
        match text.split():
            case ["go", direction] if direction in MOVES:
                return Action(text=text, name="go", arguments={"direction": direction})
            case ["take" | "open" as name]:
                return Action(text=text, name=name, arguments={})
            case _:
                reason = "expected one of: " + ", ".join([*(f"go {name}" for name in MOVES), "take", "open"])
                return Invalid(reason=reason, text=text)

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """1 for the opened door, else 0: a hunt has no partial credit, so that learning it takes exploration."""
        opened = float(bool(verdict["opened"]))
        return Grade(components={"opened": opened}, success=opened)
