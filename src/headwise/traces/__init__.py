"""Traces: what attentions worked with in one run, kept in one file that opens without the model and without torch."""

from .exchange import of_weights
from .file import load_trace
from .grid import Grid
from .record import Call, Layer, Row
from .trace import Trace

__all__ = ["Call", "Grid", "Layer", "Row", "Trace", "load_trace", "of_weights"]
