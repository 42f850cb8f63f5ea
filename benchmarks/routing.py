"""Which engine gets a generation: makespan and prefix hits, on simulated engines of unequal speed.

Everything is simulated, time too, so the figures are exact and the same on every machine. An engine shares its speed
among the generations it has (none is faster than alone), computes what it does not know of a prompt ten times as fast
as it samples, and keeps prefixes up to a number of tokens, the one used longest ago leaving first. Episodes come in
groups of eight that begin alike; turns, answers and waits for the environment are heavy-tailed (lognormal, seeded); as
many as a RUN worker's slots are in flight.

- ours: `infra/inference/balance.py` with its defaults, fed with what a client sees.
- the rival: ProRL Agent's heap as its paper and code describe it (arXiv 2603.18815): a job gets the engine with the
  lowest count and stays there; the count goes up by one with each job and never comes down.
- `detail.least_outstanding`: each turn to the engine with the fewest generations, whatever it has computed.

The figure is episodes per simulated second until the last one ends.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any, Protocol

from benchmarks.result import Result
from infra.config import Config
from infra.inference.balance import Ask, Balancer, Choice

SEED = 20_250_701
"""Of the episodes; each round adds its number."""
SPEEDS = (4000.0, 4000.0, 2000.0, 1000.0)
"""Sampled tokens a second of each engine, all its generations together: two new GPUs, an older one, half of one."""
ALONE = 80.0
"""Sampled tokens a second of one generation, however idle its engine is."""
PREFILL_SPEEDUP = 10.0
"""How much faster a token of a prompt is computed than sampled."""
CACHE_TOKENS = 400_000
"""Tokens of prefixes that an engine keeps."""
SIBLINGS = 8
"""Episodes of a group."""
OPENING = (1200, 0.5)
"""Median tokens of an opening, and the deviation of their logarithm."""
TURNS = (8, 0.7)
"""The same for the turns of an episode."""
ANSWER = (150, 0.9)
"""The same for the tokens of an answer."""
OBSERVATION = (200, 0.8)
"""The same for the tokens of what the environment says."""
WAIT_S = (0.5, 1.0)
"""The same for the seconds that the environment takes."""


@dataclass(frozen=True)
class Turn:
    """What one turn takes."""

    prompt: int
    """Tokens of the whole prompt."""
    answer: int
    """Tokens sampled."""
    wait_s: float
    """What the environment takes before it."""


@dataclass(frozen=True)
class Episode:
    """What one episode takes."""

    name: str
    group: str
    opening: int
    """Tokens that its siblings' prompts begin with too."""
    turns: tuple[Turn, ...]


class Router(Protocol):
    """A way to choose."""

    def choose(self, episode: Episode, turn: Turn, now_s: float) -> tuple[int, Any]:
        """Return the number of an engine, and what `done` is to be told."""
        ...

    def done(self, told: Any, turn: Turn, now_s: float) -> None:
        """The turn has ended."""
        ...


class Ours:
    """The product's balancer."""

    def __init__(self, engines: int) -> None:
        self._balancer = Balancer()
        for number in range(engines):
            self._balancer.add(str(number), 0.0)

    def choose(self, episode: Episode, turn: Turn, now_s: float) -> tuple[int, Choice]:
        """Ask it."""
        ask = Ask(episode=episode.name, group=episode.group, prompt=turn.prompt, max_tokens=4096)
        choice = self._balancer.choose(ask, now_s)
        assert choice is not None, "no engine ever leaves"
        return int(choice.engine), choice

    def done(self, told: Choice, turn: Turn, now_s: float) -> None:
        """Tell it."""
        self._balancer.done(told, now_s, turn.answer)


class CountingHeap:
    """The rival: a count per engine that never comes down, and jobs that stay."""

    def __init__(self, engines: int) -> None:
        self._heap = [(0, number) for number in range(engines)]
        self._at: dict[str, int] = {}

    def choose(self, episode: Episode, turn: Turn, now_s: float) -> tuple[int, None]:
        """The engine of the episode; for a new one that with the lowest count."""
        if episode.name not in self._at:
            given, number = self._heap[0]
            heapq.heapreplace(self._heap, (given + 1, number))
            self._at[episode.name] = number
        return self._at[episode.name], None

    def done(self, told: None, turn: Turn, now_s: float) -> None:
        """Nothing is learnt."""


class LeastOutstanding:
    """Each turn where the fewest are in flight."""

    def __init__(self, engines: int) -> None:
        self._in_flight = [0] * engines

    def choose(self, episode: Episode, turn: Turn, now_s: float) -> tuple[int, int]:
        """The first of those with the fewest."""
        number = min(range(len(self._in_flight)), key=self._in_flight.__getitem__)
        self._in_flight[number] += 1
        return number, number

    def done(self, told: int, turn: Turn, now_s: float) -> None:
        """One fewer."""
        self._in_flight[told] -= 1


@dataclass(eq=False)
class _Work:
    episode: Episode
    number: int
    left: float
    told: Any


