"""Training on several processes: data, FSDP, tensor and context parallelism.

`parallelism` describes how ranks divide the work and joins the processes; `ranks` checks that they
agree; `collectives` are the messages; `sharded_model` is what one rank holds with fully sharded
data parallelism, `tensor_parallel` (with `head_partition`) divides heads; `model_sharding` puts
them together; `parallel_attention` is a
layer whose heads or tokens are divided.
"""

from .parallelism import PARALLEL_DIMS, Parallelism, ProcessInfo, join_process_group

__all__ = ["PARALLEL_DIMS", "Parallelism", "ProcessInfo", "join_process_group"]
