"""What is known of heads, as HeadVis keeps it: one document for all heads, one for each head with its examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..files import write_atomically
from ..traces import Trace
from .scene import Example
from .table import HeadTable

MAX_KEYS = 8  # of a row, as HeadVis keeps


def export_headvis(table: HeadTable, trace: Trace, annotated: Example, folder: Path) -> Iterator[str]:
    """Write scatter_data.json and heads/L{layer}H{head}.json; layers are numbered over all sites, in their order."""
    (folder / "heads").mkdir(parents=True, exist_ok=True)
    sites = table.sites
    points = [
        {
            "layer": sites.index(one.site), "head": one.head, "site": one.site,
            "metrics": {name: told.data["value"] for name, told in one.measures.items()},
            "labels": [named.name for named in one.classes],
        }
        for one in table.heads
    ]  # fmt: skip
    path = folder / "scatter_data.json"
    write_atomically(path, json.dumps({"model": table.model, "heads": points}).encode())
    yield str(path)
    for one in table.heads:
        if one.site not in {layer.name for layer in trace.layers}:
            continue
        own = trace.get_layer(one.site)
        weights = trace.head_weights(one.site, one.head)
        strongest = [
            [[int(s), round(float(row[s]), 6)] for s in (-row).argsort(kind="stable")[:MAX_KEYS] if row[s] > 0]
            for row in weights
        ]
        example = {
            "tokens": list(annotated.streams[own.asks].words), "keys": list(annotated.streams[own.told].words),
            "attention": strongest,
        }  # fmt: skip
        told = {**one.data, "examples": [example]}
        name = folder / "heads" / f"L{sites.index(one.site)}H{one.head}.json"
        write_atomically(name, json.dumps(told).encode())
