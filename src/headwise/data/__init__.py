"""Tasks and datasets: batches as a pure function of seed and step, metrics, and the score of random guessing.

- `task`: the interface `Task`, and `Batch`; `task_registry` finds tasks by name (`make_task`).
- Synthetic tasks, generated in code (base class in `synthetic_task`): `copy_task`, `associative_recall`,
  `two_key_lookup`, `group_product`, `listops`, `markov_chains`, `graph_distance`, `date_translation`.
- Tasks over files (base class in `file_task`): `language_modelling` (plain text), `token_files` (token ids),
  `translation`, `jsonl`, `images` and `time_series`; the last three use `labelled_examples` for classification.
- `data_sources`: `open_data` chooses the file task for a path.
- Helpers: `text_files` and `image_arrays` read files, `vocabulary` tokenises, `example_order` shuffles and splits.
"""

from .data_sources import open_data
from .task import IGNORE_INDEX, SPLITS, Batch, MetricSums, Task
from .task_registry import TASKS, make_task

__all__ = ["IGNORE_INDEX", "SPLITS", "TASKS", "Batch", "MetricSums", "Task", "make_task", "open_data"]
