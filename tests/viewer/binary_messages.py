"""Binary answers of the page, read again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from headwise.viewer.weight_summaries import DTYPE_NAMES, LENGTH_BYTES, Array


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
