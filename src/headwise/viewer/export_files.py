"""The files that the page offers to save: weights as CSV, JSON or NPZ, the measures, the trace, and the page itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from ..traces import Trace
from ..traces.attention_trace import format_bytes
from ..traces.import_export import WeightSelection, encode_weights, estimate_export_bytes
from ..traces.trace_file import encode_trace
from .export_answers import estimate_html_bytes
from .open_model import OpenModel
from .view_document import make_file_stem

WEIGHT_KINDS = ("csv", "json", "npz")
EXPORT_KINDS = (*WEIGHT_KINDS, "measures", "trace", "html")
MEDIA_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "npz": "application/zip",
    "measures": "text/csv; charset=utf-8",
    "trace": "application/octet-stream",
    "html": "application/octet-stream",  # a browser must save it and not open it under the address of the server
}
MAX_EXPORT_BYTES = 500_000_000  # a browser holds the whole file before it saves it


class FileTooLarge(ValueError):
    """The file would be too large for a browser."""


class ExportScope(NamedTuple):
    """Which weights a file has: those of one head of a site, or of all heads (site ""), of at least `min_weight`."""

    site: str = ""
    head: int = 0
    min_weight: float = 0.0

    def select(self, trace: Trace) -> WeightSelection:
        """The selection of the library."""
        if not self.site:
            return WeightSelection(trace.layers, (), self.min_weight)
        return WeightSelection((trace.get_layer(self.site),), (self.head,), self.min_weight)


class ExportFile(NamedTuple):
    """A file: its name, its media type, and its contents in pieces."""

    name: str
    media_type: str
    pieces: Iterator[bytes]


def make_file_name(view: OpenModel, kind: str, scope: ExportScope) -> str:
    """The name of a file, such as headwise-dates-encoder.0.attention-3.csv."""
    stem = make_file_stem(view.name)
    if kind == "measures":
        return f"{stem}-measures.csv"
    if kind in WEIGHT_KINDS and scope.site:
        part = make_file_stem(scope.site).removeprefix("headwise-")
        return f"{stem}-{part}-{scope.head}.{kind}"
    return f"{stem}.{kind}"


def make_file(view: OpenModel, kind: str, scope: ExportScope) -> ExportFile:
    """The file of a kind; raises FileTooLarge, or ValueError if there is nothing to save."""
    size = estimate_bytes(view, kind, scope)
    if size > MAX_EXPORT_BYTES:
        fact = (
            f"the file would have about {format_bytes(size)}, and a browser can hold {format_bytes(MAX_EXPORT_BYTES)}"
        )
        raise FileTooLarge(
            f"{fact}; save one head, leave out small weights, or write it with `headwise trace FILE.trace --export`"
        )
    pieces = _ENCODERS[kind](view, kind, scope)
    first = next(pieces, b"")  # an error of the first piece is an answer, and not a file that breaks off
    return ExportFile(make_file_name(view, kind, scope), MEDIA_TYPES[kind], chain([first], pieces))


def estimate_bytes(view: OpenModel, kind: str, scope: ExportScope) -> int:
    """About how many bytes the file of a kind has; raises ValueError if there is nothing to save."""
    trace = view.get_trace()
    if kind in WEIGHT_KINDS:
        return estimate_export_bytes(trace, f".{kind}", scope.select(trace))
    if kind == "measures":
        return len(_render_measures(view))
    if kind == "html":
        return estimate_html_bytes(view)
    words = sum(len(json.dumps([row.words, row.ids, row.text])) for rows in trace.streams.values() for row in rows)
    return trace.nbytes + sum(picture.nbytes for picture in trace.thumbnails.values()) + words


def describe_files(view: OpenModel, scope: ExportScope) -> dict[str, Any]:
    """The name and size of every kind of file, or the reason why there is none."""
    files: dict[str, Any] = {}
    for kind in EXPORT_KINDS:
        try:
            size = estimate_bytes(view, kind, scope)
        except ValueError as error:
            files[kind] = {"name": "", "bytes": 0, "reason": str(error)}
        else:
            files[kind] = {"name": make_file_name(view, kind, scope), "bytes": size, "reason": ""}
    return files


# --- Encoders ------------------------------------------------------------------------------------------


def _encode_weights(view: OpenModel, kind: str, scope: ExportScope) -> Iterator[bytes]:
    trace = view.get_trace()
    return encode_weights(trace, f".{kind}", scope.select(trace))


def _encode_measures(view: OpenModel, kind: str, scope: ExportScope) -> Iterator[bytes]:
    yield _render_measures(view)


def _encode_trace(view: OpenModel, kind: str, scope: ExportScope) -> Iterator[bytes]:
    yield from (bytes(piece) for piece in encode_trace(view.get_recorded()))


def _encode_page(view: OpenModel, kind: str, scope: ExportScope) -> Iterator[bytes]:
    from .view import render_export

    yield render_export(view).encode()


def _render_measures(view: OpenModel) -> bytes:
    if view.table is None:
        raise ValueError("the heads have not been measured; measure them first")
    return view.table.to_csv().encode(errors="backslashreplace")


_ENCODERS: dict[str, Callable[[OpenModel, str, ExportScope], Iterator[bytes]]] = {
    **dict.fromkeys(WEIGHT_KINDS, _encode_weights),
    "measures": _encode_measures,
    "trace": _encode_trace,
    "html": _encode_page,
}
