"""Rows whose tokens are spread over ranks: which of them each takes, and what a batch is to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import IGNORED, Batch
from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec
from .collectives import Wire
from .parallel_attention import in_order


def check_rows(described: ModelSpec) -> None:
    """Refuse a model whose rows are no rows of tokens before they have been embedded."""
    for stack in described.stacks:
        if stack.embedding and stack.embedding.patches:
            raise SpecError(
                f"{stack.name} makes tokens of pixels or frames, which no row can be cut into before; "
                "use data= or tensor= in the place of context="
            )


def taken(count: int, rank: int, size: int, order: str) -> list[int]:
    """The places of a row of `count` tokens that rank `rank` of `size` takes; those from `count` on are padding.

    >>> taken(7, 1, 2, "runs"), taken(7, 1, 2, "zigzag")
    ([4, 5, 6, 7], [2, 3, 4, 5])
    """
    runs = {"runs": [rank], "zigzag": [rank, 2 * size - 1 - rank]}[order]
    each = -(-count // (size * len(runs)))
    return [place for run in runs for place in range(run * each, (run + 1) * each)]


def part_of(batch: Batch, wire: Wire, order: str = "runs") -> Batch:
    """The tokens of a batch that are this rank's; all of them hand over the same batch.

    Rows are filled up so that all take equally many. Where a row has one label as a whole, the first rank keeps it.
    """
    x, tokens = _cut(batch.x, batch.tokens, wire, order)
    labels = batch.labels
    if labels.dim() == 2:
        labels = _places(labels, wire, order, IGNORED)
    elif wire.rank:
        labels = torch.full_like(labels, IGNORED)
    source, told = batch.source, batch.source_tokens
    if source is not None:
        source, told = _cut(source, told, wire, order)
    return replace(batch, x=x, labels=labels, tokens=tokens, source=source, source_tokens=told)


def whole_of(y: Tensor, count: int, wire: Wire, order: str = "runs") -> Tensor:
    """What is said of every token [B, count, ...], from what each rank says of its own; without its gradient."""
    return in_order(wire.beside(y.detach()), order)[:, :count]


def _cut(x: Tensor, tokens: SequenceInfo | None, wire: Wire, order: str) -> tuple[Tensor, SequenceInfo]:
    """This rank's tokens of what an encoder or a decoder reads, and where they stand."""
    own, count = _places(x, wire, order, 0), x.shape[1]
    told = SequenceInfo.contiguous(0, count, x.device) if tokens is None else tokens
    if told.start is not None and order == "runs" and own.shape[1] * wire.size == count:
        return own, SequenceInfo.contiguous(told.start + wire.rank * own.shape[1], own.shape[1], x.device)
    position, segment = _places(told.position, wire, order, 0), _places(told.segment, wire, order, -1)
    return own, SequenceInfo(position, segment, checked=True)


def _places(x: Tensor, wire: Wire, order: str, fill: Any) -> Tensor:
    """x [B, T, ...] at the places that this rank takes."""
    places = taken(x.shape[1], wire.rank, wire.size, order)
    missing = max(0, max(places, default=-1) + 1 - x.shape[1])
    padded = F.pad(x, (*[0] * (2 * (x.dim() - 2)), 0, missing), value=fill)
    return padded.index_select(1, torch.tensor(places, device=x.device))
