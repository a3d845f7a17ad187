"""Pictures of weights: each cell the largest weight in it, so that a thin line stays where a mean would lose it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .grid import Array

QUERY_BLOCK = 512  # queries at a time


def query_blocks(num_queries: int) -> Iterator[tuple[int, int]]:
    """Where neighbouring queries are taken together.

    >>> list(query_blocks(600))
    [(0, 512), (512, 600)]
    """
    return ((start, min(num_queries, start + QUERY_BLOCK)) for start in range(0, num_queries, QUERY_BLOCK))


def max_pool_weights(bands: Iterable[tuple[tuple[int, int], Array]], shape: tuple[int, int], size: tuple[int, int]) -> Array:
    """The largest weight of each cell, 0..255, of weights that come in bands of rows.

    >>> max_pool_weights([((0, 2), np.eye(4)[:2]), ((2, 4), np.eye(4)[2:])], (4, 4), (2, 2))
    array([[255,   0],
           [  0, 255]], dtype=uint8)
    """
    if min(size) < 1:
        raise ValueError(f"a picture of {size[0]} x {size[1]} has no cell; give at least 1 x 1")
    high, wide = (min(asked, count) for asked, count in zip(size, shape, strict=True))
    found = np.zeros((high, wide), np.float32)
    lines, columns = (np.arange(cells) * count // cells for cells, count in zip((high, wide), shape, strict=True))
    for (start, stop), band in bands:
        across = np.maximum.reduceat(band, columns, axis=1)
        cells = np.searchsorted(lines, np.arange(start, stop), side="right") - 1
        np.maximum.at(found, cells, across)
    return np.round(np.clip(found, 0, 1) * 255).astype(np.uint8)
