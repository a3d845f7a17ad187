"""Bytes of the tensors that a call holds at once, weights aside."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemoryMode(TorchDispatchMode):
    """While this lasts, storages that operations make are counted as they come and go; `most` is their largest sum.

    What an operation takes and gives back inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak_bytes = 0
        self._known: dict[int, int] = {}  # bytes of each storage; 0 of those that were there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and look at what it made."""
        self._count_storage((args, kwargs), counts=0)
        found = func(*args, **(kwargs or {}))
        self._count_storage(found, counts=1)
        return found

    def _count_storage(self, some: Any, counts: int) -> None:
        for one in tree_leaves(some):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self._known:
                storage = one.untyped_storage()
                self._known[storage._cdata] = counts * storage.nbytes()
                self.now += counts * storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.now)
                weakref.finalize(storage, self._release_storage, storage._cdata)

    def _release_storage(self, name: int) -> None:
        self.now -= self._known.pop(name)


def measure_peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the tensors of a call take at once; its result counts, what was there before does not.

    >>> import torch
    >>> measure_peak_bytes(lambda: torch.zeros(100) + torch.ones(100))
    1200
    """
    with TensorMemoryMode() as seen:
        run()
    return seen.peak_bytes
