"""CPU kernels, compiled by Numba on first use and registered as torch operations.

Foundation: `simd` (16-wide vectors, loads and stores), `jit` (compilation, the OpenMP thread pool, work items)
and `autograd_guards` (checks for autograd, torch.func and torch.compile).

- `flash_attention`, `flash_attention_kernel`: attention with gradients; each query reads one range of keys
- `varlen_attention`: attention with gradients within many short packed sequences
- `paged_decode`, `paged_decode_kernel`, `kv_block_attention`, `split_kv_schedule`: one query per row over a
  paged KV cache, with shared prefixes read once
- `row_normalisers`, `row_normaliser_kernels`: masked softmax and entmax over rows of scores
- `head_mixing`: dynamically composed attention heads (2405.08553)
- `small_batch_ops`: matrix-vector products, RMSNorm, rotary embedding and SwiGLU for a few tokens
"""

from .paged_decode import PagedDecodeOptions, attend_paged, attend_paged_reference
from .small_batch_ops import multiply_small_batch

__all__ = ["PagedDecodeOptions", "attend_paged", "attend_paged_reference", "multiply_small_batch"]
