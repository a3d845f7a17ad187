"""Contents of an HTML export: the answers that the page would ask the server for, for everything that is open.

Every head is stored as a tile of at most `TILE_SIDE` cells a side with its masked cells. If all weights together are
below `EXACT_BYTES`, the exact weights of every query are stored too, so that the page shows them without a server.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..traces import Trace
from ..translation.sentences import iter_sentences, translate_all
from .analysis_answers import encode_image
from .binary_answers import encode_measures, encode_thumbnails, encode_tile
from .html_export import encode_answers, load_assets
from .open_model import OpenModel, TileRange

TILE_SIDE = 256
EXACT_BYTES = 8_000_000


def collect_answers(model: OpenModel) -> dict[str, Any]:
    """Everything that is open, as the page reads it: answers by address, and exact weights by site and head."""
    trace = model.get_trace()
    answers: dict[str, Any] = {
        "/api/document": {**model.describe(), "readOnly": True},
        "/api/thumbnails": encode_thumbnails(model),
        "/api/measures": encode_measures(model),
    }
    for number, layer in enumerate(trace.layers):
        part = TileRange(slice(0, layer.num_queries), slice(0, layer.num_keys), (TILE_SIDE, TILE_SIDE))
        for head in range(layer.heads):
            tile = model.tile(layer.name, head, part)
            answers[f"/api/tile?site={number}&head={head}"] = encode_tile(model, tile, part)
    for stream in trace.images:
        answers[f"/api/image?stream={stream}"] = encode_image(model, stream)
    if model.table is not None:
        answers["/api/export?kind=measures"] = {"text": model.table.to_csv()}
    answers["/api/translations"] = translate_all(_list_sentences(model))
    exact = dict(_iter_weights(trace)) if count_bytes(trace) <= EXACT_BYTES else {}
    return {"version": 1, "answers": encode_answers(answers), "weights": exact}


def _list_sentences(model: OpenModel) -> list[str]:
    """The sentences that the page of an export shows: those of the document, the measures and the classes."""
    layers = model.get_trace().layers
    names = {
        name for one in layers for name in (one.stack, f"{one.stack} {one.kind}", one.query_stream, one.key_stream)
    }
    sentences = [*iter_sentences(model.describe()), *sorted(names)]
    if model.table is not None:
        evidence = [one.evidence for head in model.table.heads for one in head.classes]
        sentences += [model.table.texts, *model.table.notes, *evidence]
    return sentences


def estimate_html_bytes(model: OpenModel) -> int:
    """About how many bytes the HTML file has; raises SpecError if the page is not built."""
    trace = model.get_trace()
    cells = sum(
        layer.heads * min(TILE_SIDE, layer.num_queries) * min(TILE_SIDE, layer.num_keys) for layer in trace.layers
    )
    exact = count_bytes(trace) if count_bytes(trace) <= EXACT_BYTES else 0
    texts = len(json.dumps(model.describe())) + (len(model.table.to_csv()) if model.table is not None else 0)
    images = sum(image[0].nbytes for image in trace.images.values())
    binary = len(encode_measures(model)) + len(encode_thumbnails(model)) + 2 * cells + exact + images
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
