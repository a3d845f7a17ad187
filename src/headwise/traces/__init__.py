"""Traces: the queries, keys and masks of one run in a file that opens without the model and without torch.

In reading order:

- `attention_record`: what a trace stores per attention layer and call, and how weights are recomputed from it.
- `attention_trace`: `Trace`, one whole run: weights, head outputs, tiles and thumbnails.
- `packed_masks`: masks and score biases in compact form (bits, a band, or in full).
- `trace_file`: the file format, safetensors with a JSON document and a checksum.
- `import_export`: traces of weights from elsewhere; weights as CSV, JSON or NPZ.
"""

from .attention_record import AttentionCallRecord, AttentionRecord, TokenRow
from .attention_trace import Trace
from .import_export import trace_from_weights
from .packed_masks import PackedMask
from .trace_file import load_trace

__all__ = [
    "AttentionCallRecord",
    "AttentionRecord",
    "PackedMask",
    "TokenRow",
    "Trace",
    "load_trace",
    "trace_from_weights",
]
