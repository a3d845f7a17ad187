"""What is remembered of past tokens; made and owned by the caller."""

from .base import KVCache, KVEntry, ProjectedSource
from .paged import PagedCache, PagePool
from .pages import PageAllocator
from .paging import BlockTables, PagedSequence
from .slots import ContiguousCache, RingCache
from .state import RecurrentStateCache

__all__ = [
    "BlockTables",
    "KVCache",
    "KVEntry",
    "PagedCache",
    "PageAllocator",
    "ContiguousCache",
    "PagePool",
    "ProjectedSource",
    "RingCache",
    "PagedSequence",
    "RecurrentStateCache",
]
