"""CPU kernels, compiled by Numba on first use and registered as torch operations; kernels for GPUs.

`docs/backends.md` explains how a kernel is written, with a complete example. The foundation:

- `launch`, `jit`, `compilation`: argument records, the interface between an operation and its
  kernel; sets of kernels, threads and work items; compilation, and when it happens
- `simd`, `vector_math`: vectors of 16 numbers, loads and stores; their exp and log
- `operand_checks`: the axes and dtypes of an operation's tensors, checked before their addresses
  are taken, and whether autograd, torch.func or torch.compile watch the call

The operations and their kernels:

- `flash_attention`, `flash_attention_kernel`, `flash_attention_reference`: attention with
  gradients; each query reads one range of keys
- `paged_decode`, `paged_decode_kernel`, `kv_block_attention`, `split_kv_schedule`: one query per
  row over a paged KV cache, with shared prefixes read once
- `row_normalisers`, `row_normaliser_kernels`: masked softmax and entmax over rows of scores
- `head_mixing`, `head_mixing_kernel`: dynamically composed attention heads (2405.08553)
- `linear`, `small_batch_kernels`: products of a few tokens with matrices, or torch's
- `counter_rng`: random numbers addressed by seed and counter, the same on every machine

Kernels for GPUs, in Triton where it is installed (`triton_support`):

- `head_statistics`, `head_statistics_kernel`: statistics of attention weights that are never stored
- `head_mixing_triton`, `row_normaliser_triton`: the operations of `head_mixing` and of entmax
- `open_query_attention`: attention of the queries for which a routed head is open

The machine: `capabilities`, the class of its processor, usable cores and memory, and the sizes
from which each path is faster; `devices`, its accelerators by name, their memory and dtypes.
"""

from .linear import multiply_small_batch
from .paged_decode import PagedDecodeOptions, attend_paged, attend_paged_reference

__all__ = ["PagedDecodeOptions", "attend_paged", "attend_paged_reference", "multiply_small_batch"]
