"""Training: a recipe, a loop that can be killed at any moment, and what it leaves behind."""

from .checkpoint import Checkpoint, Checkpoints
from .loop import Result, train
from .recipe import Recipe
from .schedules import SCHEDULES
from .screen import Screen
from .sinks import SINKS, Sink

__all__ = ["SCHEDULES", "SINKS", "Checkpoint", "Checkpoints", "Recipe", "Result", "Screen", "Sink", "train"]
