"""What is remembered of past tokens; made and owned by the caller."""

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
