"""Rows of plain values as a sheet: what spreadsheets and data frames read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for each row under the names of all that is a single value, as RFC 4180 has it.

    What stands inside a table is named with a dot; lists are left out; nothing stands where a row has no such value.

    >>> to_csv([{"name": "a, b", "flops": {"prefill": 2**70}, "terms": []}, {"name": "c", "bound": None}]).split(
    ...     "\\r\\n"
    ... )
    ['name,flops.prefill,bound', '"a, b",1180591620717411303424,', 'c,,', '']
    """
    flat = [dict(_flatten_values("", row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    written = io.StringIO()
    writer = csv.DictWriter(written, names, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def _flatten_values(inside: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten_values(f"{inside}{key}.", value)
        elif not isinstance(value, list | tuple):
            yield inside + key, value
