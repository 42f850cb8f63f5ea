"""Chooses the engine of each generation. Pure decisions: no I/O, and time is what the caller says.

A request goes where it is expected to end first. What an engine has to do is counted in sampled tokens: those of the
answers in flight, and the tokens of prompts that it has not computed before, which cost less each (`PREFILL`). That,
divided by the speed at which the engine was seen to work, is the wait there. An engine that knows a prompt's prefix has
less to do for it, so the turns of an episode stay together, and siblings find the engine that knows their opening; an
episode leaves its engine only for one that is clearly better (`STAY`), since its next turns would have to move too.
NeMo's measurements of routers say that both count: consistent hashing alone reached the same share of prefix hits as
a router that looks at load, and took an eighth longer.

Speed is measured, never configured: an operator's weight only scales it. An engine that was just added, or came back,
is given work slowly (`RAMP_S`), for its cache is cold and its speed is not known.

With tens of engines a look at each is cheaper than keeping a heap in order, whose keys change with every token.
Not known here: HTTP, versions of weights (the caller says which engines suit), retries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

PREFILL = 0.1
"""Work of a prompt token that is not cached, in sampled tokens: prefill computes many at once."""
STAY = 1.5
"""An episode stays unless its engine would take this much longer than the best one."""
RAMP_S = 30.0
"""An engine that is new gets its full share after this long, seconds."""
FIRST_SHARE = 0.1
"""Share of its speed that a new engine is trusted with at first."""
SMOOTHING = 0.1
"""Weight of the newest measurement in a mean."""
SLOWEST = 1 / 16
"""No engine is taken for slower than this part of the median: one that nobody asks is never measured again."""
ANSWER = 128.0
"""Tokens of an answer before any was seen."""
REMEMBERED = 100_000
"""Prefixes that are remembered; the one that was used longest ago is forgotten first."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A generation that wants an engine."""

    episode: str
    """Whose turn it is; its prompts extend each other."""
    group: str
    """Siblings, whose prompts begin alike."""
    prompt: int
    """Tokens of the prompt."""
    max_tokens: int
    """Most tokens of the answer."""


@dataclass(kw_only=True)
class _Engine:
    weight: float
    joined_s: float
    draining: bool = False
    away: bool = False
    work: float = 0.0
    """What is in flight, in sampled tokens."""
    in_flight: int = 0
    speed: float | None = None
    """Work done a second, all generations together; None before the first one ended."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Where a generation went; to be given back by `done` or `failed`."""

    engine: str
    """Its name."""
    ask: Ask
    """What is generated."""
    known: int
    """Tokens of the prompt that the engine should have computed before."""
    work: float
    """What it was expected to cost, in sampled tokens."""
    began_s: float
    """When it was chosen."""
    beside: int
    """Generations in flight there then, this one included."""
    counted_at: _Engine = field(repr=False)
    """The engine's books; another engine may have its name by now."""


@dataclass
class _Prefixes:
    """How many tokens of a prefix an engine has computed."""

    tokens: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)
    """(engine, whose prefix) -> tokens."""

    def known(self, engine: str, whose: str) -> int:
        return self.tokens.get((engine, whose), 0)

    def note(self, engine: str, whose: str, tokens: int) -> None:
        self.tokens[engine, whose] = tokens
        self.tokens.move_to_end((engine, whose))
        if len(self.tokens) > REMEMBERED:
            self.tokens.popitem(last=False)

    def forget(self, engine: str) -> None:
        for key in [key for key in self.tokens if key[0] == engine]:
            del self.tokens[key]


