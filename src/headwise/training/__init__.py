"""Training: a recipe, a loop that can be killed at any moment, and what it leaves behind."""

from .checkpoint import CheckpointFolder, TrainingCheckpoint
from .loggers import LOGGERS, ConsoleLogger, MetricLogger
from .loop import TrainingResult, train
from .lr_schedules import SCHEDULES
from .recipe import Recipe

__all__ = [
    "LOGGERS",
    "SCHEDULES",
    "CheckpointFolder",
    "ConsoleLogger",
    "MetricLogger",
    "Recipe",
    "TrainingCheckpoint",
    "TrainingResult",
    "train",
]
