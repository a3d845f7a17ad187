"""What models are taught: tasks made in code, and data that is brought along."""

from .base import IGNORED, SPLITS, Batch, Tally, Task
from .opening import open_data
from .registry import TASKS, task

__all__ = ["IGNORED", "SPLITS", "TASKS", "Batch", "Tally", "Task", "open_data", "task"]
