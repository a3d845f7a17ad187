"""Training of models on tasks, with checkpoints from which a killed run resumes bit for bit (on the
CPU).

- `recipe`: `Recipe`, the hyperparameters of a run, and the learning-rate schedules.
- `loop`: `train`, the training loop with evaluation, checkpoints and resuming.
- `run_setup`: checks task, model and recipe, and starts or resumes a run; `training_run` is the
  state of
  a run and its checkpoints. The recipe may change on the way.
- `train_step`: one optimisation step: its batch, loss and gradients; AdamW.
- `evaluation`: `evaluate`, metrics on held-out data at several lengths, and of generated answers;
  sample texts.
- `data`: tasks and corpora.
- `loggers`: progress on the console, metrics.jsonl and TensorBoard; the curves of a run.
"""

from .evaluation import Evaluation, evaluate
from .loggers import LOGGERS, ConsoleLogger, MetricLogger
from .loop import TrainingResult, train
from .recipe import SCHEDULES, Recipe
from .training_run import CheckpointFolder, TrainingCheckpoint

__all__ = [
    "LOGGERS",
    "SCHEDULES",
    "CheckpointFolder",
    "ConsoleLogger",
    "Evaluation",
    "MetricLogger",
    "Recipe",
    "TrainingCheckpoint",
    "TrainingResult",
    "evaluate",
    "train",
]
