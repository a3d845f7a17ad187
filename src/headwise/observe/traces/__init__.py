"""Traces: the queries, keys and masks of one run in a file that opens without the model and without
torch.

In reading order:

- `attention_record`: what a trace stores per attention layer and call, and how weights are
  recomputed from it; masks in compact form.
- `attention_trace`: `Trace`, one whole run: weights, head outputs, tiles and thumbnails; the mean
  or maximum of many heads, and attention rollout through layers; a trace with subwords merged into
  words, special tokens or the first token left out.
- `head_steps`: the steps of one head for one query that a trace holds; the queries and keys of a
  head as points on a plane, and their products channel by channel.
- `trace_comparison`: which heads attend differently in two traces, over aligned tokens.
- `trace_file`: the file format, safetensors with a JSON document and a checksum.
- `import_export`: traces of weights from elsewhere; weights as CSV, JSON or NPZ.
"""

from .attention_record import AttentionCallRecord, AttentionRecord, PackedMask, TokenRow
from .attention_trace import TokenGrouping, Trace, group_tokens
from .head_steps import QueryKeyMap, map_queries_and_keys
from .import_export import export_weights, trace_from_weights
from .trace_comparison import TraceComparison, compare_traces
from .trace_file import load_trace, save_trace

__all__ = [
    "AttentionCallRecord",
    "AttentionRecord",
    "PackedMask",
    "QueryKeyMap",
    "TokenGrouping",
    "TokenRow",
    "Trace",
    "TraceComparison",
    "compare_traces",
    "export_weights",
    "group_tokens",
    "load_trace",
    "map_queries_and_keys",
    "save_trace",
    "trace_from_weights",
]
