"""Split an axis that joins batch and heads, as in attention on tensors [batch * heads, T, S].

Which of the two comes first cannot be read off a tensor. It is decided by running the module again with one slice of
the axis changed: the row of the batch that changes in the output shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ..hooks import AttentionInputs, ObservedCall, WeightsOnlyCall

BATCH_FIRST, HEADS_FIRST, UNKNOWN_ORDER = "batch first", "heads first", "unknown"


class JointAxis(NamedTuple):
    """Number of heads on a joint axis, and the order of batch and heads there."""

    num_heads: int
    order: str

    @property
    def candidates(self) -> list[JointAxis]:
        """The two orders if the order is unknown, else this one."""
        if self.order != UNKNOWN_ORDER:
            return [self]
        return [self._replace(order=BATCH_FIRST), self._replace(order=HEADS_FIRST)]

    def split(self, tensor: Tensor) -> Tensor:
        """Split [batch * heads, ...] into [batch, heads, ...].

        >>> import torch
        >>> JointAxis(3, "heads first").split(torch.arange(6))
        tensor([[0, 2, 4],
                [1, 3, 5]])
        """
        if self.order == BATCH_FIRST:
            return tensor.unflatten(0, (-1, self.num_heads))
        return tensor.unflatten(0, (self.num_heads, -1)).transpose(0, 1)

    def join(self, tensor: Tensor) -> Tensor:
        """Join [batch, heads, ...] as [batch * heads, ...]."""
        return (tensor if self.order == BATCH_FIRST else tensor.transpose(0, 1)).flatten(0, 1)

    def split_call(self, call: ObservedCall) -> ObservedCall:
        """Split the inputs or weights of a call whose batch axis is the joint axis, and which has one head."""
        if isinstance(call, WeightsOnlyCall):
            return WeightsOnlyCall(self.split(call.weights[:, 0]))
        assert isinstance(call, AttentionInputs)
        q, k, v = (self.split(side[:, :, 0]).transpose(1, 2) for side in (call.q_BTHK, call.k_BSGK, call.v_BSGV))
        mask = call.mask
        if mask is not None and mask.shape[0] > 1:
            mask = self.split(mask[:, 0])
        return replace(call, q_BTHK=q, k_BSGK=k, v_BSGV=v, mask=mask)


def find_joint_axis(size: int, before: Tensor, after: Tensor) -> JointAxis | None:
    """The joint axis of `size`, from the output of a module before and after slice 1 of the axis was changed.

    The axis of the output with a single changed index is the batch. With the batch first, slice 1 belongs to row 0 (or,
    with one head, to row 1); with heads first, it belongs to row 1. None if the output shows no such axis.
    """
    if size == 1:
        return JointAxis(1, BATCH_FIRST)
    changed = before != after
    rows = [
        (changed.shape[axis], indices)
        for axis in range(min(2, changed.dim()))
        if len(indices := changed.transpose(0, axis).flatten(1).any(1).nonzero().flatten().tolist()) == 1
        and changed.shape[axis] > 1
        and size % changed.shape[axis] == 0
    ]
    if len(rows) != 1:
        return None
    (batch, (row,)) = rows[0]
    heads = size // batch
    if heads == 1:
        return JointAxis(1, BATCH_FIRST) if row == 1 else None
    return JointAxis(heads, (BATCH_FIRST, HEADS_FIRST)[row]) if row < 2 else None
