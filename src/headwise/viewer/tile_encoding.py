"""Binary answers of the server: several arrays in one message, behind a JSON header.

Layout: the length of the header as 4 bytes, little-endian; the header, JSON padded with spaces so that the arrays begin
at a multiple of 8 bytes; the arrays, each at a multiple of 8 bytes. The header lists the arrays with name, dtype, shape
and offset, counted from the end of the header, beside the fields of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ALIGNMENT = 8  # bytes; JavaScript's typed arrays need aligned offsets
DTYPE_NAMES = {"uint8": "u8", "float32": "f32", "int32": "i32"}
LEAST_FLOATS = 32  # a shorter list stays in JSON
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
            {"name": name, "dtype": DTYPE_NAMES[array.dtype.name], "shape": list(array.shape), "offset": offset}
        )
        parts.append(data + b"\0" * (-len(data) % ALIGNMENT))
        offset += len(parts[-1])
    header = json.dumps({**fields, "arrays": entries}, allow_nan=False).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    return b"".join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *parts])


def encode_result(result: Mapping[str, Any]) -> bytes | None:
    """Encode the result of a job, its long lists of floats as arrays; None if it has none and JSON does.

    In the field `result` of the header {"array": name} stands for such a list; None and NaN in it are NaN.

    >>> header, arrays = decode_arrays(encode_result({"loss": {"before": [0.5] * 32}, "heads": 3}))
    >>> header["result"], arrays["0"].shape
    ({'loss': {'before': {'array': '0'}}, 'heads': 3}, (32,))
    """
    arrays: dict[str, Array] = {}

    def take_lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: take_lists(part) for name, part in value.items()}
        if not isinstance(value, list):
            return None if isinstance(value, float) and not np.isfinite(value) else value
        if len(value) < LEAST_FLOATS or not all(part is None or isinstance(part, float) for part in value):
            return [take_lists(part) for part in value]
        name = str(len(arrays))
        arrays[name] = np.array([np.nan if part is None else part for part in value], np.float32)
        return {"array": name}

    packed = take_lists(result)
    return encode_arrays(arrays, result=packed) if arrays else None


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
