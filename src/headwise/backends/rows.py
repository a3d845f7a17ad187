"""Where the tokens of each row stand, looked up: neighbours of one text that lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .banding import TokenAxis

MAX_TOKEN_RUNS = 16  # tokens that are neighbours at least, on average, or else nothing is gained by looking for neighbours

TokenRun = tuple[int, TokenAxis]  # a segment, and tokens of it


def find_token_runs(tokens: Sequence[Tensor], batch: int) -> list[tuple[Sequence[int], TokenAxis, tuple[TokenAxis, ...]]] | None:
    """Queries that stand together, with all keys of their segment, for each row of the batch or for all alike.

    `tokens` are position and segment of queries and of keys, each [B, T], or [1, T] where all rows are alike. None
    where they stand so much anywhere that each would be on its own.
    """
    asks, told = (_scan_token_runs(*some) for some in (tokens[:2], tokens[2:]))
    if any(
        len(row) > MAX_TOKEN_RUNS + some.shape[1] // MAX_TOKEN_RUNS for every, some in ((asks, tokens[0]), (told, tokens[2])) for row in every
    ):
        return None
    alike = len(asks) == len(told) == 1
    return [
        (range(batch) if alike else (row,), axis, tuple(other for same, other in told[row % len(told)] if same == own))
        for row in range(1 if alike else batch)
        for own, axis in asks[row % len(asks)]
    ]


def _scan_token_runs(position_BT: Tensor, segment_BT: Tensor) -> list[list[TokenRun]]:
    """The runs of each row, without padding."""
    if not position_BT.shape[1]:
        return [[] for _ in position_BT]
    begins = torch.ones_like(position_BT, dtype=torch.bool)
    begins[:, 1:] = (position_BT.diff() != 1) | (segment_BT.diff() != 0)
    row, slot = begins.nonzero(as_tuple=True)
    listed = zip(*(t.tolist() for t in (row, slot, position_BT[row, slot], segment_BT[row, slot])), strict=True)
    found: list[list[TokenRun]] = [[] for _ in position_BT]
    ends: list[tuple[int, int]] = [*zip(row.tolist()[1:], slot.tolist()[1:], strict=True), (-1, 0)]
    for (here, first, place, segment), (other, end) in zip(listed, ends, strict=True):
        count = (end if other == here else position_BT.shape[1]) - first
        if segment >= 0:
            found[here].append((segment, TokenAxis(range(place, place + count), first)))
    return found
