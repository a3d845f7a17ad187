"""The trace file format: safetensors whose metadata is one JSON document, with a checksum over both."""

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
from ..output_paths import Existing, FileKind, check_output
from .attention_record import PACKING_FORMS, Array, AttentionCallRecord, AttentionRecord, PackedMask, TokenRow
from .attention_trace import Trace

SCHEMA_VERSION = 1
DOCUMENT_KEY, CHECKSUM_KEY = "headwise.trace", "sha256"
STORAGE_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "U8": np.dtype("u1"), "I32": np.dtype("<i4")}
# Keys that fields of records had in the first files, with their names of today.
OLD_LAYER_KEYS = {"reads": "kv_head_of_query", "asks": "query_stream", "told": "key_stream"}
OLD_CALL_KEYS = {"asked": "first_query_row"}
HEADER_LENGTH_BYTES = 8  # size of the field that stores the length of the header


TRACE_FILE = FileKind("trace", (f'{{"__metadata__": {{"{DOCUMENT_KEY}": '.encode(),))


def save_trace(trace: Trace, path: Path | str, existing: Existing = "refuse") -> None:
    """Write a trace atomically."""
    write_atomically(check_output(path, TRACE_FILE, existing), encode_trace(trace))


def encode_trace(trace: Trace) -> list[bytes | memoryview]:
    """The contents of a trace file in pieces; the tensors among them are not copied."""
    arrays = dict(_list_arrays(trace))
    document = json.dumps(_trace_to_dict(trace), allow_nan=False)
    header: dict[str, Any] = {
        "__metadata__": {DOCUMENT_KEY: document, CHECKSUM_KEY: _compute_checksum(document, arrays)}
    }
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _dtype_name(array),
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_LENGTH_BYTES)
    blocks = (array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.nbytes)
    return [len(text).to_bytes(HEADER_LENGTH_BYTES, "little"), text, *blocks]


