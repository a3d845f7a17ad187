"""Continuous batching: many requests answered by one model, joining and leaving between steps.

`engine` is the public object; `requests` has requests with their streams, and their order;
`kv_memory` assigns cache pages within a budget; `model_runner` runs one step; `metrics` measures.
"""

from .engine import Engine
from .kv_memory import BatchingConfig
from .metrics import ServingReport
from .requests import RequestStream, RequestTiming

__all__ = [
    "BatchingConfig",
    "Engine",
    "RequestStream",
    "RequestTiming",
    "ServingReport",
]
