"""Training: a recipe, a loop that can be killed at any moment, and what it leaves behind."""

from .checkpoint import TrainingCheckpoint, CheckpointFolder
from .loop import TrainingResult, train
from .recipe import Recipe
from .schedules import SCHEDULES
from .screen import ConsoleLogger
from .sinks import LOGGERS, MetricLogger

__all__ = ["SCHEDULES", "LOGGERS", "TrainingCheckpoint", "CheckpointFolder", "Recipe", "TrainingResult", "ConsoleLogger", "MetricLogger", "train"]
