"""Traces: what attentions worked with in one run, kept in one file that opens without the model and without torch."""

from .exchange import trace_from_weights
from .file import load_trace
from .grid import PackedMask
from .record import AttentionCallRecord, AttentionRecord, TokenRow
from .trace import Trace

__all__ = ["AttentionCallRecord", "PackedMask", "AttentionRecord", "TokenRow", "Trace", "load_trace", "trace_from_weights"]
