"""Files that the page can save: figures, weights as CSV, JSON or NPZ, the measures, the trace, and
the page itself.

The page is a single HTML file that opens from a disk, needs no network, and shows the same page as
the server. It contains the built page (`static/report.js` and its styles) and the answers of the
server as compressed JSON, with binary answers as base64. Every head is stored as a tile of at most
`TILE_SIDE` cells a side with its masked cells; if all weights together are below `EXACT_BYTES`, the
exact weights of every query and their means by key, query and distance are stored too. Its content
security policy allows exactly these scripts and styles, by their checksums, and no request at all.
Tokens and other texts are data: no character of them can end the element that holds them.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..observe.head_names import print_head
from ..observe.traces import Trace
from ..observe.traces.import_export import WeightSelection, encode_weights, estimate_export_bytes
from ..observe.traces.trace_file import encode_trace
from ..report.data import Figure, HeatMap, Links
from ..report.plots import to_bytes
from ..report.text import format_bytes
from ..util.errors import SpecError
from ..util.escaping import escape_html, make_visible
from .answers import ask
from .open_model import OpenModel, TileRange
from .weight_summaries import make_edges, make_file_stem

if TYPE_CHECKING:
    from ..observe.head_analysis.head_table import HeadTable

# --- The answers that the file contains -----------------------------------------------------------

TILE_SIDE = 256
EXACT_BYTES = 8_000_000


def collect_answers(model: OpenModel) -> dict[str, Any]:
    """Collect everything that is open: answers by address, and exact weights by site and head."""
    trace = model.get_trace()
    answers: dict[str, Any] = {"/api/document": {**model.describe(), "readOnly": True}}
    addresses = ["/api/thumbnails", "/api/measures"]
    addresses += [f"/api/image?stream={stream}" for stream in trace.images]
    answers |= {address: ask(model, address) for address in addresses}
    weights: dict[str, Any] = {}
    for site, layer in enumerate(trace.layers):
        for head in range(layer.heads):
            address = f"/api/tile?site={site}&head={head}"
            answers[address] = ask(model, f"{address}&rows={TILE_SIDE}&cols={TILE_SIDE}")
            if count_bytes(trace) <= EXACT_BYTES:
                marginals = f"/api/marginals?site={site}&head={head}"
                answers[marginals] = ask(model, marginals)
                exact = trace.head_weights(layer.name, head).astype(np.dtype("<f4"))
                weights[f"{site}/{head}"] = {"shape": list(exact.shape), "base64": _base64(exact)}
    return {"version": 1, "answers": encode_answers(answers), "weights": weights}


def count_bytes(trace: Trace) -> int:
    """Return the bytes of all weights of the first row in float32."""
    return sum(4 * layer.heads * layer.num_queries * layer.num_keys for layer in trace.layers)


def encode_answers(answers: Mapping[str, bytes | Mapping[str, Any]]) -> dict[str, Any]:
    """Return the server's answers by address: JSON unchanged, binary answers as {"base64": ...}.

    >>> encode_answers({"/api/row": b"ab", "/api/document": {"version": 1}})
    {'/api/row': {'base64': 'YWI='}, '/api/document': {'version': 1}}
    """
    return {
        address: {"base64": _base64(answer)} if isinstance(answer, bytes) else dict(answer)
        for address, answer in answers.items()
    }


def _base64(data: Any) -> str:
    return base64.b64encode(data).decode()


# --- The page as one file -------------------------------------------------------------------------

STATIC = Path(__file__).with_name("static")
SCRIPT_FILE = "report.js"
STYLE_FILE = "app.css"
TITLE_END = " · headwise"
NOT_BUILT = (
    "cannot show the page: it is not built; run: make web (needs Node >= 20), or install "
    "a wheel of headwise"
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This report needs JavaScript. It is contained in the file; nothing is loaded.</noscript>
<script type="application/gzip" id="headwise-data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


class PageAssets(NamedTuple):
    """Script and styles of the built page."""

    script: str
    style: str


def load_assets(folder: Path = STATIC) -> PageAssets:
    """Read the built page; raise SpecError if it has not been built.

    The script must not hold the sequences that HTML reads inside a script element; they only occur
    in its strings.
    """
    try:
        script = (folder / SCRIPT_FILE).read_text(encoding="utf-8")
        style = (folder / STYLE_FILE).read_text(encoding="utf-8")
    except OSError:
        raise SpecError(NOT_BUILT) from None
    if "</style" in style.lower():
        raise SpecError(
            f"cannot export: {STYLE_FILE} contains </style; build the page again with make web"
        )
    script = re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
    return PageAssets(script, style)


def pack_json(value: Any) -> str:
    """Encode as JSON that is compressed, and safe inside an HTML script element: base64.

    >>> pack_json({"token": "</script>"})[:5]
    'H4sIA'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return _base64(gzip.compress(text.encode("ascii"), mtime=0))


