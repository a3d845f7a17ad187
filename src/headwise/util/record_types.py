"""Typed readers of the records of a document: every value has the type and the range that its field
needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, cast

from .errors import SpecError, suggest
from .size_limits import MAX_INTEGER, show_int

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
