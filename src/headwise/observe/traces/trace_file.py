"""Read and write trace files: safetensors with one JSON document as metadata and a checksum.

The checksum covers both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from ...util.errors import SpecError
from ...util.files import write_atomically
from ...util.output_paths import FileKind, check_output
from ...util.size_limits import (
    MAX_HEADS,
    MAX_INTEGER,
    MAX_TRACE_TOKENS,
    Record,
    check_size,
    parse_json,
)
from .attention_record import (
    Array,
    AttentionCallRecord,
    AttentionRecord,
    PackedMask,
    TokenRow,
)
from .attention_trace import Trace

SCHEMA_VERSION = 1
DOCUMENT_KEY = "headwise.trace"
CHECKSUM_KEY = "sha256"
STORAGE_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
}
HEADER_LENGTH_BYTES = 8  # size of the field that stores the length of the header
TENSOR_AXES = {"q": 4, "k": 4, "v": 4, "z": 4, "weights": 4, "sinks": 1, "places": 1}
REMEDY = "trace again"


TRACE_FILE = FileKind("trace", (f'{{"__metadata__": {{"{DOCUMENT_KEY}": '.encode(),))


def save_trace(trace: Trace, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a trace to one file that opens without the model and without torch.

    `overwrite` replaces an earlier trace; anything else at this path is refused.
    """
    path = check_output(path, TRACE_FILE, "overwrite" if overwrite else "refuse")
    write_atomically(path, encode_trace(trace))


