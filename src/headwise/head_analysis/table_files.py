"""Files of measured heads and of importance, as .json or .csv."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..files import write_atomically
from ..output_paths import FileKind, check_output

TABLE_SUFFIXES = (".json", ".csv")
TABLE_NAME = "table of heads"
# The first key of the .json files, and the first column names of both kinds of .csv files.
TABLE_FILE = FileKind(TABLE_NAME, (f'"format": "{TABLE_NAME}"'.encode(), b"site,stack,kind,", b"site,head,importance,"))


def save_table(
    path: Path | str, data: Mapping[str, Any], to_csv: Callable[[], str], *, overwrite: bool = False
) -> None:
    """Write a table as .json or .csv; the file appears complete or not at all."""
    suffix = Path(path).suffix
    if suffix not in TABLE_SUFFIXES:
        suffixes = ", ".join(TABLE_SUFFIXES)
        raise SpecError(f"cannot save heads to {path}: its suffix is {suffix!r}; use one of {suffixes}")
    target = check_output(path, TABLE_FILE, "overwrite" if overwrite else "refuse")
    if suffix == ".csv":
        write_atomically(target, to_csv().encode())
        return
    document = {"format": TABLE_NAME} | dict(data)
    write_atomically(target, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
