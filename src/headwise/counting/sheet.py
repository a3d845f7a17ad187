"""Rows of plain values as a sheet: what spreadsheets and data frames read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def sheet(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for each row under the names of all that is a single value, as RFC 4180 has it.

    What stands inside a table is named with a dot; lists are left out; nothing stands where a row has no such value.

    >>> sheet([{"name": "a", "flops": {"prefill": 2**70}, "terms": []}, {"name": "b, c", "bound": None}])
    'name,flops.prefill,bound\\r\\na,1180591620717411303424,\\r\\n"b, c",,\\r\\n'
    """
    flat = [dict(_single("", row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    written = io.StringIO()
    writer = csv.DictWriter(written, names, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def _single(inside: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _single(f"{inside}{key}.", value)
        elif not isinstance(value, list | tuple):
            yield inside + key, value