def content_policy(assets: PageAssets) -> str:
    """Return the content security policy of a file with these assets."""
    script, style = (_base64(hashlib.sha256(text.encode()).digest()) for text in assets)
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def render_html(data: Mapping[str, Any], title: str, assets: PageAssets | None = None) -> str:
    """Return the HTML file; `data` is what the page reads, as `collect_answers` gives it."""
    assets = load_assets() if assets is None else assets
    return PAGE.format(
        policy=escape_html(content_policy(assets)),
        title=escape_html(make_visible(title) + TITLE_END),
        style=assets.style,
        data=pack_json(data),
        script=assets.script,
    )


def render_export(opened: OpenModel) -> str:
    """Return the page with everything that is open as one HTML file."""
    return render_html(collect_answers(opened), opened.name)


# --- All files ------------------------------------------------------------------------------------

WEIGHT_KINDS = ("csv", "json", "npz")
FIGURE_KINDS = ("svg", "png")
MEDIA_TYPES = {
    "svg": "image/svg+xml",
    "png": "image/png",
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "npz": "application/zip",
    "measures": "text/csv; charset=utf-8",
    "trace": "application/octet-stream",
    # a browser must save it and not open it under the address of the server
    "html": "application/octet-stream",
}
EXPORT_KINDS = tuple(MEDIA_TYPES)
MAX_EXPORT_BYTES = 500_000_000  # a browser holds the whole file before it saves it
FIGURE_CELLS = 512  # on each side of the picture of a head
MAX_LINE_TOKENS = 64  # on each side of a drawing as lines


class FileTooLarge(ValueError):
    """Raised if a file would be too large for a browser."""


class ExportScope(NamedTuple):
    """File contents: one head of a site, or all heads (site ""). Weights below `min_weight` are
    left out. A figure shows a `part` through a `lens`, in a theme, as a matrix or as lines.
    """

    site: str = ""
    head: int = 0
    min_weight: float = 0.0
    part: TileRange = TileRange(slice(None), slice(None))
    lens: str = "weight"
    theme: str = "light"
    form: str = "matrix"

    def select(self, trace: Trace) -> WeightSelection:
        """Return the library's selection object."""
        if not self.site:
            return WeightSelection(trace.layers, (), self.min_weight)
        return WeightSelection((trace.get_layer(self.site),), (self.head,), self.min_weight)


class ExportFile(NamedTuple):
    """A file with its name, media type, and contents in chunks."""

    name: str
    media_type: str
    pieces: Iterator[bytes]


