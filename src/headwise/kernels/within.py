"""Whether spans lie within the pages that there are: who reads memory by its address looks first."""

from __future__ import annotations

from array import array

from numba import extending
from torch import Tensor

from . import team
from .compiled import KernelSet
from .memory import store_value, load_int64


def find_invalid_span(spans_BN3: Tensor, pages: int, slots: int) -> int:
    """The first span that names some slots and not only such as there are; -1 where there is none.

    >>> import torch
    >>> find_invalid_span(torch.tensor([[[1, 0, 4], [9, 2, 2], [1, 0, 5]]]), pages=2, slots=4)
    2
    """
    held = spans_BN3.contiguous()
    table = array("q", (held.data_ptr(), held.numel() // 3, pages, slots, -1))
    team.run_in_threads(SPAN_CHECK_KERNELS.function_address("search"), table.buffer_info()[0], 1)
    return table[4]


@extending.register_jitable
def search_invalid_span(table):
    """Go through all spans, from the last to the first."""
    first, count, pages, slots = load_int64(table), load_int64(table + 8), load_int64(table + 16), load_int64(table + 24)
    for n in range(count - 1, -1, -1):
        page, begin, end = load_int64(first + 24 * n), load_int64(first + 24 * n + 8), load_int64(first + 24 * n + 16)
        if begin < end and (begin < 0 or end > slots or page < 0 or page >= pages):
            store_value(table + 32, n)


SPAN_CHECK_KERNELS = KernelSet({}, search=search_invalid_span)
