"""Pools of engines that are objects of this process."""

from __future__ import annotations

import sys
from collections import Counter

from infra.breaker import BreakerLimits
from infra.guard import Guards
from infra.inference.pool import WAIT_S, PolicyPool, Request
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.control import Backend
from schemas.transcript import Sampling

NEVER_OPEN = BreakerLimits(failures=sys.maxsize)
"""An engine that is not reached is asked again for as long as a call waits."""


def guards_on(clock, limits=NEVER_OPEN):
    """Return guards that write to a log of their own; with other limits somebody must `run` them."""
    return Guards(Publisher(MemoryBus(clock), clock, "test"), clock, stage="run", worker="run-test", limits=limits)


def address_of(name):
    """Return where the engine of a name is."""
    return f"http://{name}"


def backends_of(*names, **changes):
    """Return engines as they are registered."""
    return [Backend(name=name, url=address_of(name), **changes) for name in names]


def pool_of(clock, /, *only, guards=None, wait_s=WAIT_S, digest="", **engines):
    """Return a pool of engines by name; of one without a name if it is given alone."""
    by_name = {**({"engine": only[0]} if only else {}), **engines}
    by_address = {address_of(name): engine for name, engine in by_name.items()}
    pool = PolicyPool(by_address.__getitem__, clock, guards or guards_on(clock), wait_s=wait_s, tokenizer_digest=digest)
    pool.have(backends_of(*by_name))
    return pool


def request(episode="r/g/0/0", turn=0, **changes):
    """Return one generation of an episode."""
    settings = {"sampling": Sampling(), "seed": 1, "stop_token_ids": (6,), "max_tokens": 9}
    names = {"request_id": f"{episode}/{turn}", "episode": episode, "group": episode.rsplit("/", 2)[0]}
    return Request(**{**settings, **names, **changes})


def shares(sampled):
    """Return how many of some answers each engine gave, by name."""
    return Counter(one.address.removeprefix("http://") for one in sampled)
