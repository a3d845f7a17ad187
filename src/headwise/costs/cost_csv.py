"""Cost estimates as CSV (RFC 4180), one line for each estimate."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows of plain values as CSV (RFC 4180), with one column for each scalar value.

    Values of nested mappings get dotted names; lists are left out; a missing value is an empty field.

    >>> to_csv([{"name": "a, b", "flops": {"prefill": 2**70}, "terms": []}, {"name": "c", "bound": None}]).split(
    ...     "\\r\\n"
    ... )
    ['name,flops.prefill,bound', '"a, b",1180591620717411303424,', 'c,,', '']
    """
    flat = [dict(_flatten_values("", row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _flatten_values(prefix: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten_values(f"{prefix}{key}.", value)
        elif not isinstance(value, list | tuple):
            yield prefix + key, value
