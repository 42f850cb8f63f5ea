"""Which answers may be handed to scorers that evaluate them as code.

Some reasoning-gym scorers call `eval` or sympy's `parse_expr`, which calls `eval`, on the answer. An answer is text
that a policy wrote, and a policy under training finds out what a scorer does with it: so for these generators the
text must read as a harmless expression, or it scores 0 unseen. What is harmless is decided on the syntax tree: numbers,
names, lists, arithmetic and a few functions; no attribute, no subscript, no other call, no number or power that would
take forever. A scorer that gets wedged all the same costs its rollout (the host's limit on a call), nothing else.

Kept apart from `reasoning.py` because it changes when reasoning-gym does.
"""

from __future__ import annotations

import ast
from typing import Final

ANSWER_CHARS: Final = 20_000
"""Longest answer that is scored, characters: the largest grids have a few thousand."""

DIGITS: Final = 40
"""Most digits of a number in an expression."""

POWER: Final = 64
"""Largest constant exponent, nested ones multiplied."""

EXPRESSIONS: Final = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Scorers that pass the answer to sympy's parser."""

LITERALS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Scorers that pass the answer to `eval` to read a list."""

FUNCTIONS: Final = frozenset(
    {
        *("Abs", "abs", "exp", "ln", "log", "sqrt"),
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    }
)
"""Functions that an expression may call."""

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UAdd, ast.USub, ast.Load)


def refusal(generator: str, answer: str) -> str | None:
    """Return why an answer must not be scored, or None if it may be."""
    if len(answer) > ANSWER_CHARS:
        return f"the answer has {len(answer)} characters; at most {ANSWER_CHARS} are scored"
    if generator not in EXPRESSIONS | LITERALS:
        return None
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        bad = _first_bad(tree) if generator in EXPRESSIONS else _first_code(tree)
        power = _power(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # `eval` would stop at the same place; sympy's parser knows notations of its own, such as factorials.
        return "the answer is no plain expression" if generator in EXPRESSIONS else None
    if bad is not None:
        return f"the answer holds {bad}, which is not evaluated"
    if power > POWER:
        return f"the answer holds a power beyond {POWER}, which is not evaluated"
    return None


def _first_bad(tree: ast.AST) -> str | None:
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=int(number)):
                # A number of that many digits is refused by size, since printing a huge one is itself slow.
                if abs(number) >= 10**DIGITS:
                    return f"a number of more than {DIGITS} digits"
            case ast.Constant(value=float()) | ast.BinOp() | ast.UnaryOp() | ast.Pow():
                pass
            case ast.Name(id=name) if not name.startswith("_"):
                pass
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                pass
            case _ if isinstance(node, _ARITHMETIC):
                pass
            case _:
                return type(node).__name__
    return None


def _first_code(tree: ast.AST) -> str | None:
    allowed = (ast.Constant, ast.List, ast.Tuple, ast.Name, ast.UnaryOp, ast.USub, ast.Load)
    return next((type(node).__name__ for node in ast.walk(tree) if not isinstance(node, allowed)), None)


def _power(tree: ast.AST) -> float:
    """Return the largest product of nested exponents; an exponent that is a power itself counts as endless."""
    inner = max((_power(child) for child in ast.iter_child_nodes(tree)), default=1.0)
    match tree:
        case ast.BinOp(op=ast.Pow(), right=exponent):
            if any(isinstance(node, ast.Pow) for node in ast.walk(exponent)):
                return float("inf")
            return inner * _size(exponent)
        case _:
            return inner


def _size(exponent: ast.AST) -> float:
    """Return a bound of a constant exponent's size; a name in it counts as 1: it stays a symbol."""
    numbers = [
        abs(float(node.value))
        for node in ast.walk(exponent)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    ]
    # The product bounds sums and products of numbers above 1.
    size = 1.0
    for number in numbers:
        size *= max(number, 1.0) + 1.0 if len(numbers) > 1 else max(number, 1.0)
    return size
