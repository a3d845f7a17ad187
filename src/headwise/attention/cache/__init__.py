"""KV caches: made by a layer, owned by the caller.

Which tokens a cache may drop is the `retention` of the attention pattern (`masking`); caches only
apply it.

- `kv_cache`: `TokenCache`, the positions of past tokens, and the interface `KVCache`; int8 storage;
  the test whether a query attends to everything that is cached.
- `slot_caches`: one slot per token. `ContiguousCache` keeps every token, `RingCache` overwrites the
  tokens that no later query attends to, and `StaticCache` is for compiled decode steps.
  `RecurrentStateCache` keeps one state for linear attention, `HiddenStateCache` one for a GRU.
- `cache_selection`: `make_cache` selects the cache of a layer. `HeadGroupCache` has a slot cache
  for each group of heads, if their patterns retain different tokens.
- `block_table`: assigns pages to sequences, frees those that no later query attends to, and shares
  equal prefixes.
- `paged_cache`: the tensors of the pages, and the rows of one call.
"""

from .block_table import BlockTables, PageAllocator, PagedSequence
from .cache_selection import HeadGroupCache, make_cache, split_by_retention
from .kv_cache import KVCache, KVEntry, ProjectedSource, RowEnds, TokenCache, check_rows
from .paged_cache import PagedCache, PagePool
from .slot_caches import (
    ContiguousCache,
    HiddenStateCache,
    RecurrentStateCache,
    RingCache,
    StaticCache,
)

__all__ = [
    "BlockTables",
    "ContiguousCache",
    "HeadGroupCache",
    "HiddenStateCache",
    "KVCache",
    "KVEntry",
    "PageAllocator",
    "PagePool",
    "PagedCache",
    "PagedSequence",
    "ProjectedSource",
    "RecurrentStateCache",
    "RingCache",
    "RowEnds",
    "StaticCache",
    "TokenCache",
    "check_rows",
    "make_cache",
    "split_by_retention",
]
