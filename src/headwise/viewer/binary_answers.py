"""Binary answers of the server and the export: several arrays in one message, behind a JSON header.

Layout: the length of the header as 4 bytes, little-endian; the header, JSON padded with spaces so
that the arrays begin at a multiple of 8 bytes; the arrays, each at a multiple of 8 bytes. The
header lists the arrays with name, dtype, shape and offset, counted from the end of the header,
beside the fields of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..observe.traces.head_steps import HeadPlace, HeadSteps, recorded_steps
from .open_model import OpenModel

if TYPE_CHECKING:
    from torch import nn

    from ..models import Transformer


Array = NDArray[Any]

# --- The layout of a message ----------------------------------------------------------------------

ALIGNMENT = 8  # bytes; JavaScript's typed arrays need aligned offsets
DTYPE_NAMES = {"uint8": "u8", "float32": "f32", "int32": "i32"}
LENGTH_BYTES = 4  # size of the length of the header


def encode_arrays(arrays: Mapping[str, Array], **fields: Any) -> bytes:
    """Encode arrays of dtype uint8, int32 or float32 and the fields of the header as one message.

    >>> message = encode_arrays({"weights": np.zeros((2, 3), np.uint8)}, max=1.0)
    >>> decode_arrays(message)[0]
    {'max': 1.0, 'arrays': [{'name': 'weights', 'dtype': 'u8', 'shape': [2, 3], 'offset': 0}]}
    """
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        entries.append(
            {
                "name": name,
                "dtype": DTYPE_NAMES[array.dtype.name],
                "shape": list(array.shape),
                "offset": offset,
            }
        )
        parts.append(data + b"\0" * (-len(data) % ALIGNMENT))
        offset += len(parts[-1])
    header = json.dumps({**fields, "arrays": entries}, allow_nan=False).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    return b"".join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *parts])


def decode_arrays(message: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the header and the arrays of a message."""
    begin = LENGTH_BYTES + int.from_bytes(message[:LENGTH_BYTES], "little")
    header = json.loads(message[LENGTH_BYTES:begin])
    dtypes = {short: np.dtype(name) for name, short in DTYPE_NAMES.items()}
    arrays: dict[str, Array] = {}
    for entry in header["arrays"]:
        count = int(np.prod(entry["shape"], dtype=np.int64))
        flat = np.frombuffer(message, dtypes[entry["dtype"]], count, begin + entry["offset"])
        arrays[entry["name"]] = flat.reshape(entry["shape"])
    return header, arrays


# --- The steps of one head for one query ----------------------------------------------------------

WEIGHT_TOLERANCE = 5e-3  # a trace in half precision rounds its queries and keys
MAX_COPIED_PARAMS = 300_000_000
_copies: WeakKeyDictionary[nn.Module, Transformer] = (
    WeakKeyDictionary()
)  # headwise copies of transformers models
ONLY_TRACE = "only a trace is open; start `headwise view` with the model"


def find_steps(view: OpenModel, place: HeadPlace, key: int | None = None) -> tuple[HeadSteps, str]:
    """The steps of a head for a query, and why some are missing; the vectors of `key` are among
    those shown.

    A headwise model, or a headwise copy of a transformers model, runs again on the tokens of the
    trace, and its steps count only if they lead to the weights of the trace. For other models, and
    without a model, the steps are those that the trace holds; the others are named with the reason.
    """
    if not view.has_model:
        return recorded_steps(view.get_recorded(), place, key), ONLY_TRACE
    model = view.get_model()
    try:
        native = get_native_copy(model)
        note = (
            ""
            if native is model
            else f"computed in a headwise copy of {type(model).__name__}; the weights agree"
        )
        return _steps_of_model(view, native, place, key), note
    except (
        ValueError,
        IndexError,
        KeyError,
        NotImplementedError,
    ) as error:  # what a trace holds is still true
        return recorded_steps(view.get_recorded(), place, key), str(error)


