"""CPU kernels, compiled by Numba when they first run and registered as torch operations.

`simd` (16-wide vectors, loads and stores), `jit` (compile cache, threads) and `autograd_guards` are the foundation.
`flash_attention` with `flash_attention_kernel`: attention with gradients over key ranges; `varlen_attention`:
packed short sequences; `paged_decode`, `paged_decode_kernel`, `kv_block_attention` and `split_kv_schedule`: one
query per row over a KV cache; `row_normalisers` with `row_normaliser_kernels`: softmax and entmax; `head_mixing`:
dynamic head composition;
`small_batch_ops`: norms, rotary embedding, gates and matrix-vector products of single tokens.
"""

from .paged_decode import PagedDecodeOptions, attend_paged, attend_paged_reference
from .small_batch_ops import multiply_small_batch

__all__ = ["PagedDecodeOptions", "attend_paged", "attend_paged_reference", "multiply_small_batch"]
