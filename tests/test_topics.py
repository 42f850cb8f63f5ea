"""The table tells the truth: who is declared to write and read a topic is who does.

What a service really does is derived from the source. Start at the module that is the service, follow every name it
uses through our packages (functions, classes and constants, not whole modules, so that a helper which two services
share counts for each only as far as it is used), and collect the topic constants met on the way. What is done with a
constant is told by the call it is handed to (`VERBS`): `publish(TASKS, ...)` writes, `unpack(TASKS, record)` reads.
So middleware, events and dead letters count for each stage that wraps itself in them, and the view of `control`
counts for whoever holds one. A new call that takes a topic, or a new module that names one, fails here until this page
says what it means.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from schemas import topics
from schemas.topics import TABLE, Topic

ROOT = Path(__file__).parent.parent
PACKAGES = ("infra", "producers", "rollmill", "stages", "trainer")

SERVICES = {
    "init": ("stages.init.__main__",),
    "run": ("stages.run.__main__",),
    "eval": ("stages.eval.__main__",),
    "producer": ("producers.publish", "producers.collect", "rollmill.again"),
    "feeder": ("producers.feeder",),
    "reaper": ("producers.reaper",),
    "trainer": ("trainer.loop",),
    "replay": ("trainer.replay", "trainer.story", "trainer.diff", "trainer.what_if"),
    "sink": ("infra.clickhouse.sink",),
    "policy": ("infra.inference.sync",),
    "redrive": ("producers.redrive", "rollmill.graveyard"),
    "board": ("infra.board.app",),
    "envhost": ("rollmill.commands.envhost",),
    "cancel": ("rollmill.commands.cancel", "rollmill.covered"),
    "backends": ("rollmill.backends",),
    "status": (
        "rollmill.watch",
        "rollmill.lag",
        "rollmill.standing",
        "rollmill.breakers",
        "rollmill.commands.runs",
        "trainer.explain",
    ),
}
"""Service, as the table names it -> the modules that are it."""

READ, WRITE, NEITHER = "reads", "writes", "neither reads nor writes"

VERBS = {
    "publish": WRITE,
    "publish_all": WRITE,
    "Output": WRITE,
    "Stage.sink": WRITE,
    "Stage.sources": READ,
    "Stream": READ,
    "TopicPartition": READ,
    "unpack": READ,
    "join": READ,
    "_reader": READ,
    "_unread": READ,
    "_bounds": READ,
    "partition_of": READ,
    "_catch_up": READ,
    "_caught_up": NEITHER,
    "_read": READ,
    "positions": READ,
    "topic": READ,
    "_TOPICS": READ,
    "INIT_TIERS": WRITE,
    "EVAL_TIERS": WRITE,
    "begin_offsets": NEITHER,
    "end_offsets": NEITHER,
    "check_topics": NEITHER,
    "committed": NEITHER,
    "offsets_since": NEITHER,
}
"""What a call does with the topic it is handed; `Call.argument` where it depends on the argument.

Constants that list topics are here too, since what is done with their members cannot be followed.
"""

ATTRIBUTES = {"name": None, "partitions": NEITHER, "delay_ms": NEITHER}
"""What is meant by an attribute of a topic; None: the same as by the topic itself."""

ELSEWHERE = {
    "rollmill.ledger": "reads whole topics once, when somebody asks where a run's samples are",
    "rollmill.target": "reads tasks once, when somebody asks about a sample that has no outcome",
    "trainer.record_sizes": "publishes made-up records to a log of its own, in memory, to weigh them",
    "infra.clickhouse.check": "asks the log for its end offsets, and ClickHouse for the rest",
}
"""Modules outside every service that name a topic, and why that is no traffic."""


@dataclass
class Module:
    """One source file: its top-level symbols and what its names refer to."""

    symbols: dict[str, list[ast.stmt]] = field(default_factory=lambda: defaultdict(list))
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Local name -> (module, symbol), symbol None for the module itself."""


