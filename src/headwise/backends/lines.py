"""Queries that speak, one behind the other for each key head, and the units of work of the kernel that reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.tiles import QUERY_TILE_ROWS

MIN_KEYS_PER_PART = 512  # whose gradients are a part at least
MAX_KEY_PARTS, TARGET_WORK_ITEMS = 4, 16  # parts there may be at most, so that there are so many units


class RoutedWorkItems(NamedTuple):
    """What `kernels.read.read_lines` is told: lines, ends and units, and how many pairs it forms."""

    kernel_args: list[Tensor]
    num_pairs: int

    @staticmethod
    def from_open_heads(open_BTH: Tensor, kept: int, ends: Tensor, keys: int) -> RoutedWorkItems:
        """Those that are open, for so many key heads; those with most keys begin, and no thread waits at the end."""
        batch, queries, heads = open_BTH.shape
        by_key = open_BTH.view(batch, queries, kept, heads // kept).transpose(1, 2)
        b, g, t, h = by_key.nonzero(as_tuple=True)
        lines = (b * queries + t) * heads + g * (heads // kept) + h
        counts = by_key.sum((2, 3)).flatten()
        whose, first, rows = _make_forward_items(counts)
        last = first + rows - 1
        token = b % len(ends) * queries + t
        low, high = (ends.view(-1, 2)[token[n], side] for n, side in ((first, 0), (last, 1)))
        forth = torch.stack([whose, first, rows, 0 * rows, 0 * rows + keys, 0 * rows], 1)
        forth = forth[torch.argsort(high - low, descending=True)]
        formed = QUERY_TILE_ROWS * int((high - low).sum())
        return RoutedWorkItems([lines, ends.contiguous(), forth.contiguous(), _make_backward_items(counts, keys)], formed)


def _make_forward_items(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Units of as many lines as lie side by side: whose they are, the first of them, and how many."""
    units = (counts + QUERY_TILE_ROWS - 1).div(QUERY_TILE_ROWS, rounding_mode="floor")
    whose = torch.arange(len(counts), device=counts.device).repeat_interleave(units)
    number = torch.arange(len(whose), device=counts.device) - (units.cumsum(0) - units)[whose]
    first = (counts.cumsum(0) - counts)[whose] + QUERY_TILE_ROWS * number
    return whose, first, (counts[whose] - QUERY_TILE_ROWS * number).clamp(max=QUERY_TILE_ROWS)


def _make_backward_items(counts: Tensor, keys: int) -> Tensor:
    """Backwards: all lines of each key head with a part of the keys; those of the first keys have most to read."""
    parts = max(1, min(MAX_KEY_PARTS, TARGET_WORK_ITEMS // len(counts), keys // MIN_KEYS_PER_PART))
    # At fours, which the kernel writes at once.
    cuts = [*(keys * part // parts // 4 * 4 for part in range(parts)), keys]
    order = torch.argsort(counts, descending=True)
    first = (counts.cumsum(0) - counts)[order]
    some = [
        torch.stack([order, first, counts[order], *(torch.full_like(order, n) for n in (cuts[p], cuts[p + 1], p))], 1)
        for p in range(parts)
    ]
    return torch.cat(some).contiguous()
