"""Continuous batching: many requests answered by one model, joining and leaving between steps."""

from .engine import Engine
from .kv_memory import Batching
from .metrics import Predicted, Report
from .requests import Stream, Timing

__all__ = ["Batching", "Engine", "Predicted", "Report", "Stream", "Timing"]
