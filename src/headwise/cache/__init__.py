"""What is remembered of past tokens; made and owned by the caller."""

from .base import Cache, Entry, Remembered
from .paged import PagedCache, Pool
from .pages import Pages
from .paging import Book, Row
from .slots import PlainCache, RingCache
from .state import StateCache

__all__ = [
    "Book",
    "Cache",
    "Entry",
    "PagedCache",
    "Pages",
    "PlainCache",
    "Pool",
    "Remembered",
    "RingCache",
    "Row",
    "StateCache",
]
