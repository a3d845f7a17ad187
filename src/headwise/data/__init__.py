"""What models are taught: tasks made in code, and data that is brought along."""

from .data_sources import open_data
from .task import IGNORED, SPLITS, Batch, Tally, Task
from .task_registry import TASKS, task

__all__ = ["IGNORED", "SPLITS", "TASKS", "Batch", "Tally", "Task", "open_data", "task"]
