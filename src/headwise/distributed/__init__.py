"""Many machines: how the ranks of a world divide a training among themselves, and what each holds of a model.

What is imported here needs no torch: a command reads how it was launched before anything heavy.
"""

from .launch import ProcessInfo, join_process_group
from .parallelism import PARALLEL_DIMS, Parallelism

__all__ = ["PARALLEL_DIMS", "Parallelism", "ProcessInfo", "join_process_group"]
