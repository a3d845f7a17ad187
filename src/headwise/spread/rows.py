"""Which examples of a batch are a rank's."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..tasks import IGNORED, Batch


class Share(NamedTuple):
    """What a rank takes of a batch, and how many of its rows count.

    Who gets no row takes one that asks nothing: it has nothing to learn, but others wait for it in every layer.
    """

    batch: Batch
    rows: int


def share(batch: Batch, index: int, count: int) -> Share:
    """Part `index` of `count`, all as large as the others or one row smaller, in order.

    >>> ids = torch.arange(3)[:, None]
    >>> [(part.batch.x.tolist(), part.rows) for part in (share(Batch(ids, ids), index, 2) for index in range(2))]
    [([[0], [1]], 2), ([[2]], 1)]
    >>> share(Batch(ids, ids), 3, 4).batch.labels.tolist()
    [[-100]]
    """
    if count == 1:
        return Share(batch, len(batch.labels))
    each, over = divmod(len(batch.labels), count)
    first = index * each + min(index, over)
    rows = each + (index < over)
    if rows:
        return Share(batch.rows(slice(first, first + rows)), rows)
    idle = batch.rows(slice(0, 1))
    return Share(replace(idle, labels=torch.full_like(idle.labels, IGNORED)), 0)
