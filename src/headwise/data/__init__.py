"""Tasks: batches as a pure function of seed and step, with the score of a guess to compare with.

`task` is the interface, `task_registry` finds tasks by name. Made in code: `copy_task`, `associative_recall`,
`two_key_lookup`, `group_product`, `listops`, `markov_chains`, `graph_distance`, `date_translation` (all
`synthetic_task`). From files (`file_task`): `language_modelling`, `token_files`, `translation`,
`labelled_examples`, `images`, `time_series`, `jsonl`. `vocabulary`, `text_files`, `image_arrays`, `example_order`
and `data_sources` read, order and tokenise.
"""

from .data_sources import open_data
from .task import IGNORE_INDEX, SPLITS, Batch, MetricSums, Task
from .task_registry import TASKS, make_task

__all__ = ["IGNORE_INDEX", "SPLITS", "TASKS", "Batch", "MetricSums", "Task", "make_task", "open_data"]
