"""The largest sizes that a document may ask for, and readers of JSON and TOML that refuse what no
document needs.

A number in a text costs its writer nothing, so every size is compared with its largest value before
anything is allocated, enumerated or divided by it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NoReturn, cast

from .errors import SpecError, suggest

MAX_HEADS = 1 << 16  # some lists have one item per head
MAX_HEAD_DIM = 1 << 16
MAX_WIDTH = 1 << 24
MAX_BIAS_NETWORK = 1 << 28  # hidden units of all offsets of a continuous bias; 1 GiB in float32
MAX_TRACE_TOKENS = 1 << 24  # of one text in a trace
MAX_CONFIG_BYTES = 1 << 24  # largest config.json: some list 21,000 class names, twice
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
        level = list(chain.from_iterable(map(_items, level)))


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
    headwise.util.errors.SpecError: the spec is nested too deeply; give at most 64 levels of tables
    and lists
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


MAX_FLOAT32 = (2 - 2**-23) * 2.0**127

MISSING = object()
FieldNames = Iterable[str]


class Record:
    """One table of a document; `where` names it in messages, and `remedy` ends them.

    A field without `default` must be there. Numbers are never texts, and true and false are no
    numbers.
    """

    def __init__(self, where: str, values: object, remedy: str) -> None:
        self.where = where
        self.remedy = remedy
        if not isinstance(values, Mapping):
            self.fail("", f"is a {type(values).__name__}, not a table")
        self.values = cast("Mapping[str, Any]", values)

    def fail(self, field: str, fact: str) -> NoReturn:
        """Raise a SpecError: the record and its field, what is wrong, and the remedy."""
        raise SpecError(
            f"{self.where}{'.' * bool(field and self.where)}{field} {fact}; {self.remedy}"
        )

    def check_fields(self, names: FieldNames) -> None:
        """Raise SpecError for a field that is not one of `names`."""
        names = list(names)
        for name in self.values:
            if name not in names:
                self.fail(str(name), f"is not known; {suggest(str(name), names)}")

    def get(self, name: str, default: Any = MISSING) -> Any:
        """Return a value of any type."""
        if name not in self.values and default is MISSING:
            self.fail(name, "is missing")
        return self.values.get(name, default)

    def read_int(
        self, name: str, least: int = 0, most: int = MAX_INTEGER, default: Any = MISSING
    ) -> int:
        """Return an integer from `least` to `most`."""
        return self._check_int(name, self.get(name, default), least, most)

    def read_optional_int(self, name: str, least: int = 0, most: int = MAX_INTEGER) -> int | None:
        """Return an integer from `least` to `most`, or None if the field is missing or null."""
        value = self.get(name, None)
        return None if value is None else self._check_int(name, value, least, most)

    def read_ints(
        self,
        name: str,
        least: int = 0,
        most: int = MAX_INTEGER,
        length: int | None = None,
        default: Any = MISSING,
    ) -> tuple[int, ...]:
        """Return a list of integers, of `length` if that is given."""
        values = self.read_list(name, length, default)
        for value in values:
            if type(value) is not int or not least <= value <= most:
                self._check_int(name, value, least, most)
        return tuple(values)

    def read_number(self, name: str, default: Any = MISSING) -> float:
        """Return a number that float32 holds; not NaN."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not abs(value) <= MAX_FLOAT32:
            self.fail(name, f"= {_show(value)} is not a finite number")
        return float(value)

    def read_optional_number(self, name: str) -> float | None:
        """Return a finite number, or None if the field is missing or null."""
        return None if self.get(name, None) is None else self.read_number(name)

    def read_text(self, name: str, default: Any = MISSING) -> str:
        """Return a text."""
        value = self.get(name, default)
        if not isinstance(value, str):
            self.fail(name, f"= {_show(value)} is not a text")
        return value

    def read_texts(self, name: str, default: Any = MISSING) -> tuple[str, ...]:
        """Return a list of texts."""
        values = self.read_list(name, None, default)
        for value in values:
            if not isinstance(value, str):
                self.fail(name, f"holds {_show(value)}, which is not a text")
        return tuple(values)

    def read_bool(self, name: str, default: Any = MISSING) -> bool:
        """Return true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, f"= {_show(value)} is neither true nor false")
        return value

    def read_list(self, name: str, length: int | None = None, default: Any = MISSING) -> list[Any]:
        """Return a list with items of any type."""
        value = self.get(name, default)
        if not isinstance(value, (list, tuple)):
            self.fail(name, f"= {_show(value)} is not a list")
        items: list[Any] = [*cast("list[Any]", value)]
        if length is not None and len(items) != length:
            self.fail(name, f"has {len(items)} items, not {length}")
        return items

    def read_records(self, name: str) -> list[Record]:
        """Return a list of tables."""
        return [
            Record(f"{self.where}{'.' * bool(self.where)}{name}[{n}]", item, self.remedy)
            for n, item in enumerate(self.read_list(name))
        ]

    def read_record(self, name: str, default: Any = MISSING) -> Record:
        """Return a table."""
        return Record(
            f"{self.where}{'.' * bool(self.where)}{name}", self.get(name, default), self.remedy
        )

    def _check_int(self, name: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int:
            self.fail(name, f"holds {_show(value)}, which is not a whole number")
        if value > most:
            raise SpecError(
                f"{self.where}.{name} = {show_int(value)} is too large; give {most} or less"
            )
        if value < least:
            self.fail(name, f"= {show_int(value)} is too small; give {least} or more")
        return value


def _show(value: object) -> str:
    return show_int(value) if type(value) is int else repr(value)


def check_whole_number(name: str, value: object, low: int) -> int:
    """`value`, if it is an integer of at least `low`; True and 2.0 are not. Raises SpecError
    otherwise.

    >>> check_whole_number("keys", 4, 1)
    4
    """
    if type(value) is not int or value < low:
        raise SpecError(
            f"{name} must be a whole number of at least {low}; got {value!r}; use {low} or more"
        )
    return value
