"""KV caches: made by a layer, owned by the caller.

`kv_cache` is the interface. `contiguous` keeps every token, or a ring of those that the attention pattern can still
see; `recurrent_state` keeps one state for linear attention; `int8_quantization` stores keys and values in 8 bits;
`full_visibility` knows when a query sees everything that is cached. Paged caches: `block_table` assigns pages to
sequences and shares equal prefixes, `paged_batch` is the rows of one call, `paged_cache` the tensors.
"""

from .block_table import BlockTables, PageAllocator, PagedSequence
from .contiguous import ContiguousCache, RingCache
from .kv_cache import KVCache, KVEntry, ProjectedSource
from .paged_cache import PagedCache, PagePool
from .recurrent_state import RecurrentStateCache

__all__ = [
    "BlockTables",
    "ContiguousCache",
    "KVCache",
    "KVEntry",
    "PageAllocator",
    "PagePool",
    "PagedCache",
    "PagedSequence",
    "ProjectedSource",
    "RecurrentStateCache",
    "RingCache",
]