class Balancer:
    """The engines of one policy and what each has in flight."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._episodes = _Prefixes()
        self._openings = _Prefixes()
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Episode -> the engine that has its longest prefix."""
        self._answer = ANSWER

    def add(self, name: str, now_s: float, *, weight: float = 1.0) -> None:
        """Take an engine in, or give one that is known another weight and take it out of draining.

        Args:
            name: of the engine.
            now_s: the time.
            weight: its share, relative to what its speed would give it.

        Raises:
            ValueError: the weight is not above 0.
        """
        if not weight > 0:
            raise ValueError(f"weight {weight:g} of engine {name}: it is above 0; `drain` an engine to give it nothing")
        known = self._engines.setdefault(name, _Engine(weight=weight, joined_s=now_s))
        known.weight, known.draining = weight, False

    def remove(self, name: str) -> None:
        """Forget an engine; generations that are still there may end."""
        self._engines.pop(name, None)
        self._forget_prefixes(name)

    def drain(self, name: str) -> None:
        """Give an engine nothing new, also no further turn of an episode that began there."""
        self._engines[name].draining = True

    def away(self, name: str) -> None:
        """Give an engine nothing until it is back: it does not answer."""
        self._engines[name].away = True
        self._forget_prefixes(name)

    def back(self, name: str, now_s: float) -> None:
        """Give an engine work again, slowly; it may be another one at the same address."""
        engine = self._engines[name]
        engine.away, engine.joined_s, engine.speed = False, now_s, None

    def in_flight(self, name: str) -> int:
        """Return how many generations an engine has; 0 for one that is not known."""
        return self._engines[name].in_flight if name in self._engines else 0

    def choose(self, ask: Ask, now_s: float, suits: Callable[[str], bool] = lambda _: True) -> Choice | None:
        """Return where a generation goes, and count it there; None if no engine may have it.

        Args:
            ask: what is generated.
            now_s: the time.
            suits: tells of an engine whether it may have it, such as by the version of its weights.
        """
        usual = self._usual_speed()
        waits = {
            name: self._wait_s(name, engine, ask, now_s, usual)
            for name, engine in self._engines.items()
            if not (engine.draining or engine.away) and suits(name)
        }
        if not waits:
            return None
        best = min(waits, key=waits.__getitem__)
        home = self._homes.get(ask.episode)
        name = home if home in waits and waits[home] <= STAY * waits[best] else best
        engine = self._engines[name]
        known, work = self._known(name, ask), self._work(name, ask)
        engine.work += work
        engine.in_flight += 1
        return Choice(
            engine=name,
            ask=ask,
            known=known,
            work=work,
            began_s=now_s,
            beside=engine.in_flight,
            counted_at=engine,
        )

    def done(self, choice: Choice, now_s: float, sampled: int) -> None:
        """Take note of a generation that ended with so many sampled tokens."""
        ask, name = choice.ask, choice.engine
        self._answer += SMOOTHING * (sampled - self._answer)
        engine = self._give_back(choice)
        if engine is None:
            return
        took_s = now_s - choice.began_s
        if took_s > 0:
            # The engine worked on the others as well: on as many as were there, on average of its begin and its end.
            beside = (choice.beside + engine.in_flight + 1) / 2
            seen = ((ask.prompt - choice.known) * PREFILL + sampled) * beside / took_s
            engine.speed = seen if engine.speed is None else engine.speed + SMOOTHING * (seen - engine.speed)
        self._homes[ask.episode] = name
        self._homes.move_to_end(ask.episode)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        if not self._openings.known(name, ask.group):
            self._openings.note(name, ask.group, ask.prompt)
        self._episodes.note(name, ask.episode, ask.prompt + sampled)

    def failed(self, choice: Choice) -> None:
        """Take note of a generation that did not end, or was withdrawn."""
        self._give_back(choice)

    def weights_changed(self, name: str) -> None:
        """Forget what an engine has computed: no prompt finds a prefix of older weights."""
        self._forget_prefixes(name)

    def _give_back(self, choice: Choice) -> _Engine | None:
        """Return the engine of a choice without it; None if the engine was removed."""
        engine = choice.counted_at
        engine.work = max(0.0, engine.work - choice.work)  # sums of floats end near 0, and not at it
        engine.in_flight -= 1
        return engine if self._engines.get(choice.engine) is engine else None

    def _wait_s(self, name: str, engine: _Engine, ask: Ask, now_s: float, usual: float) -> float:
        speed = max(usual if engine.speed is None else engine.speed, SLOWEST * usual)
        ramp = min(1.0, max(FIRST_SHARE, (now_s - engine.joined_s) / RAMP_S))
        return (engine.work + self._work(name, ask)) / (speed * engine.weight * ramp)

    def _work(self, name: str, ask: Ask) -> float:
        return (ask.prompt - self._known(name, ask)) * PREFILL + min(self._answer, ask.max_tokens)

    def _known(self, name: str, ask: Ask) -> int:
        known = max(self._episodes.known(name, ask.episode), self._openings.known(name, ask.group))
        return min(known, ask.prompt)

    def _usual_speed(self) -> float:
        return median([engine.speed for engine in self._engines.values() if engine.speed is not None] or [1.0])

    def _forget_prefixes(self, name: str) -> None:
        self._episodes.forget(name)
        self._openings.forget(name)
