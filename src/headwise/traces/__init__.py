"""Traces: the queries, keys and masks of one run in a file that opens without the model and without torch.

In reading order:

- `attention_record`: what a trace stores per attention layer and call, and how weights are recomputed from it;
  masks in compact form.
- `attention_trace`: `Trace`, one whole run: weights, head outputs, tiles and thumbnails.
- `head_steps`: the computation of one head for one query, step by step, as far as a trace holds it.
- `trace_file`: the file format, safetensors with a JSON document and a checksum.
- `trace_comparison`: two traces compared head by head, with their tokens aligned.
- `import_export`: traces of weights from elsewhere; weights as CSV, JSON or NPZ.
"""

from .attention_record import AttentionCallRecord, AttentionRecord, PackedMask, TokenRow
from .attention_trace import Trace
from .import_export import trace_from_weights
from .trace_comparison import TraceComparison, compare_traces
from .trace_file import load_trace

__all__ = [
    "AttentionCallRecord",
    "AttentionRecord",
    "PackedMask",
    "TokenRow",
    "Trace",
    "TraceComparison",
    "compare_traces",
    "load_trace",
    "trace_from_weights",
]
