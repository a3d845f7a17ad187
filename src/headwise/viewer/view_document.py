"""The JSON description of what is open: the model, the tokens, the attention layers, the measures
and their ranges.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..observe.traces.attention_record import AttentionRecord, TokenRow
from ..observe.traces.attention_trace import Trace

if TYPE_CHECKING:
    from ..observe.head_analysis.head_table import HeadTable
    from ..observe.inspect.site import Ability, Site

DOCUMENT_VERSION = 1
MAX_STEM = 60  # characters of a file name that come from the name of the model
ABILITIES = ("observe", "ablate", "prune", "convert")


def describe_trace(
    trace: Trace,
    sites: Mapping[str, Site] | None = None,
    *,
    is_loadable: bool = False,
    pruned: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Describe the recorded run: its model, the tokens of every stream, and its attention layers.

    `sites` are the attention layers of the open model by name; without a model nothing can be done
    to a layer. What can be done to the layers of a model that `is_loadable` is checked when it is
    loaded. `pruned` are the heads that each site has lost, in the numbers that they had.
    """
    numbers = {layer.name: number for number, layer in enumerate(trace.layers)}
    return {
        "version": DOCUMENT_VERSION,
        "model": {
            name: value
            for name, value in trace.model.items()
            if isinstance(value, (str, int, float, bool))
        },
        "streams": {name: list(map(_describe_row, rows)) for name, rows in trace.streams.items()},
        "sites": [
            _describe_site(layer, (sites or {}).get(layer.name), is_loadable)
            | {"prunedHeads": sorted((pruned or {}).get(layer.name, ()))}
            for layer in trace.layers
        ],
        "skipped": dict(trace.skipped),
        "images": {name: list(image.shape[1:]) for name, image in trace.images.items()},
        "classes": [
            [numbers[site], head, name]
            for (site, head), name in trace.classes.items()
            if site in numbers
        ],
    }


def estimate_memory(trace: Trace, model: Any, max_tokens: int) -> dict[str, int | None]:
    """Parameters and bytes of a loaded model, bytes of the recorded run, and about those of a run
    of `max_tokens`.

    Queries, keys and values grow with the number of tokens, recorded weights with its square.
    """
    longest = 0.0
    for layer in trace.layers:
        growth = max_tokens / max(layer.num_queries, layer.num_keys, 1)
        for name, array in layer.arrays.items():
            longest += array.nbytes * (
                growth**2 if name.startswith("weights") else growth if name[0] in "qkvz" else 1
            )
    parameters = [] if model is None else list(model.parameters())
    return {
        "parameters": sum(one.numel() for one in parameters) if parameters else None,
        "weightBytes": sum(one.numel() * one.element_size() for one in parameters)
        if parameters
        else None,
        "recordBytes": trace.nbytes,
        "longestBytes": int(longest),
    }


def _describe_row(row: TokenRow) -> dict[str, Any]:
    return {
        "ids": list(row.ids),
        "words": list(row.words),
        "text": row.text,
        "offsets": [list(span) for span in row.offsets],
    }


def _describe_site(layer: AttentionRecord, site: Site | None, is_loadable: bool) -> dict[str, Any]:
    has_weights = any(call.weights is not None for call in layer.calls)
    return {
        "name": layer.name,
        "stack": layer.stack,
        "layer": layer.layer,
        "kind": layer.kind,
        "heads": layer.heads,
        "kvHeads": max(layer.kv_head_of_query, default=-1) + 1,
        "kvHeadOfQuery": list(layer.kv_head_of_query),
        "queryStream": layer.query_stream,
        "keyStream": layer.key_stream,
        "numQueries": layer.num_queries,
        "numKeys": layer.num_keys,
        "batch": layer.batch_size,
        "calls": len(layer.calls),
        "capture": "weights" if has_weights else "queries and keys",
        "hasValues": "v" in layer.arrays,
        "hasOutputs": "z" in layer.arrays,
        "abilities": {name: _describe_ability(site, name, is_loadable) for name in ABILITIES},
    }


def _describe_ability(site: Site | None, name: str, is_loadable: bool) -> dict[str, Any]:
    if site is None:
        if is_loadable:
            return {"possible": True, "reason": ""}
        return {
            "possible": False,
            "reason": "only a trace is open; open the model to change its heads",
        }
    ability: Ability = getattr(site, name)
    return {"possible": ability.possible, "reason": ability.reason}


def list_heads(trace: Trace) -> list[tuple[str, int]]:
    """All heads as (site, head), in the order of the page."""
    heads: list[tuple[str, int]] = []
    for layer in trace.layers:
        heads += [(layer.name, head) for head in range(layer.heads)]
    return heads


def measure_names(table: HeadTable) -> list[str]:
    """The measures that any head has, because self- and cross-attention have different ones."""
    names: dict[str, None] = {}
    for head in table.heads:
        names |= dict.fromkeys(head.measures)
    return list(names)


def describe_measures(table: HeadTable | None) -> list[dict[str, Any]]:
    """Describe the measures of a table: name and range of the values over all heads."""
    if table is None or not table.heads:
        return []
    descriptions: list[dict[str, Any]] = []
    for name in measure_names(table):
        values = [head.measures[name].value for head in table.heads if name in head.measures]
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        descriptions.append({"name": name, "low": low, "high": high})
    return descriptions


def stack_measures(
    table: HeadTable, heads: Sequence[tuple[str, int]]
) -> tuple[list[str], NDArray[np.float32]]:
    """Return the names of the measures, and [heads, measures, 4] with value, interval and chance
    level of each head.

    `heads` are (site, head). What was not measured is NaN.
    """
    names = measure_names(table)
    by_head = {(head.site, head.head): head for head in table.heads}
    stacked = np.full((len(heads), len(names), 4), np.nan, np.float32)
    for row, key in enumerate(heads):
        for column, name in enumerate(names if key in by_head else ()):
            if name in by_head[key].measures:
                stacked[row, column] = by_head[key].measures[name][:4]
    return names, stacked


def list_classes(table: HeadTable, sites: Sequence[str]) -> list[dict[str, Any]]:
    """List the classes of every head, the likeliest first: site as an index, head, name, score and
    evidence.
    """
    index = {name: number for number, name in enumerate(sites)}
    listed: list[dict[str, Any]] = []
    for head in table.heads:
        if head.site in index:
            classes = [one._asdict() for one in head.classes]
            listed.append({"site": index[head.site], "head": head.head, "classes": classes})
    return listed


def make_file_stem(name: str) -> str:
    """The beginning of the names of all files of a model: letters, digits, points and hyphens only.

    >>> make_file_stem("dates"), make_file_stem("../a b\\n"), make_file_stem("日期")
    ('headwise-dates', 'headwise-a-b', 'headwise-model')
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return f"headwise-{re.sub(r'[^A-Za-z0-9.]+', '-', plain).strip('-.')[:MAX_STEM].rstrip('-.') or 'model'}"
