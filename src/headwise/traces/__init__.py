"""Traces: what attentions worked with in one run, kept in one file that opens without the model and without torch."""

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
