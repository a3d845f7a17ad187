"""Context parallelism: divide the tokens of each row of a batch among ranks."""

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
    """Raise SpecError for a model of images or speech, whose rows become tokens only in the embedding."""
    for stack in spec.stacks:
        if stack.embedding and stack.embedding.patches:
            raise SpecError(
                f"{stack.name} embeds pixels or frames, so its rows cannot be divided into tokens beforehand; "
                "use data= or tensor= instead of context="
            )


def positions_of_rank(num_tokens: int, rank: int, num_ranks: int, token_order: str) -> list[int]:
    """Return the positions of a row of `num_tokens` tokens that a rank holds; positions >= `num_tokens` are padding.

    >>> positions_of_rank(7, 1, 2, "runs"), positions_of_rank(7, 1, 2, "zigzag")
    ([4, 5, 6, 7], [2, 3, 4, 5])
    """
    runs = {"runs": [rank], "zigzag": [rank, 2 * num_ranks - 1 - rank]}[token_order]
    run_length = -(-num_tokens // (num_ranks * len(runs)))
    return [position for run in runs for position in range(run * run_length, (run + 1) * run_length)]


def shard_tokens(batch: Batch, group: CollectiveGroup, token_order: str = "runs") -> Batch:
    """Return this rank's tokens of a batch that all ranks have.

    Rows are padded so that all ranks hold equally many tokens. If each row has a single label, the first rank keeps it.
    """
    x, tokens = _shard_sequence(batch.x, batch.tokens, group, token_order)
    labels = batch.labels
    if labels.dim() == 2:
        labels = _select_positions(labels, group, token_order, IGNORE_INDEX)
    elif group.rank:
        labels = torch.full_like(labels, IGNORE_INDEX)
    source, source_sequence = batch.source, batch.source_tokens
    if source is not None:
        source, source_sequence = _shard_sequence(source, source_sequence, group, token_order)
    return replace(batch, x=x, labels=labels, tokens=tokens, source=source, source_tokens=source_sequence)


def gather_token_outputs(y: Tensor, num_tokens: int, group: CollectiveGroup, token_order: str = "runs") -> Tensor:
    """Gather the outputs of every token [B, num_tokens, ...] from those of each rank, without gradients."""
    return restore_token_order(group.beside(y.detach()), token_order)[:, :num_tokens]


def _shard_sequence(
    x: Tensor, tokens: SequenceInfo | None, group: CollectiveGroup, order: str
) -> tuple[Tensor, SequenceInfo]:
    """Return this rank's tokens of an encoder or decoder input, and their positions."""
    own, count = _select_positions(x, group, order, 0), x.shape[1]
    sequence = SequenceInfo.contiguous(0, count, x.device) if tokens is None else tokens
    if sequence.start is not None and order == "runs" and own.shape[1] * group.size == count:
        return own, SequenceInfo.contiguous(sequence.start + group.rank * own.shape[1], own.shape[1], x.device)
    position, segment = (
        _select_positions(sequence.position, group, order, 0),
        _select_positions(sequence.segment, group, order, -1),
    )
    return own, SequenceInfo(position, segment, checked=True)


def _select_positions(x: Tensor, group: CollectiveGroup, order: str, fill: Any) -> Tensor:
    """Select this rank's positions of x [B, T, ...], padded with `fill`."""
    positions = positions_of_rank(x.shape[1], group.rank, group.size, order)
    missing = max(0, max(positions, default=-1) + 1 - x.shape[1])
    padded = F.pad(x, (*[0] * (2 * (x.dim() - 2)), 0, missing), value=fill)
    return padded.index_select(1, torch.tensor(positions, device=x.device))