@dataclass
class Engine:
    """One engine: shared speed, a cache of prefixes."""

    speed: float
    running: list[_Work] = field(default_factory=list)
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    at_s: float = 0.0

    def rate(self) -> float:
        """Return the sampled tokens a second of each generation."""
        return min(ALONE, self.speed / len(self.running)) if self.running else 0.0

    def advance(self, now_s: float) -> None:
        """Work until now."""
        done = self.rate() * (now_s - self.at_s)
        for work in self.running:
            work.left -= done
        self.at_s = now_s

    def ends_s(self) -> float:
        """Return when the next generation ends, as things are."""
        if not self.running:
            return float("inf")
        return self.at_s + max(0.0, min(work.left for work in self.running)) / self.rate()

    def known(self, episode: Episode, prompt: int) -> int:
        """Return how much of a prompt is cached."""
        known = max(self.cache.get(episode.name, 0), min(self.cache.get(episode.group, 0), episode.opening))
        return min(prompt, known)

    def keep(self, episode: Episode, tokens: int) -> None:
        """Keep a prefix, and what its siblings share of it."""
        for whose, size in ((episode.group, episode.opening), (episode.name, tokens)):
            self.cache[whose] = size
            self.cache.move_to_end(whose)
        while sum(self.cache.values()) > CACHE_TOKENS:
            self.cache.popitem(last=False)


@dataclass(frozen=True)
class Played:
    """What became of all episodes."""

    makespan_s: float
    hits: float
    """Share of all tokens of prompts that were cached."""


def make_episodes(groups: int, seed: int) -> list[Episode]:
    """Return the episodes of some groups, in the order in which they begin."""
    draw = random.Random(seed)

    def size(of: tuple[float, float]) -> float:
        return of[0] * draw.lognormvariate(0, of[1])

    found = []
    for group in range(groups):
        opening = 1 + round(size(OPENING))
        for sibling in range(SIBLINGS):
            turns, prompt = [], opening
            for _ in range(max(1, min(40, round(size(TURNS))))):
                turn = Turn(prompt=prompt, answer=1 + min(4000, round(size(ANSWER))), wait_s=size(WAIT_S))
                turns.append(turn)
                prompt += turn.answer + 1 + round(size(OBSERVATION))
            found.append(Episode(f"{group}/{sibling}", f"{group}", opening, tuple(turns)))
    return found


def play(episodes: list[Episode], router: Router, slots: int) -> Played:
    """Play episodes on simulated engines.

    Args:
        episodes: what is played, in this order.
        router: chooses the engines.
        slots: episodes in flight.
    """
    engines = [Engine(speed) for speed in SPEEDS]
    waiting: list[tuple[float, int, Episode, int]] = []
    order, later = count(), iter(episodes)
    now_s, prompts, cached = 0.0, 0, 0

    def begin(episodes: Iterator[Episode], at_s: float) -> None:
        if (episode := next(episodes, None)) is not None:
            heapq.heappush(waiting, (at_s + episode.turns[0].wait_s, next(order), episode, 0))

    for _ in range(slots):
        begin(later, 0.0)
    while waiting or any(engine.running for engine in engines):
        ending = min(engines, key=Engine.ends_s)
        now_s = min(ending.ends_s(), waiting[0][0] if waiting else float("inf"))
        if waiting and waiting[0][0] <= ending.ends_s():
            _, _, episode, number = heapq.heappop(waiting)
            turn = episode.turns[number]
            chosen, told = router.choose(episode, turn, now_s)
            engine = engines[chosen]
            engine.advance(now_s)
            known = engine.known(episode, turn.prompt)
            prompts, cached = prompts + turn.prompt, cached + known
            engine.running.append(_Work(episode, number, (turn.prompt - known) / PREFILL_SPEEDUP + turn.answer, told))
            engine.keep(episode, turn.prompt)
            continue
        ending.advance(now_s)
        work = min(ending.running, key=lambda one: one.left)
        ending.running.remove(work)
        turn = work.episode.turns[work.number]
        ending.keep(work.episode, turn.prompt + turn.answer)
        router.done(work.told, turn, now_s)
        if work.number + 1 < len(work.episode.turns):
            after = now_s + work.episode.turns[work.number + 1].wait_s
            heapq.heappush(waiting, (after, next(order), work.episode, work.number + 1))
        else:
            begin(later, now_s)
    return Played(makespan_s=now_s, hits=cached / prompts)


def measure(*, quick: bool) -> Result:
    """Measure all routers on the same episodes."""
    rounds, groups = (3, 100) if quick else (5, 300)
    slots = 4 * Config().run.max_in_flight
    routers: dict[str, Callable[[int], Router]] = {
        "ours": Ours,
        "rival": CountingHeap,
        "least_outstanding": LeastOutstanding,
    }
    played: dict[str, list[Played]] = {name: [] for name in routers}
    for number in range(rounds):
        episodes = make_episodes(groups, SEED + number)
        for name, router in routers.items():
            played[name].append(play(episodes, router(len(SPEEDS)), slots))
    rates = {name: [groups * SIBLINGS / one.makespan_s for one in found] for name, found in played.items()}
    speed = {name: median(found) for name, found in rates.items()}
    hits = {name: median(one.hits for one in found) for name, found in played.items()}
    return Result(
        name="routing",
        ours=speed["ours"],
        rival=speed["rival"],
        unit="episodes per simulated second",
        ratio=speed["ours"] / speed["rival"],
        detail={
            "prefix_hits_ratio": hits["ours"] / hits["rival"],
            "prefix_hits": hits,
            "least_outstanding": {"ratio": speed["ours"] / speed["least_outstanding"]},
            "spread": {name: [min(found), max(found)] for name, found in rates.items()},
            "engines": {"speeds": SPEEDS, "alone": ALONE, "cache_tokens": CACHE_TOKENS},
            "episodes": {"groups": groups, "siblings": SIBLINGS, "slots": slots, "rounds": rounds, "seed": SEED},
        },
    )