def get_native_copy(model: nn.Module) -> Transformer:
    """The model as a headwise model; a copy of a transformers model is made once."""
    from ..models import Transformer
    from ..observe.head_analysis.random_baseline import as_native_model

    if isinstance(model, Transformer):
        return model
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_COPIED_PARAMS:
        fact = f"{type(model).__name__} has {count / 1e6:,.0f} M parameters, and only models up to"
        remedy = "open it as a headwise model: hw.view(hw.load(FOLDER), TEXT)"
        raise ValueError(
            f"{fact} {MAX_COPIED_PARAMS / 1e6:,.0f} M are copied for their steps; {remedy}"
        )
    if model not in _copies:
        _copies[model] = as_native_model(model).eval()
    return _copies[model]


def _steps_of_model(
    view: OpenModel, model: Transformer, place: HeadPlace, key: int | None
) -> HeadSteps:
    """The steps of a headwise model, checked against the weights of the trace."""
    import torch

    from ..observe.head_analysis.model_steps import model_steps

    trace = view.get_recorded()
    layer = trace.get_layer(place.site)
    device = next(model.parameters()).device
    ids = {
        name: np.array(rows[place.row].ids, np.int64)
        for name, rows in trace.streams.items()
        if rows
    }
    real = {name: np.flatnonzero(row >= 0) for name, row in ids.items()}  # padding has the id -1
    tensors = {
        name: torch.from_numpy(ids[name][real_positions])[None].to(device)
        for name, real_positions in real.items()
    }
    if "text" not in tensors or not {layer.query_stream, layer.key_stream} <= set(real):
        raise ValueError("the trace holds no token ids to run the model on; capture a text")
    queries = real[layer.query_stream]
    keys = real[layer.key_stream]
    if place.query not in queries:
        raise ValueError(f"query {place.query} is padding; choose a token")
    own = place._replace(query=int(np.searchsorted(queries, place.query)))
    shown = int(np.searchsorted(keys, key)) if key is not None and key in keys else None
    steps = model_steps(model, tensors["text"], own, source=tensors.get("source"), key=shown)
    block = slice(place.query, place.query + 1)
    trace_weights = trace.head_weights(place.site, place.head, block, row=place.row)[0]
    _check_weights(
        _last_weights(steps),
        trace_weights[keys] if len(trace_weights) == len(ids[layer.key_stream]) else trace_weights,
    )
    return replace(steps, place=place, positions=keys.astype(np.int32))


def _last_weights(steps: HeadSteps) -> NDArray[Any]:
    return [step for step in steps.steps if step.name in ("normalise", "weight_step")][-1].arrays[
        "out"
    ]


def _check_weights(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Refuse steps of another run than that of the trace."""
    if actual.shape != expected.shape:
        raise ValueError(
            f"the open model has {len(actual)} keys here, and the trace {len(expected)}; capture "
            "the text again"
        )
    error = float(np.abs(actual - expected).max(initial=0.0))
    if not error <= WEIGHT_TOLERANCE:
        raise ValueError(
            f"the open model gives other weights than the trace (by {error:.2g}); capture the "
            "text again"
        )


def encode_steps(steps: HeadSteps, note: str = "") -> bytes:
    """The steps as one message; the array "2.out" is the array "out" of step 2."""
    arrays: dict[str, NDArray[Any]] = {"positions": steps.positions, "shown": steps.shown_keys}
    entries: list[dict[str, Any]] = []
    for number, step in enumerate(steps.steps):
        arrays |= {f"{number}.{name}": array for name, array in step.arrays.items()}
        facts = {name: value for name, value in step.facts.items() if np.isfinite(value)}
        entries.append(
            {"name": step.name, "formula": step.formula, "part": step.part, "facts": facts}
        )
    fields = {**steps.place._asdict(), "origin": steps.origin, "note": note, "steps": entries}
    return encode_arrays(arrays, **fields, missing=dict(steps.missing))
