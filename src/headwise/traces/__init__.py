"""Traces: one run's queries, keys and masks in one file that opens without the model and without torch.

`attention_record` is what is kept of a call, `attention_trace` a whole run and its attention weights,
`packed_masks` masks in bits, `trace_file` the file format, `import_export` other formats.
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
