"""Training on several processes: data, FSDP, tensor and context parallelism.

`parallelism` describes how ranks divide the work and joins the processes; `ranks` checks that they
agree; `parallel_attention` has the messages, and layers with divided heads or tokens;
`head_partition` divides heads; `sharded_model` is what one rank holds.
"""

from .parallelism import PARALLEL_DIMS, Parallelism, ProcessInfo, join_process_group

__all__ = ["PARALLEL_DIMS", "Parallelism", "ProcessInfo", "join_process_group"]