def make_file(view: OpenModel, kind: str, scope: ExportScope) -> ExportFile:
    """Make a file of this kind. Raises FileTooLarge, or ValueError if there is nothing to save."""
    trace = view.get_trace()
    size = 0
    if kind in WEIGHT_KINDS:
        size = estimate_export_bytes(trace, f".{kind}", scope.select(trace))
    elif kind == "trace":
        size = trace.nbytes
    if size > MAX_EXPORT_BYTES:
        raise FileTooLarge(
            f"the file would have about {format_bytes(size)}, and a browser can hold "
            f"{format_bytes(MAX_EXPORT_BYTES)}; save one head, leave out small weights, or write "
            "it with `headwise trace FILE.trace --export`"
        )
    name = make_file_stem(view.name)
    if kind == "measures":
        name += "-measures"
    elif scope.site and kind in (*WEIGHT_KINDS, *FIGURE_KINDS):
        name += f"-{make_file_stem(scope.site).removeprefix('headwise-')}-{scope.head}"
    pieces = _encode(view, kind, scope)
    first = next(pieces, b"")  # an error of the first piece is an answer, and no broken file
    suffix = "csv" if kind == "measures" else kind
    return ExportFile(f"{name}.{suffix}", MEDIA_TYPES[kind], chain([first], pieces))


def _encode(view: OpenModel, kind: str, scope: ExportScope) -> Iterator[bytes]:
    """Encode the contents of a file in chunks."""
    if kind in WEIGHT_KINDS:
        trace = view.get_trace()
        yield from encode_weights(trace, f".{kind}", scope.select(trace))
    elif kind == "trace":
        yield from (bytes(piece) for piece in encode_trace(view.get_recorded()))
    elif kind == "html":
        yield render_export(view).encode()
    elif kind in FIGURE_KINDS and scope.site:
        yield to_bytes(draw_head(view, scope), f".{kind}", scope.theme, "none")
    elif view.shown_table is None:
        raise ValueError("the heads have not been measured; measure them first")
    elif kind == "measures":
        yield view.shown_table.to_csv().encode(errors="backslashreplace")
    else:
        yield to_bytes(draw_classes(view.shown_table), f".{kind}", scope.theme, "none")


def draw_classes(table: HeadTable) -> Figure:
    """Draw the class of every head, with layers named as on the page, such as E0."""
    figure = table.class_grid()
    names = [print_head(site, 0, table.sites).removesuffix("H0") for site in table.sites]
    rows = [
        site if name.startswith(site) else f"{site}  {name}"
        for site, name in zip(table.sites, names, strict=True)
    ]
    [grid] = figure.panels
    return replace(figure, panels=[replace(grid, rows=rows)])


def draw_head(view: OpenModel, scope: ExportScope) -> Figure:
    """Draw the weights of a head as on the Head screen: a matrix, or lines between tokens."""
    trace = view.get_trace()
    layer = trace.get_layer(scope.site)
    part = scope.part._replace(size=(FIGURE_CELLS, FIGURE_CELLS))
    tile = view.tile(scope.site, scope.head, part, lens=scope.lens)
    words: list[list[str]] = []
    for stream, span, count, cells in (
        (layer.query_stream, part.queries, layer.num_queries, len(tile.weights)),
        (layer.key_stream, part.keys, layer.num_keys, tile.weights.shape[1]),
    ):
        start, stop, _ = span.indices(count)
        stream_words = trace.streams[stream][0].words if stream in trace.streams else ()
        tokens = [make_visible(word) for word in stream_words] or [str(n) for n in range(count)]
        words.append([tokens[n] for n in make_edges(start, stop, cells)[:-1]])
    name = print_head(scope.site, scope.head, [one.name for one in trace.layers])
    title = f"{view.name}: {name}, {scope.site} head {scope.head}"
    weights = tile.weights / 255
    if scope.form == "lines" and max(map(len, words)) <= MAX_LINE_TOKENS:
        return Figure(title, [Links(words[0], words[1], {scope.lens: weights})])
    names = (f"key ({layer.key_stream})", f"query ({layer.query_stream})")
    scale = f"{scope.lens}; 1 is {tile.scale:.3g}; strength of colour: the square root"
    return Figure(title, [HeatMap(weights, words[0], words[1], "", *names)], scale_label=scale)
