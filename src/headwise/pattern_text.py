"""Patterns as text: reading the short form, and drawing a mask for a terminal."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from headwise.errors import SpecError, suggest

MAX_DRAWN_CELLS = 64  # a mask this wide leaves 16 of a terminal's 80 columns for the row index
FULL, PART, NONE = "█", "▒", "·"
ASCII = str.maketrans({FULL: "#", PART: "+", NONE: "."})


def parse_calls(text: str, known: Mapping[str, Any]) -> Any:
    """The value of a text made of known calls with literal arguments, `&` (which binds tighter) and `|`.

    >>> parse_calls("pair(0, right=3) | none", {"pair": lambda left, right: {left, right}, "none": lambda: set()})
    {0, 3}
    """
    # `global` is a Python keyword, so it travels as a name that is not, and every name is lowered again.
    source = re.sub(r"\bglobal\b", "Global", " ".join(text.split()))
    try:
        return _build(ast.parse(source, mode="eval").body, known)
    except SyntaxError as error:
        raise SpecError(f"not a pattern: {text!r}; write it like 'window(256) | first(4)'") from error
    except (RecursionError, MemoryError) as error:
        raise SpecError(f"nested too deeply to be read: {text[:40]!r}...; build it in Python") from error


def _build(node: ast.expr, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _build(left, known) & _build(right, known)
        case ast.BinOp(left, ast.BitOr(), right):
            return _build(left, known) | _build(right, known)
        case ast.Call(ast.Name(name), args, keywords):
            return _build_call(name.lower(), args, keywords, known)
        case ast.Name(name):
            return _build_call(name.lower(), [], [], known)
        case _:
            fact = f"a pattern is made of calls, & and |; got {ast.unparse(node)!r}"
            raise SpecError(f"{fact}; use one of {', '.join(sorted(known))}")


def _build_call(name: str, args: list[ast.expr], keywords: list[ast.keyword], known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise SpecError(f"unknown pattern {name!r}; {suggest(name, known)}")
    signature = inspect.signature(known[name])
    try:
        named = {word.arg or "**": _literal(word.value) for word in keywords}
        if len(named) < len(keywords):  # the parser lets a repeated keyword pass
            raise TypeError("a keyword is repeated")
        bound = signature.bind(*map(_literal, args), **named)
    except (TypeError, ValueError) as error:
        usage = signature.replace(
            parameters=[field.replace(annotation=field.empty) for field in signature.parameters.values()],
            return_annotation=signature.empty,
        )
        raise SpecError(f"{name} cannot take its arguments: {error}; write {name}{usage}") from error
    return known[name](*bound.args, **bound.kwargs)


@runtime_checkable
class Drawable(Protocol):
    """What drawing needs to know of a pattern."""

    @property
    def text(self) -> str:
        """Its short form."""
        ...

    def pairs(self, queries: range, keys: range) -> int:
        """The allowed pairs in the ranges."""
        ...


def draw_pattern(pattern: Drawable, queries: int, keys: int) -> str:
    """The mask as text: one row per query, one column per key, then what its marks mean and how full it is.

    Beyond 64 queries or keys it is shrunk: a mark stands for a square of pairs, and the legend says so.
    """
    if min(queries, keys) < 1:
        raise SpecError(f"there is nothing to draw; got {queries} queries and {keys} keys; use at least 1 of each")
    side = -(-max(queries, keys) // MAX_DRAWN_CELLS)
    tops, lefts = range(0, queries, side), range(0, keys, side)
    margin = max(len(str(tops[-1])), 4)
    title = pattern.text if len(pattern.text) <= 80 else pattern.text[:77] + "..."
    # A label stands over every eighth column, so that seven digits fit before the next.
    ruler = "".join(str(left).ljust(8) for left in lefts[::8]).rstrip()
    rows = [
        f"{top:>{margin}} "
        + "".join(_cell_mark(pattern, _cell_ranges(top, side, queries), _cell_ranges(left, side, keys)) for left in lefts)
        for top in tops
    ]
    return "\n".join([title, " " * (margin + 1) + ruler, *rows, _legend(pattern, queries, keys, side)])


def _cell_ranges(start: int, size: int, end: int) -> range:
    return range(start, min(start + size, end))


def _cell_mark(pattern: Drawable, queries: range, keys: range) -> str:
    pairs = pattern.pairs(queries, keys)
    return NONE if not pairs else FULL if pairs == len(queries) * len(keys) else PART


def _legend(pattern: Drawable, queries: int, keys: int, side: int) -> str:
    pairs = pattern.pairs(range(queries), range(keys))
    counts = f"{pairs} of {queries * keys} pairs ({pairs / (queries * keys):.1%})"
    if side == 1:
        return f"rows ask, columns are read ({FULL}); {counts}"
    return f"shrunk: a mark is {side} x {side} pairs, {FULL} all, {PART} some, {NONE} none\n{counts}"


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise TypeError(f"{ast.unparse(node)!r} is no number") from None
