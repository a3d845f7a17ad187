"""Training on several processes: data, FSDP, tensor and context parallelism.

`parallelism` describes how ranks divide the work; `launch` and `ranks` start and name processes; `collectives` are
the messages; `sharded_model` is what one rank holds, by `fsdp`, `tensor_parallel` (with `head_partition`) or
`context_parallel`; `parallel_attention` is a layer whose heads or tokens are divided; `communication_volume`
predicts bytes sent; `config_consistency` checks that all ranks agree.
"""

from .launch import ProcessInfo, join_process_group
from .parallelism import PARALLEL_DIMS, Parallelism

__all__ = ["PARALLEL_DIMS", "Parallelism", "ProcessInfo", "join_process_group"]