def load_trace(path: Path | str) -> Trace:
    """Read a trace; its tensors are memory-mapped and read from the disk on access.

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
        raise SpecError(f"{path} is damaged: its checksum does not match its content; copy the file again")
    try:
        fields = json.loads(document)
        if fields["schema"] != SCHEMA_VERSION:
            fact = f"{path} is a trace of schema {fields['schema']!r}; this headwise reads {SCHEMA_VERSION}"
            raise SpecError(f"{fact}; trace again, or open it with the version of headwise that wrote it")
        return _trace_from_dict(fields, arrays)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, AttributeError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path} is not a valid trace: {error!r}; trace again") from None


def _read_safetensors(path: Path) -> tuple[str, str, dict[str, Array]]:
    if not path.is_file():
        raise SpecError(f"cannot open {path}: the file is not there; give a file that headwise trace --out wrote")
    try:
        with cast(Any, safe_open)(path, framework="np") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise SpecError(f"{path} is truncated or not a trace: {error}; copy the file again") from None
    if DOCUMENT_KEY not in metadata or CHECKSUM_KEY not in metadata:
        raise SpecError(f"{path} contains tensors, but no trace; make one with headwise trace MODEL --out {path.name}")
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        header = json.loads(file.read(header_size))
    del header["__metadata__"]
    return (
        metadata[DOCUMENT_KEY],
        metadata[CHECKSUM_KEY],
        {name: _map_tensor(path, HEADER_LENGTH_BYTES + header_size, entry) for name, entry in header.items()},
    )


def _map_tensor(path: Path, start: int, entry: Mapping[str, Any]) -> Array:
    shape = tuple(entry["shape"])
    if entry["dtype"] not in STORAGE_DTYPES:
        raise SpecError(f"{path} contains a tensor of dtype {entry['dtype']}, which traces do not use; trace again")
    if 0 in shape:
        return np.zeros(shape, STORAGE_DTYPES[entry["dtype"]])
    return np.memmap(path, STORAGE_DTYPES[entry["dtype"]], "r", start + entry["data_offsets"][0], shape)


def _dtype_name(array: Array) -> str:
    return next(name for name, kind in STORAGE_DTYPES.items() if kind == array.dtype)


def _compute_checksum(document: str, arrays: Mapping[str, Array]) -> str:
    sha256 = hashlib.sha256(document.encode())
    for name, array in sorted(arrays.items()):
        sha256.update(json.dumps([name, _dtype_name(array), list(array.shape)]).encode())
        if array.nbytes:
            sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha256.hexdigest()


def _list_arrays(trace: Trace) -> Iterator[tuple[str, Array]]:
    for n, layer in enumerate(trace.layers):
        yield from ((f"{n}.{name}", np.ascontiguousarray(array)) for name, array in layer.arrays.items())
    yield from ((f"grid.{n}", np.ascontiguousarray(grid.values)) for n, grid in enumerate(trace.grids))
    yield from ((f"thumbnail.{name}", np.ascontiguousarray(array)) for name, array in trace.thumbnails.items())
    yield from ((f"image.{name}", np.ascontiguousarray(array)) for name, array in trace.images.items())


def _trace_to_dict(trace: Trace) -> dict[str, Any]:
    layers = [
        {name: value for name, value in vars(layer).items() if name not in ("arrays", "calls")}
        | {"calls": [asdict(call) for call in layer.calls]}
        for layer in trace.layers
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
        "images": list(trace.images),
        "classes": [[site, head, name] for (site, head), name in trace.classes.items()],
    }


def _trace_from_dict(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> Trace:
    grids = tuple(_mask_from_dict(entry, arrays[f"grid.{n}"]) for n, entry in enumerate(fields["grids"]))
    layers = tuple(_layer_from_dict(entry, n, arrays, len(grids)) for n, entry in enumerate(fields["layers"]))
    streams = {name: tuple(_token_row_from_dict(row) for row in rows) for name, rows in fields["streams"].items()}
    thumbnails = {name: arrays[f"thumbnail.{name}"] for name in fields["thumbnails"]}
    images = {name: _check_image(arrays[f"image.{name}"]) for name in fields.get("images", ())}
    classes = {(str(site), int(head)): str(name) for site, head, name in fields.get("classes", ())}
    return Trace(fields["model"], streams, layers, grids, fields["skipped"], thumbnails, images, classes)


def _check_image(array: Array) -> Array:
    if array.dtype != np.uint8 or array.ndim != 4:
        raise ValueError(
            f"an image of {array.dtype} {list(array.shape)} is not one of bytes [B, height, width, channels]"
        )
    return array


def _token_row_from_dict(fields: Mapping[str, Any]) -> TokenRow:
    offsets = tuple((int(start), int(stop)) for start, stop in fields["offsets"])
    return TokenRow(tuple(map(int, fields["ids"])), tuple(map(str, fields["words"])), offsets, str(fields["text"]))


def _mask_from_dict(fields: Mapping[str, Any], values: Array) -> PackedMask:
    batch, heads, queries, keys = map(int, fields["shape"])
    last_axis_sizes = {"bits": -(-keys // 8), "band": queries + keys - 1, "full": keys}
    if fields["form"] not in PACKING_FORMS or values.shape[-1] != last_axis_sizes[fields["form"]]:
        raise ValueError(f"a mask {fields['form']!r} of shape {fields['shape']} has values of shape {values.shape}")
    low = -np.inf if fields["low"] is None else float(fields["low"])
    return PackedMask(fields["form"], (batch, heads, queries, keys), values, low)


def _layer_from_dict(
    fields: Mapping[str, Any], number: int, arrays: Mapping[str, Array], num_grids: int
) -> AttentionRecord:
    layer_arrays = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{number}.")}
    calls = tuple(_call_from_dict(call) for call in fields["calls"])
    arguments = _rename_keys(fields, OLD_LAYER_KEYS)
    arguments |= {"kv_head_of_query": tuple(arguments["kv_head_of_query"]), "calls": calls, "arrays": layer_arrays}
    layer = AttentionRecord(**arguments)
    for call in calls:
        _check_call(layer, call, num_grids)
    return layer


def _call_from_dict(fields: Mapping[str, Any]) -> AttentionCallRecord:
    tuples = {name: tuple(fields[name]) for name in ("queries", "keys", "grids")}
    return AttentionCallRecord(**_rename_keys({**fields, **tuples}, OLD_CALL_KEYS))


def _rename_keys(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in fields.items()}


def _check_call(layer: AttentionRecord, call: AttentionCallRecord, num_grids: int) -> None:
    """Raise if a call refers to tensors or masks that the trace does not contain."""
    if call.weights is not None:
        exists = layer.arrays[f"weights.{call.weights}"].shape[2:] == (
            call.queries[1] - call.queries[0],
            call.keys[1] - call.keys[0],
        )
    else:
        q, k = layer.arrays["q"], layer.arrays["k"]
        exists = (
            call.first_query_row + call.queries[1] - call.queries[0] <= q.shape[1]
            and call.keys[1] <= k.shape[1]
            and q.shape[2] == len(layer.kv_head_of_query)
        )
        exists = exists and max(layer.kv_head_of_query) < k.shape[2] and all(0 <= n < num_grids for n in call.grids)
    if call.places is not None:
        places = layer.arrays[f"places.{call.places}"]
        exists = exists and places.shape == (call.keys[1] - call.keys[0],) and places.min(initial=0) >= 0
    if not exists:
        raise ValueError(f"{layer.name} refers to data that is not in the file")
