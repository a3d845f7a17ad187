"""The files that the page offers to save: weights as CSV, JSON or NPZ, the measures, the trace, and
the page itself.

The page is a single HTML file that opens from a disk, needs no network, and shows the same page as
the server. It contains the built page (`static/report.js` and its styles) and the answers of the
server as JSON, with binary answers as base64. Every head is stored as a tile of at most `TILE_SIDE`
cells a side with its masked cells; if all weights together are below `EXACT_BYTES`, the exact
weights of every query are stored too. Its content security policy allows exactly these scripts and
styles, by their checksums, and no request at all. Tokens and other texts are data: no character of
them can end the element that holds them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import SpecError
from ..escaping import escape_html, make_visible
from ..traces import Trace
from ..traces.attention_trace import format_bytes
from ..traces.import_export import WeightSelection, encode_weights, estimate_export_bytes
from ..traces.trace_file import encode_trace
from .binary_answers import encode_image, encode_measures, encode_thumbnails, encode_tile
from .open_model import OpenModel, TileRange
from .view_document import make_file_stem

# --- The answers that the file contains -----------------------------------------------------------

TILE_SIDE = 256
EXACT_BYTES = 8_000_000


def collect_answers(model: OpenModel) -> dict[str, Any]:
    """Everything that is open, as the page reads it: answers by address, and exact weights by site
    and head.
    """
    trace = model.get_trace()
    answers: dict[str, Any] = {
        "/api/document": {**model.describe(), "readOnly": True},
        "/api/thumbnails": encode_thumbnails(model),
        "/api/measures": encode_measures(model),
    }
    for number, layer in enumerate(trace.layers):
        part = TileRange(
            slice(0, layer.num_queries), slice(0, layer.num_keys), (TILE_SIDE, TILE_SIDE)
        )
        for head in range(layer.heads):
            tile = model.tile(layer.name, head, part)
            answers[f"/api/tile?site={number}&head={head}"] = encode_tile(model, tile, part)
    for stream in trace.images:
        answers[f"/api/image?stream={stream}"] = encode_image(model, stream)
    if model.table is not None:
        answers["/api/export?kind=measures"] = {"text": model.table.to_csv()}
    exact = dict(_iter_weights(trace)) if count_bytes(trace) <= EXACT_BYTES else {}
    return {"version": 1, "answers": encode_answers(answers), "weights": exact}


def estimate_html_bytes(model: OpenModel) -> int:
    """About how many bytes the HTML file has; raises SpecError if the page is not built."""
    trace = model.get_trace()
    cells = sum(
        layer.heads * min(TILE_SIDE, layer.num_queries) * min(TILE_SIDE, layer.num_keys)
        for layer in trace.layers
    )
    exact = count_bytes(trace) if count_bytes(trace) <= EXACT_BYTES else 0
    texts = len(json.dumps(model.describe())) + (
        len(model.table.to_csv()) if model.table is not None else 0
    )
    images = sum(image[0].nbytes for image in trace.images.values())
    binary = (
        len(encode_measures(model)) + len(encode_thumbnails(model)) + 2 * cells + exact + images
    )
    return sum(map(len, load_assets())) + texts + binary * 4 // 3


def count_bytes(trace: Trace) -> int:
    """Bytes of all weights of the first row in float32."""
    return sum(4 * layer.heads * layer.num_queries * layer.num_keys for layer in trace.layers)


def _iter_weights(trace: Trace) -> Iterator[tuple[str, Any]]:
    """The weights of every head in float32, little-endian, by "site/head"."""
    for number, layer in enumerate(trace.layers):
        for head in range(layer.heads):
            weights = trace.head_weights(layer.name, head).astype(np.dtype("<f4"))
            data = base64.b64encode(np.ascontiguousarray(weights).tobytes()).decode()
            yield f"{number}/{head}", {"shape": list(weights.shape), "base64": data}


# --- The file -------------------------------------------------------------------------------------

STATIC = Path(__file__).with_name("static")
DATA_ID, MOUNT_ID = "headwise-data", "app"
SCRIPT_FILE, STYLE_FILE = "report.js", "app.css"
NOT_BUILT = (
    "cannot show the page: it is not built; run: make web (needs Node >= 20), or install "
    "a wheel of headwise"
)
POLICY = {
    "default-src": "'none'",
    "script-src": "",  # the checksum of the script
    "style-src": "",
    "img-src": "data: blob:",
    "base-uri": "'none'",
    "form-action": "'none'",
}


class PageAssets(NamedTuple):
    """Script and styles of the built page."""

    script: str
    style: str


def load_assets(folder: Path = STATIC) -> PageAssets:
    """Read the built page; raise SpecError if it has not been built."""
    try:
        script, style = (
            (folder / name).read_text(encoding="utf-8") for name in (SCRIPT_FILE, STYLE_FILE)
        )
    except OSError:
        raise SpecError(NOT_BUILT) from None
    return PageAssets(_protect_script(script), _protect_style(style))


def _protect_script(script: str) -> str:
    """The script without the sequences that HTML reads inside a script element; they only occur in
    its strings.
    """
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def _protect_style(style: str) -> str:
    if re.search("</style", style, re.IGNORECASE):
        raise SpecError(
            f"cannot export: {STYLE_FILE} contains </style; build the page again with make web"
        )
    return style


def escape_json(value: Any) -> str:
    """JSON in ASCII that is safe inside an HTML script element.

    >>> escape_json({"token": "</script>\\u2028"})
    '{"token":"\\\\u003c/script\\\\u003e\\\\u2028"}'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def encode_answers(answers: Mapping[str, bytes | Mapping[str, Any]]) -> dict[str, Any]:
    """The answers of the server by their address: JSON as it is, binary answers as {"base64": ...}.

    >>> encode_answers({"/api/row": b"ab", "/api/document": {"version": 1}})
    {'/api/row': {'base64': 'YWI='}, '/api/document': {'version': 1}}
    """
    return {
        address: {"base64": base64.b64encode(answer).decode()}
        if isinstance(answer, bytes)
        else dict(answer)
        for address, answer in answers.items()
    }


