"""What is remembered of past tokens; made and owned by the caller."""

from .base import Cache, Entry, Remembered
from .slots import PlainCache, RingCache
from .state import StateCache

__all__ = ["Cache", "Entry", "PlainCache", "Remembered", "RingCache", "StateCache"]
