"""A trace in one file: safetensors whose metadata is one JSON document, with a checksum over both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import SpecError
from ..files import write_atomically
from .attention_record import AttentionCallRecord, AttentionRecord, TokenRow
from .attention_trace import Trace
from .packed_masks import PACKING_FORMS, Array, PackedMask

SCHEMA_VERSION = 1
DOCUMENT_KEY, CHECKSUM_KEY = "headwise.trace", "sha256"
STORAGE_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "U8": np.dtype("u1"), "I32": np.dtype("<i4")}
HEADER_LENGTH_BYTES = 8  # bytes that say how long the header is


def save_trace(trace: Trace, path: Path | str) -> None:
    """Write a trace, whole or not at all."""
    arrays = dict(_list_arrays(trace))
    document = json.dumps(_trace_to_dict(trace), allow_nan=False)
    head: dict[str, Any] = {"__metadata__": {DOCUMENT_KEY: document, CHECKSUM_KEY: _compute_checksum(document, arrays)}}
    at = 0
    for name, array in arrays.items():
        head[name] = {"dtype": _dtype_name(array), "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % HEADER_LENGTH_BYTES)
    blocks = (array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.nbytes)
    write_atomically(path, [len(text).to_bytes(HEADER_LENGTH_BYTES, "little"), text, *blocks])


def load_trace(path: Path | str) -> Trace:
    """The trace in a file; its numbers stay on the disk until they are asked for.

    >>> import tempfile
    >>> from headwise.traces import trace_from_weights
    >>> trace = trace_from_weights([np.full((1, 2, 3, 3), 1 / 3)], ["a", "b", "c"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trace.save(f"{folder}/a.trace")
    ...     load_trace(f"{folder}/a.trace").head_weights(0, 1, slice(0, 1)).round(2)
    array([[0.33, 0.33, 0.33]], dtype=float32)
    """
    path = Path(path)
    document, checksum, arrays = _read_safetensors(path)
    if _compute_checksum(document, arrays) != checksum:
        raise SpecError(f"{path} is damaged: its checksum is of other content; copy the file again")
    try:
        said = json.loads(document)
        if said["schema"] != SCHEMA_VERSION:
            fact = f"{path} is a trace of schema {said['schema']!r}; this headwise reads {SCHEMA_VERSION}"
            raise SpecError(f"{fact}; trace again, or open it with the headwise that wrote it")
        return _trace_from_dict(said, arrays)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, AttributeError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path} says nothing that can be meant: {error!r}; trace again") from None


def _read_safetensors(path: Path) -> tuple[str, str, dict[str, Array]]:
    if not path.is_file():
        raise SpecError(f"{path} is not there; give a file that headwise trace --out wrote")
    try:
        with cast(Any, safe_open)(path, framework="np") as file:
            said: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise SpecError(f"{path} is cut short or no trace: {error}; copy the file again") from None
    if DOCUMENT_KEY not in said or CHECKSUM_KEY not in said:
        raise SpecError(f"{path} holds tensors, but no trace; make one with headwise trace MODEL --out {path.name}")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        head = json.loads(file.read(size))
    del head["__metadata__"]
    return (
        said[DOCUMENT_KEY],
        said[CHECKSUM_KEY],
        {name: _map_tensor(path, HEADER_LENGTH_BYTES + size, told) for name, told in head.items()},
    )


def _map_tensor(path: Path, start: int, told: Mapping[str, Any]) -> Array:
    shape = tuple(told["shape"])
    if told["dtype"] not in STORAGE_DTYPES:
        raise SpecError(f"{path} holds numbers of kind {told['dtype']}, which no trace does; trace again")
    if 0 in shape:
        return np.zeros(shape, STORAGE_DTYPES[told["dtype"]])
    return np.memmap(path, STORAGE_DTYPES[told["dtype"]], "r", start + told["data_offsets"][0], shape)


def _dtype_name(array: Array) -> str:
    return next(name for name, kind in STORAGE_DTYPES.items() if kind == array.dtype)


def _compute_checksum(document: str, arrays: Mapping[str, Array]) -> str:
    found = hashlib.sha256(document.encode())
    for name, array in sorted(arrays.items()):
        found.update(json.dumps([name, _dtype_name(array), list(array.shape)]).encode())
        if array.nbytes:
            found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _list_arrays(trace: Trace) -> Iterator[tuple[str, Array]]:
    for n, one in enumerate(trace.layers):
        yield from ((f"{n}.{name}", np.ascontiguousarray(array)) for name, array in one.arrays.items())
    yield from ((f"grid.{n}", np.ascontiguousarray(grid.values)) for n, grid in enumerate(trace.grids))
    yield from ((f"thumbnail.{name}", np.ascontiguousarray(array)) for name, array in trace.thumbnails.items())


def _trace_to_dict(trace: Trace) -> dict[str, Any]:
    layers = [
        {name: value for name, value in vars(one).items() if name not in ("arrays", "calls")}
        | {"calls": [asdict(call) for call in one.calls]}
        for one in trace.layers
    ]
    grids = [
        {"form": grid.form, "shape": grid.shape, "low": None if np.isneginf(grid.low) else grid.low}
        for grid in trace.grids
    ]
    streams = {name: [asdict(row) for row in rows] for name, rows in trace.streams.items()}
    return {
        "schema": SCHEMA_VERSION,
        "model": dict(trace.model),
        "streams": streams,
        "layers": layers,
        "grids": grids,
        "skipped": dict(trace.skipped),
        "thumbnails": list(trace.thumbnails),
    }


def _trace_from_dict(said: Mapping[str, Any], arrays: Mapping[str, Array]) -> Trace:
    grids = tuple(_mask_from_dict(one, arrays[f"grid.{n}"]) for n, one in enumerate(said["grids"]))
    layers = tuple(_layer_from_dict(one, n, arrays, len(grids)) for n, one in enumerate(said["layers"]))
    streams = {name: tuple(_token_row_from_dict(row) for row in rows) for name, rows in said["streams"].items()}
    thumbnails = {name: arrays[f"thumbnail.{name}"] for name in said["thumbnails"]}
    return Trace(said["model"], streams, layers, grids, said["skipped"], thumbnails)


def _token_row_from_dict(said: Mapping[str, Any]) -> TokenRow:
    offsets = tuple((int(start), int(stop)) for start, stop in said["offsets"])
    return TokenRow(tuple(map(int, said["ids"])), tuple(map(str, said["words"])), offsets, str(said["text"]))


def _mask_from_dict(said: Mapping[str, Any], values: Array) -> PackedMask:
    batch, heads, queries, keys = map(int, said["shape"])
    last = {"bits": -(-keys // 8), "band": queries + keys - 1, "full": keys}
    if said["form"] not in PACKING_FORMS or values.shape[-1] != last[said["form"]]:
        raise ValueError(f"a grid {said['form']!r} of {said['shape']} has {values.shape}")
    low = -np.inf if said["low"] is None else float(said["low"])
    return PackedMask(said["form"], (batch, heads, queries, keys), values, low)


def _layer_from_dict(said: Mapping[str, Any], number: int, arrays: Mapping[str, Array], grids: int) -> AttentionRecord:
    own = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{number}.")}
    calls = tuple(_call_from_dict(one) for one in said["calls"])
    told: dict[str, Any] = {**said, "reads": tuple(said["reads"]), "calls": calls, "arrays": own}
    layer = AttentionRecord(**told)
    for call in calls:
        _check_call(layer, call, grids)
    return layer


def _call_from_dict(said: Mapping[str, Any]) -> AttentionCallRecord:
    rows = {name: tuple(said[name]) for name in ("queries", "keys", "grids")}
    told: dict[str, Any] = {**said, **rows}
    return AttentionCallRecord(**told)


def _check_call(layer: AttentionRecord, call: AttentionCallRecord, grids: int) -> None:
    """Whether all that a call speaks of is there."""
    if call.weights is not None:
        there = layer.arrays[f"weights.{call.weights}"].shape[2:] == (
            call.queries[1] - call.queries[0],
            call.keys[1] - call.keys[0],
        )
    else:
        q, k = layer.arrays["q"], layer.arrays["k"]
        there = (
            call.asked + call.queries[1] - call.queries[0] <= q.shape[1]
            and call.keys[1] <= k.shape[1]
            and q.shape[2] == len(layer.reads)
        )
        there = there and max(layer.reads) < k.shape[2] and all(0 <= n < grids for n in call.grids)
    if call.places is not None:
        places = layer.arrays[f"places.{call.places}"]
        there = there and places.shape == (call.keys[1] - call.keys[0],) and places.min(initial=0) >= 0
    if not there:
        raise ValueError(f"{layer.name} speaks of more than there is")
