"""Training: a recipe, a loop that can be killed at any moment, and what it leaves behind.

`recipe` describes a run; `run_setup` prepares data, model and folder; `train_step` is one optimisation step;
`autotune` measures which precision and compilation are fastest; `loop` runs and resumes; `checkpoint` saves
bit-exact states; `evaluation` and `loss` measure; `lr_schedules` and `optimiser` are what their names say;
`loggers` report progress.
"""

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
