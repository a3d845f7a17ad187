"""Continuous batching: many requests answered by one model, joining and leaving between steps."""

from .engine import Engine
from .report import Predicted, Report
from .requests import Stream, Timing
from .room import Batching

__all__ = ["Batching", "Engine", "Predicted", "Report", "Stream", "Timing"]
