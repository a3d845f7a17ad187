"""A batch of examples: the inputs of a model with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..attention.masking.sequence_info import SequenceInfo

IGNORE_INDEX = -100  # the label of a position without a target


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of examples.

    `x` is the input of the model: token ids [B, T], pixels [B, C, H, W] or frames [B, T, F].
    `labels` are the target ids of every position, [B, T], or one class per example, [B]; positions
    without a target hold IGNORE_INDEX. `source` is the input of the encoder, if the model has one.
    `tokens` and `source_tokens` hold the positions and segment ids of `x` and `source`; None means
    that row t of the input is at position t and nothing is padding. `gold` has one entry per
    example with what the task knows about its structure, such as the links between source and
    target tokens.
    """

    x: Tensor
    labels: Tensor
    tokens: SequenceInfo | None = None
    source: Tensor | None = None
    source_tokens: SequenceInfo | None = None
    gold: Sequence[Any] = ()

    def to(self, device: torch.device | str) -> Self:
        """Copy of the batch on `device`; `gold` is not moved."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, (Tensor, SequenceInfo))
        }
        return replace(self, **moved)

    def rows(self, rows: slice) -> Self:
        """Return the batch of the examples that a slice selects.

        >>> ids = torch.arange(6).view(3, 2)
        >>> tokens = SequenceInfo.from_batch(ids, lengths=[2, 1, 2])
        >>> Batch(ids, ids, tokens, gold="abc").rows(slice(1, 2)).gold
        'b'
        """
        return type(self)(**{name: _select_rows(value, rows) for name, value in vars(self).items()})


def _select_rows(value: Any, rows: slice) -> Any:
    if value is None:
        return None
    if isinstance(value, SequenceInfo):
        is_shared = value.segment.shape[0] == 1  # one row for all examples
        return value if is_shared else value.rows(rows)
    return value[rows]
