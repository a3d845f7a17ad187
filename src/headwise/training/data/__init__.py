"""Tasks and datasets: batches as a pure function of seed and step, metrics, and the score of random
guessing.

- `task`: the interface `Task` and packed batches; `task_registry` finds tasks by name
  (`make_task`)
  or path (`open_data`).
- Synthetic tasks, generated in code (base class in `synthetic_task`): `algorithmic_tasks`,
  `recall_tasks` (also Markov chains), `date_translation`.
- Tasks over files (base classes, also of classification, in `file_task`): `language_modelling`
  (plain text), `translation`, and `images` (also frames).
- Helpers: `text_files` reads files, `vocabulary` tokenises.
"""

from ...models.batch import IGNORE_INDEX, Batch
from .task import SPLITS, MetricSums, Task
from .task_registry import TASKS, make_task, open_data

__all__ = [
    "IGNORE_INDEX",
    "SPLITS",
    "TASKS",
    "Batch",
    "MetricSums",
    "Task",
    "make_task",
    "open_data",
]
