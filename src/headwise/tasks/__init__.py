"""What models are taught: tasks made in code, and data that is brought along."""

from .base import IGNORED, SPLITS, Batch, Tally, Task

__all__ = ["IGNORED", "SPLITS", "Batch", "Tally", "Task"]
