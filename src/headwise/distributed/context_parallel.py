"""Rows whose tokens are spread over ranks: which of them each takes, and what a batch is to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import IGNORE_INDEX, Batch
from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec
from .collectives import CollectiveGroup
from .parallel_attention import restore_token_order


def check_context_parallel(spec: ModelSpec) -> None:
    """Refuse a model whose rows are no rows of tokens before they have been embedded."""
    for stack in spec.stacks:
        if stack.embedding and stack.embedding.patches:
            raise SpecError(
                f"{stack.name} makes tokens of pixels or frames, which no row can be cut into before; "
                "use data= or tensor= in the place of context="
            )


def positions_of_rank(num_tokens: int, rank: int, num_ranks: int, token_order: str) -> list[int]:
    """The places of a row of `count` tokens that rank `rank` of `size` takes; those from `count` on are padding.

    >>> positions_of_rank(7, 1, 2, "runs"), positions_of_rank(7, 1, 2, "zigzag")
    ([4, 5, 6, 7], [2, 3, 4, 5])
    """
    runs = {"runs": [rank], "zigzag": [rank, 2 * num_ranks - 1 - rank]}[token_order]
    each = -(-num_tokens // (num_ranks * len(runs)))
    return [place for run in runs for place in range(run * each, (run + 1) * each)]


def shard_tokens(batch: Batch, group: CollectiveGroup, token_order: str = "runs") -> Batch:
    """The tokens of a batch that are this rank's; all of them hand over the same batch.

    Rows are filled up so that all take equally many. Where a row has one label as a whole, the first rank keeps it.
    """
    x, tokens = _shard_sequence(batch.x, batch.tokens, group, token_order)
    labels = batch.labels
    if labels.dim() == 2:
        labels = _select_positions(labels, group, token_order, IGNORE_INDEX)
    elif group.rank:
        labels = torch.full_like(labels, IGNORE_INDEX)
    source, told = batch.source, batch.source_tokens
    if source is not None:
        source, told = _shard_sequence(source, told, group, token_order)
    return replace(batch, x=x, labels=labels, tokens=tokens, source=source, source_tokens=told)


def gather_token_outputs(y: Tensor, num_tokens: int, group: CollectiveGroup, token_order: str = "runs") -> Tensor:
    """What is said of every token [B, count, ...], from what each rank says of its own; without its gradient."""
    return restore_token_order(group.beside(y.detach()), token_order)[:, :num_tokens]


def _shard_sequence(
    x: Tensor, tokens: SequenceInfo | None, wire: CollectiveGroup, order: str
) -> tuple[Tensor, SequenceInfo]:
    """This rank's tokens of what an encoder or a decoder reads, and where they stand."""
    own, count = _select_positions(x, wire, order, 0), x.shape[1]
    told = SequenceInfo.contiguous(0, count, x.device) if tokens is None else tokens
    if told.start is not None and order == "runs" and own.shape[1] * wire.size == count:
        return own, SequenceInfo.contiguous(told.start + wire.rank * own.shape[1], own.shape[1], x.device)
    position, segment = (
        _select_positions(told.position, wire, order, 0),
        _select_positions(told.segment, wire, order, -1),
    )
    return own, SequenceInfo(position, segment, checked=True)


def _select_positions(x: Tensor, wire: CollectiveGroup, order: str, fill: Any) -> Tensor:
    """x [B, T, ...] at the places that this rank takes."""
    places = positions_of_rank(x.shape[1], wire.rank, wire.size, order)
    missing = max(0, max(places, default=-1) + 1 - x.shape[1])
    padded = F.pad(x, (*[0] * (2 * (x.dim() - 2)), 0, missing), value=fill)
    return padded.index_select(1, torch.tensor(places, device=x.device))
