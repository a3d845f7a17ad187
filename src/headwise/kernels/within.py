"""Whether spans lie within the pages that there are: who reads memory by its address looks first."""

from __future__ import annotations

from array import array

from numba import extending
from torch import Tensor

from . import team
from .compiled import Kernels
from .memory import put, whole


def astray(spans_BN3: Tensor, pages: int, slots: int) -> int:
    """The first span that names some slots and not only such as there are; -1 where there is none.

    >>> import torch
    >>> astray(torch.tensor([[[1, 0, 4], [9, 2, 2], [1, 0, 5]]]), pages=2, slots=4)
    2
    """
    held = spans_BN3.contiguous()
    table = array("q", (held.data_ptr(), held.numel() // 3, pages, slots, -1))
    team.run(KERNELS.address("search"), table.buffer_info()[0], 1)
    return table[4]


@extending.register_jitable
def search(table):
    """Go through all spans, from the last to the first."""
    first, count, pages, slots = whole(table), whole(table + 8), whole(table + 16), whole(table + 24)
    for n in range(count - 1, -1, -1):
        page, begin, end = whole(first + 24 * n), whole(first + 24 * n + 8), whole(first + 24 * n + 16)
        if begin < end and (begin < 0 or end > slots or page < 0 or page >= pages):
            put(table + 32, n)


KERNELS = Kernels({}, search=search)