def content_policy(assets: PageAssets) -> str:
    """The content security policy of a file with these assets."""
    checksums = {"script-src": assets.script, "style-src": assets.style}
    rules = {**POLICY, **{name: f"'sha256-{_checksum(text)}'" for name, text in checksums.items()}}
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _checksum(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render_html(data: Mapping[str, Any], title: str, assets: PageAssets | None = None) -> str:
    """Return the HTML file; `data` is what the page reads, as `encode_answers` gives it."""
    assets = load_assets() if assets is None else assets
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            (
                '<meta http-equiv="Content-Security-Policy" '
                f'content="{escape_html(content_policy(assets))}">'
            ),
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape_html(make_title(title))}</title>",
            f"<style>{assets.style}</style>",
            "</head>",
            "<body>",
            f'<div id="{MOUNT_ID}"></div>',
            (
                "<noscript>This report needs JavaScript. It is contained in the file; nothing is "
                "loaded.</noscript>"
            ),
            f'<script type="application/json" id="{DATA_ID}">{escape_json(data)}</script>',
            f"<script>{assets.script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


TITLE_END = " · headwise"


def make_title(name: str) -> str:
    """Title of the page; characters that cannot be printed are written as their code.

    >>> make_title("dates"), make_title("a\\u202eb")
    ('dates · headwise', 'a\\\\u202eb · headwise')
    """
    return make_visible(name) + TITLE_END


WEIGHT_KINDS = ("csv", "json", "npz")
EXPORT_KINDS = (*WEIGHT_KINDS, "measures", "trace", "html")
MEDIA_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "npz": "application/zip",
    "measures": "text/csv; charset=utf-8",
    "trace": "application/octet-stream",
    # a browser must save it and not open it under the address of the server
    "html": "application/octet-stream",
}
MAX_EXPORT_BYTES = 500_000_000  # a browser holds the whole file before it saves it


class FileTooLarge(ValueError):
    """The file would be too large for a browser."""


class ExportScope(NamedTuple):
    """Which weights a file has: those of one head of a site, or of all heads (site ""), of at least
    `min_weight`.
    """

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
            f"the file would have about {format_bytes(size)}, and a browser can hold "
            f"{format_bytes(MAX_EXPORT_BYTES)}"
        )
        raise FileTooLarge(
            f"{fact}; save one head, leave out small weights, or write it with `headwise trace "
            "FILE.trace --export`"
        )
    pieces = _ENCODERS[kind](view, kind, scope)
    first = next(
        pieces, b""
    )  # an error of the first piece is an answer, and not a file that breaks off
    return ExportFile(make_file_name(view, kind, scope), MEDIA_TYPES[kind], chain([first], pieces))


def estimate_bytes(view: OpenModel, kind: str, scope: ExportScope) -> int:
    """About how many bytes the file of a kind has; raises ValueError if there
    is nothing to save.
    """
    trace = view.get_trace()
    if kind in WEIGHT_KINDS:
        return estimate_export_bytes(trace, f".{kind}", scope.select(trace))
    if kind == "measures":
        return len(_render_measures(view))
    if kind == "html":
        return estimate_html_bytes(view)
    words = sum(
        len(json.dumps([row.words, row.ids, row.text]))
        for rows in trace.streams.values()
        for row in rows
    )
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


# --- Encoders -------------------------------------------------------------------------------------


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