def path_of(name: str) -> Path | None:
    """Return the file of a module of ours."""
    stem = ROOT.joinpath(*name.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def module_names() -> list[str]:
    """Return every module of the packages that may know a topic."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


@cache
def module(name: str) -> Module:
    """Parse a module of ours."""
    path, found = path_of(name), Module()
    assert path is not None, f"{name} is not a module"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                whole = path_of(f"{node.module}.{alias.name}") is not None
                target = (f"{node.module}.{alias.name}", None) if whole else (node.module, alias.name)
                found.imported[alias.asname or alias.name] = target
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.imported[alias.asname or alias.name] = (alias.name, None)
    for statement in tree.body:
        for symbol in _defined(statement):
            found.symbols[symbol].append(statement)
    return found


def _defined(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return []
        case _:
            return ["<module>"]  # statements that run at import, such as the guard of a main module


@dataclass(frozen=True)
class Use:
    """One place where a symbol names a topic."""

    topic: str
    how: str
    where: str


@cache
def uses(name: str, symbol: str) -> tuple[list[Use], set[tuple[str, str]]]:
    """Return the topics that a symbol names, and the symbols of ours that it refers to."""
    here, found, refers = module(name), [], set()
    for statement in here.symbols[symbol]:
        for node, parents in _with_parents(statement):
            target = _target(name, node)
            if target is None:
                continue
            if target[0] == "schemas.topics" and isinstance(getattr(topics, target[1], None), Topic):
                where = f"{name}:{node.lineno}"
                found.append(Use(str(getattr(topics, target[1])), _how(node, parents, where), where))
            elif target[0].split(".")[0] in PACKAGES and target != (name, symbol):
                refers.add(target)
    return found, refers


def _with_parents(root: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(root, ())]
    while waiting:
        node, parents = waiting.pop()
        yield node, parents
        waiting += [(child, (*parents, node)) for child in ast.iter_child_nodes(node)]


def _target(name: str, node: ast.AST) -> tuple[str, str] | None:
    """Return (module, symbol) that an expression refers to, if it is a symbol of ours."""
    here = module(name)
    match node:
        case ast.Name(id=local) if local in here.symbols:
            return name, local
        case ast.Name(id=local) if local in here.imported and here.imported[local][1] is not None:
            return _home(*here.imported[local])
        case ast.Attribute(value=ast.Name(id=local), attr=symbol) if here.imported.get(local, ("", ""))[1] is None:
            return _home(here.imported[local][0], symbol)
        case _:
            return None


def _home(name: str, symbol: str) -> tuple[str, str]:
    """Follow a name that a package only passes on to where it is defined."""
    while name.split(".", maxsplit=1)[0] in PACKAGES and path_of(name) and symbol in module(name).imported:
        origin, original = module(name).imported[symbol]
        if original is None:
            break
        name, symbol = origin, original
    return name, symbol


def _how(node: ast.AST, parents: tuple[ast.AST, ...], where: str) -> str:
    """Return what is done with a topic, told by the attribute asked of it or the call around it."""
    inner, keyword = node, None
    for parent in reversed(parents):
        match parent:
            case ast.Attribute(attr=attribute) if ATTRIBUTES.get(attribute):
                return ATTRIBUTES[attribute]
            case ast.Compare():
                return NEITHER
            case ast.keyword(arg=argument):
                keyword = argument
            case ast.Assign(targets=[ast.Name(id=constant)]) | ast.AnnAssign(target=ast.Name(id=constant)):
                return VERBS.get(constant, f"is a member of {constant} in {where}")
            case ast.Call(func=ast.Name(id=verb) | ast.Attribute(attr=verb)) if inner is not parent.func:
                known = VERBS.get(verb) or VERBS.get(f"{verb}.{keyword}")
                assert known, f"{where}: what does {verb}({keyword or ''}) do with a topic? Tell VERBS in {__file__}"
                return known
        inner = parent
    return f"is not handed to a call in {where}"


@cache
def traffic(service: str) -> frozenset[Use]:
    """Return every use of a topic that can be reached from the modules of a service."""
    waiting = [(start, symbol) for start in SERVICES[service] if path_of(start) for symbol in module(start).symbols]
    seen, found = set(waiting), set()
    while waiting:
        here, further = uses(*waiting.pop())
        found |= set(here)
        fresh = {(name, symbol) for name, symbol in further - seen if path_of(name) and symbol in module(name).symbols}
        seen |= fresh
        waiting += fresh
    return frozenset(found)


def services(how: str, topic: str) -> set[str]:
    """Return the services that do this with a topic."""
    return {service for service in SERVICES if any((use.how, use.topic) == (how, topic) for use in traffic(service))}


EACH = pytest.mark.parametrize("topic", TABLE, ids=str)


@EACH
def test_declared_producers_are_the_real_ones(topic):
    """Nobody writes who is not in the table, and nobody in the table does not write."""
    assert services(WRITE, topic.name) == set(topic.producers)


@EACH
def test_declared_consumers_are_the_real_ones(topic):
    """Nobody reads who is not in the table, and nobody in the table does not read."""
    assert services(READ, topic.name) == set(topic.consumers)


def test_every_service_exists():
    """The table names services by what they are; each is made of modules."""
    assert [name for modules in SERVICES.values() for name in modules if path_of(name) is None] == []


def test_the_table_names_only_services():
    """A producer or consumer that nobody knows would never be checked."""
    assert {name for topic in TABLE for name in (*topic.producers, *topic.consumers)} == set(SERVICES)


def test_no_topic_is_named_outside_the_services():
    """A module that names a topic belongs to a service, or this page says why not."""
    inside = {use.where.split(":")[0] for service in SERVICES for use in traffic(service)}
    naming = {name for name in module_names() for symbol in module(name).symbols if uses(name, symbol)[0]}
    assert naming - inside == set(ELSEWHERE)


def test_every_use_is_understood():
    """A topic that is neither handed to a known call nor asked for an attribute hides what is done with it."""
    assert {use.how for service in SERVICES for use in traffic(service)} <= {READ, WRITE, NEITHER}


def test_the_derivation_follows_functions_not_modules():
    """Replay reads decisions with a function of the module that the trainer writes them with, and writes none."""
    assert services(WRITE, "decisions") == {"trainer"}
    assert {"replay", "trainer"} <= services(READ, "decisions")
