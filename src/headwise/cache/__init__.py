"""KV caches: made by a layer, owned by the caller.

`kv_cache` is the interface, with int8 storage and the test whether a query attends to everything that is cached.
`contiguous` keeps every token, a ring of those that the attention pattern can still reach, or one state for linear
attention. Paged caches: `block_table` assigns pages to sequences and shares equal prefixes, `paged_cache` has the
tensors and the rows of one call.
"""

from .block_table import BlockTables, PageAllocator, PagedSequence
from .contiguous import ContiguousCache, RecurrentStateCache, RingCache
from .kv_cache import KVCache, KVEntry, ProjectedSource
from .paged_cache import PagedCache, PagePool

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