def encode_trace(trace: Trace) -> list[bytes | memoryview]:
    """Return the contents of a trace file in pieces; tensors are not copied."""
    parts: dict[str, Array] = {}
    for n, layer in enumerate(trace.layers):
        parts |= {f"{n}.{name}": array for name, array in layer.arrays.items()}
    parts |= {f"grid.{n}": grid.values for n, grid in enumerate(trace.grids)}
    parts |= {f"thumbnail.{name}": array for name, array in trace.thumbnails.items()}
    parts |= {f"image.{name}": array for name, array in trace.images.items()}
    arrays = {name: np.ascontiguousarray(array) for name, array in parts.items()}
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
    >>> from headwise.observe.traces import trace_from_weights
    >>> trace = trace_from_weights([np.full((1, 2, 3, 3), 1 / 3)], ["a", "b", "c"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_trace(trace, f"{folder}/a.trace")
    ...     load_trace(f"{folder}/a.trace").head_weights(0, 1, slice(0, 1)).round(2)
    array([[0.33, 0.33, 0.33]], dtype=float32)
    """
    path = Path(path)
    document, checksum, arrays = _read_safetensors(path)
    if _compute_checksum(document, arrays) != checksum:
        raise SpecError(
            f"{path} is damaged: its checksum does not match its content; copy the file again"
        )
    try:
        record = Record("", parse_json("its document", document, REMEDY), REMEDY)
        if record.get("schema") != SCHEMA_VERSION:
            fact = f"schema {record.get('schema')!r}; this headwise reads {SCHEMA_VERSION}"
            raise SpecError(
                f"{fact}; trace again, or open it with the version of headwise that wrote it"
            )
        return _trace_from_record(record, arrays)
    except ValueError as error:
        raise SpecError(f"{path} is not a valid trace: {error}") from None


def _read_safetensors(path: Path) -> tuple[str, str, dict[str, Array]]:
    if not path.is_file():
        raise SpecError(
            f"cannot open {path}: the file is not there; give a file that headwise trace --out "
            "wrote"
        )
    try:
        with cast(Any, safe_open)(path, framework="np") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise SpecError(
            f"{path} is truncated or not a trace: {error}; copy the file again"
        ) from None
    if DOCUMENT_KEY not in metadata or CHECKSUM_KEY not in metadata:
        raise SpecError(
            f"{path} contains tensors, but no trace; make one with headwise trace MODEL --out "
            f"{path.name}"
        )
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        header = json.loads(file.read(header_size))
    del header["__metadata__"]
    return (
        metadata[DOCUMENT_KEY],
        metadata[CHECKSUM_KEY],
        {
            name: _map_tensor(path, HEADER_LENGTH_BYTES + header_size, entry)
            for name, entry in header.items()
        },
    )


def _map_tensor(path: Path, start: int, entry: Mapping[str, Any]) -> Array:
    shape = tuple(entry["shape"])
    if entry["dtype"] not in STORAGE_DTYPES:
        raise SpecError(
            f"{path} contains a tensor of dtype {entry['dtype']}, which traces do not use; trace "
            "again"
        )
    if 0 in shape:
        return np.zeros(shape, STORAGE_DTYPES[entry["dtype"]])
    return np.memmap(
        path, STORAGE_DTYPES[entry["dtype"]], "r", start + entry["data_offsets"][0], shape
    )


def _dtype_name(array: Array) -> str:
    return next(name for name, kind in STORAGE_DTYPES.items() if kind == array.dtype)


def _compute_checksum(document: str, arrays: Mapping[str, Array]) -> str:
    sha256 = hashlib.sha256(document.encode())
    for name, array in sorted(arrays.items()):
        sha256.update(json.dumps([name, _dtype_name(array), list(array.shape)]).encode())
        if array.nbytes:
            sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha256.hexdigest()


def _trace_to_dict(trace: Trace) -> dict[str, Any]:
    layers: list[dict[str, Any]] = []
    for layer in trace.layers:
        layers.append(asdict(replace(layer, arrays={})))
        del layers[-1]["arrays"]
    grids = [
        {"form": grid.form, "shape": grid.shape, "low": None if np.isneginf(grid.low) else grid.low}
        for grid in trace.grids
    ]
    streams: dict[str, list[dict[str, Any]]] = {}
    for name, rows in trace.streams.items():
        streams[name] = [asdict(row) for row in rows]
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


TRACE_FIELDS = {"schema", *(one.name for one in fields(Trace))}
TENSOR_FIELDS = ("arrays", "values")  # of records; they are tensors of the file
PICTURE_AXES = 4


def _trace_from_record(record: Record, arrays: Mapping[str, Array]) -> Trace:
    record.check_fields(TRACE_FIELDS)
    grids = tuple(
        _mask_from_record(entry, _array(entry, arrays, f"grid.{n}"))
        for n, entry in enumerate(record.read_records("grids"))
    )
    layers = tuple(
        _layer_from_record(entry, n, arrays, grids)
        for n, entry in enumerate(record.read_records("layers"))
    )
    tables = record.read_record("streams")
    streams = {
        name: tuple(map(_token_row_from_record, tables.read_records(name)))
        for name in tables.values
    }
    classes: dict[tuple[str, int], str] = {}
    for n, row in enumerate(record.read_list("classes", None, ())):
        where = f"classes[{n}]"
        site, head, name = Record(where, {"row": row}, REMEDY).read_list("row", 3)
        cells = Record(where, {"site": site, "head": head, "name": name}, REMEDY)
        place = (cells.read_text("site"), cells.read_int("head", 0, MAX_HEADS))
        classes[place] = cells.read_text("name")
    skipped = record.read_record("skipped")
    trace = Trace(
        record.read_record("model").values,
        streams,
        layers,
        grids,
        {name: skipped.read_text(name) for name in skipped.values},
        _pictures(record, arrays, "thumbnail"),
        _pictures(record, arrays, "image"),
        classes,
    )
    _check_pictures(record, trace)
    return trace


def _array(record: Record, arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays:
        record.fail("", f"has no tensor {name!r} in the file")
    return arrays[name]


def _pictures(record: Record, arrays: Mapping[str, Array], kind: str) -> dict[str, Array]:
    pictures: dict[str, Array] = {}
    for name in record.read_texts(f"{kind}s", ()):
        place = f"{kind}.{name}"
        array = _array(record, arrays, place)
        if array.dtype != np.uint8 or array.ndim != PICTURE_AXES:
            record.fail(
                place, f"is {array.dtype} {list(array.shape)}, not bytes with {PICTURE_AXES} axes"
            )
        pictures[name] = array
    return pictures


def _check_pictures(record: Record, trace: Trace) -> None:
    """Raise unless thumbnails match their layers and images have one row for each row of their
    stream.
    """
    by_name = {layer.name: layer for layer in trace.layers}
    rows = {layer.key_stream: layer.batch_size for layer in trace.layers}
    for name, picture in trace.thumbnails.items():
        layer = by_name.get(name)
        if layer is None:
            record.fail(f"thumbnail.{name}", "belongs to no layer")
        largest = max(picture.shape[2:])
        sizes = (min(largest, layer.num_queries), min(largest, layer.num_keys))  # of square cells
        expected = (layer.batch_size, layer.heads, *sizes)
        if not largest or picture.shape != expected:
            record.fail(
                f"thumbnail.{name}", f"has shape {list(picture.shape)}, not {list(expected)}"
            )
    for name, image in trace.images.items():
        if len(image) != rows.get(name) or image.shape[3] not in (1, 3) or not image.size:
            record.fail(
                f"image.{name}",
                f"has shape {list(image.shape)}, not an image for each row of a stream",
            )


# How a field of a record is read, by its type; integers from 0 to `MAX_TRACE_TOKENS`.
INT_LIMITS = {
    "ids": (-MAX_INTEGER, MAX_INTEGER),
    "layer": (0, MAX_INTEGER),
    "heads": (1, MAX_HEADS),
    "kv_head_of_query": (0, MAX_HEADS),
    "shape": (1, MAX_TRACE_TOKENS),
}
READERS: Mapping[str, Callable[[Record, str], Any]] = {
    "str": Record.read_text,
    "bool": Record.read_bool,
    "float": Record.read_number,
    "float | None": Record.read_optional_number,
    "int": lambda record, name: record.read_int(name, *_int_limits(name)),
    "int | None": lambda record, name: record.read_optional_int(name, *_int_limits(name)),
    "tuple[str, ...]": Record.read_texts,
    "tuple[int, ...]": lambda record, name: record.read_ints(name, *_int_limits(name)),
    "tuple[int, int]": lambda record, name: record.read_ints(name, *_int_limits(name), 2),
    "tuple[int, int, int, int]": lambda record, name: record.read_ints(name, *_int_limits(name), 4),
}


def _int_limits(name: str) -> tuple[int, int]:
    return INT_LIMITS.get(name, (0, MAX_TRACE_TOKENS))


def _read_fields(record: Record, kind: type[Any], **others: Any) -> dict[str, Any]:
    """Return the fields of a dataclass from a record, except for `others`, which are returned as
    they are; a field with a default may be missing.
    """
    record.check_fields(one.name for one in fields(kind) if one.name not in TENSOR_FIELDS)
    values: dict[str, Any] = {}
    for one in fields(kind):
        if one.name not in others and (one.name in record.values or one.default is MISSING):
            values[one.name] = READERS[str(one.type)](record, one.name)
    return values | others


def _token_row_from_record(record: Record) -> TokenRow:
    pairs: list[tuple[int, ...]] = []
    for pair in record.read_list("offsets", None, ()):
        place = Record(f"{record.where}.offsets", {"pair": pair}, REMEDY)
        pairs.append(place.read_ints("pair", length=2))
    row = TokenRow(**_read_fields(record, TokenRow, offsets=tuple(pairs)))
    check_size(f"the number of tokens of {record.where}", len(row.ids), MAX_TRACE_TOKENS)
    return row


def _mask_from_record(record: Record, values: Array) -> PackedMask:
    low = record.read_optional_number("low")
    low = -np.inf if low is None else low
    mask = PackedMask(**_read_fields(record, PackedMask, values=values, low=low))
    batch, heads, queries, keys = mask.shape
    shapes = {
        "bits": (batch, heads, queries, -(-keys // 8)),
        "band": (batch, heads, queries + keys - 1),
        "full": mask.shape,
    }
    if values.shape != shapes.get(mask.form):
        fact = f"of shape {list(mask.shape)} with values of shape {list(values.shape)}"
        record.fail("", f"is a mask {mask.form!r} {fact}")
    return mask


def _layer_from_record(
    record: Record, number: int, arrays: Mapping[str, Array], grids: Sequence[PackedMask]
) -> AttentionRecord:
    calls = tuple(map(_call_from_record, record.read_records("calls")))
    prefix = f"{number}."
    own = {
        name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)
    }
    layer = AttentionRecord(**_read_fields(record, AttentionRecord, calls=calls, arrays=own))
    _check_tensors(record, layer)
    for n, call in enumerate(layer.calls):
        if not _has_data(layer, call, grids):
            record.fail(f"calls[{n}]", "refers to data that is not in the file")
    return layer


def _call_from_record(record: Record) -> AttentionCallRecord:
    call = AttentionCallRecord(**_read_fields(record, AttentionCallRecord))
    (query, end_query), (key, end_key) = call.queries, call.keys
    if query > end_query or key > end_key:
        record.fail("", f"has queries {query} to {end_query} and keys {key} to {end_key}")
    end = (call.first or 0) + end_key - key
    check_size(f"the end of the keys of {record.where}", end, MAX_TRACE_TOKENS)
    return call


def _check_tensors(record: Record, layer: AttentionRecord) -> None:
    """Raise if a layer's tensor has the wrong axes or the wrong number of heads."""
    batch_sizes = set[int]()
    for name, array in layer.arrays.items():
        kind = name.partition(".")[0]
        axes = TENSOR_AXES.get(kind, 0)
        heads = {"weights": 1, "sinks": 0, "q": 2}.get(kind)
        if array.ndim != axes or (heads is not None and array.shape[heads] != layer.heads):
            record.fail(name, f"has shape {list(array.shape)}, of {layer.heads} heads")
        if axes == TENSOR_AXES["q"]:
            batch_sizes.add(len(array))
    if {"q", "k"} <= layer.arrays.keys():
        q = layer.arrays["q"]
        k = layer.arrays["k"]
        if len(layer.kv_head_of_query) != layer.heads or max(layer.kv_head_of_query) >= k.shape[2]:
            record.fail(
                "kv_head_of_query",
                f"does not give one of {k.shape[2]} key heads for each of {layer.heads} heads",
            )
        if q.shape[3] != k.shape[3]:
            record.fail("", f"has queries of {q.shape[3]} channels and keys of {k.shape[3]}")
    if len(batch_sizes) > 1 or not layer.arrays.keys() & {
        "q",
        *(f"weights.{n}" for n in range(len(layer.calls))),
    }:
        record.fail(
            "",
            f"holds tensors {', '.join(layer.arrays) or 'of no name'} of batches "
            f"{sorted(batch_sizes)}",
        )


def _has_data(
    layer: AttentionRecord, call: AttentionCallRecord, grids: Sequence[PackedMask]
) -> bool:
    """Return whether the tensors and masks of a call are in the file, in its shape."""
    arrays = layer.arrays
    queries = call.queries[1] - call.queries[0]
    keys = call.keys[1] - call.keys[0]
    if call.weights is not None:
        weights = arrays.get(f"weights.{call.weights}")
        exists = weights is not None and weights.shape[2:] == (queries, keys)
    else:
        exists = (
            {"q", "k"} <= set(arrays)
            and call.first_query_row + queries <= arrays["q"].shape[1]
            and call.keys[1] <= arrays["k"].shape[1]
            and all(n < len(grids) and _fits(grids[n], layer, (queries, keys)) for n in call.grids)
        )
    if call.places is None or not exists:
        return exists
    places = arrays.get(f"places.{call.places}")
    if places is None or places.shape != (keys,) or places.dtype.kind != "i":
        return False
    return bool(places.min(initial=0) >= 0 and places.max(initial=0) < MAX_TRACE_TOKENS)


def _fits(grid: PackedMask, layer: AttentionRecord, size: tuple[int, int]) -> bool:
    batch, heads, queries, keys = grid.shape
    return (
        batch in (1, layer.batch_size)
        and heads in (1, layer.heads)
        and queries in (1, size[0])
        and keys == size[1]
    )
