"""Training of models on tasks, with checkpoints from which a killed run resumes bit for bit (on the CPU).

- `recipe`: `Recipe`, the hyperparameters of a run; `lr_schedules` has the learning-rate schedules.
- `loop`: `train`, the training loop with evaluation, checkpoints and resuming.
- `run_setup`: checks task, model and recipe, and starts or resumes a run; `training_run` is the state of a run.
- `train_step`: the gradients of one optimisation step; `loss` and `optimiser` (AdamW) are used by it.
- `autotune`: measures which precision, attention, row layout and compilation is fastest.
- `evaluation`: metrics on held-out data and of generated answers.
- `checkpoint`: checkpoint files with checksums.
- `loggers`: progress on the console, metrics.jsonl, TensorBoard, MLflow, W&B and Trackio.
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
