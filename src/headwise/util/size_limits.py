"""The largest sizes that a document may ask for, and readers of JSON and TOML that refuse what no
document needs.

A number in a text costs its writer nothing, so every size is compared with its largest value before
anything is allocated, enumerated or divided by it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any

from .errors import SpecError

MAX_HEADS = 1 << 16  # some lists have one item per head
MAX_HEAD_DIM = 1 << 16
MAX_WIDTH = 1 << 24
MAX_BIAS_NETWORK = 1 << 28  # hidden units of all offsets of a continuous bias; 1 GiB in float32
MAX_TRACE_TOKENS = 1 << 24  # of one text in a trace
MAX_INTEGER = (1 << 64) - 1
MAX_NESTING = 64  # tables and lists inside each other
MAX_SHOWN_DIGITS = 20


def show_int(value: int) -> str:
    """Return an integer as text, a long one by its number of digits.

    >>> show_int(-12), show_int(10**30)
    ('-12', 'a number of 31 digits')
    """
    if abs(value) < 10**MAX_SHOWN_DIGITS:
        return str(value)
    bits = abs(value).bit_length()
    digits = len(str(abs(value))) if bits < 14_000 else bits * 30103 // 100_000 + 1
    return f"a number of {digits} digits"


def check_size(name: str, value: int, largest: int) -> None:
    """Raise SpecError if a number is larger than `largest`.

    >>> check_size("heads", 10**9, MAX_HEADS)
    Traceback (most recent call last):
    headwise.util.errors.SpecError: heads = 1000000000 is too large; give 65536 or less
    """
    if value > largest:
        raise SpecError(f"{name} = {show_int(value)} is too large; give {largest} or less")


def check_nesting(what: str, value: Any) -> None:
    """Raise SpecError if tables and lists are nested more than `MAX_NESTING` deep.

    >>> check_nesting("the spec", {"a": [[1]]})
    """
    level = [value]
    depth = 0
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        if depth > MAX_NESTING:
            raise SpecError(
                f"{what} is nested too deeply; give at most {MAX_NESTING} levels of tables and "
                "lists"
            )
        level = [item for outer in level for item in _items(outer)]


def _items(value: Any) -> list[Any]:
    items: Any = value.values() if isinstance(value, dict) else value
    return list(items)


def parse_json(what: str, text: str | bytes, remedy: str) -> Any:
    """Return the value of a JSON document; `what` and `remedy` are the begin and the end of the
    message of an error.

    >>> parse_json("the spec", "[1, {}]", "write a spec")
    [1, {}]
    >>> parse_json("the spec", "[" * 100_000, "write a spec")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: the spec is nested too deeply; give at most 64 levels of tables and lists
    """
    return _parse("JSON", json.loads, what, text, remedy)


def parse_toml(what: str, text: str, remedy: str) -> dict[str, Any]:
    """Return the table of a TOML document, as `parse_json` does."""
    return _parse("TOML", tomllib.loads, what, text, remedy)


def _parse(name: str, loads: Callable[[Any], Any], what: str, text: Any, remedy: str) -> Any:
    try:
        value = loads(text)
    except RecursionError:
        raise SpecError(
            f"{what} is nested too deeply; give at most {MAX_NESTING} levels of tables and lists"
        ) from None
    except ValueError as error:  # of the syntax, of the encoding, or a number of too many digits
        fact = (
            "a number has more than 4,300 digits"
            if "set_int_max_str_digits" in str(error)
            else str(error)
        )
        raise SpecError(f"{what} is not {name}: {fact}; {remedy}") from None
    check_nesting(what, value)
    return value
