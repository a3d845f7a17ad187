"""Continuous batching: many requests answered by one model, joining and leaving between steps.

`engine` is the public object; `requests` a request and its stream; `scheduler` decides who runs next; `kv_memory`
assigns cache pages within a budget; `model_runner` runs one step; `paged_layers` says which layers read pages in
place; `metrics` measures.
"""

from .engine import Engine
from .kv_memory import BatchingConfig
from .metrics import ServingReport, ThroughputPrediction
from .requests import RequestStream, RequestTiming

__all__ = ["BatchingConfig", "Engine", "RequestStream", "RequestTiming", "ServingReport", "ThroughputPrediction"]
