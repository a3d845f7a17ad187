"""Continuous batching: many requests answered by one model, joining and leaving between steps."""

from .engine import Engine
from .kv_memory import BatchingConfig
from .metrics import ServingReport, ThroughputPrediction
from .requests import RequestStream, RequestTiming

__all__ = ["BatchingConfig", "Engine", "RequestStream", "RequestTiming", "ServingReport", "ThroughputPrediction"]
