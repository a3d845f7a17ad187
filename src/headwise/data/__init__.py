"""What models are taught: tasks made in code, and data that is brought along."""

from .data_sources import open_data
from .task import IGNORE_INDEX, SPLITS, Batch, MetricSums, Task
from .task_registry import TASKS, make_task

__all__ = ["IGNORE_INDEX", "SPLITS", "TASKS", "Batch", "MetricSums", "Task", "make_task", "open_data"]
