"""Tensor parallelism: every rank has all tokens, some heads of every layer and some units of every
feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...util.errors import SpecError
from .. import Transformer, build
from ..model_spec import ModelSpec
from .collectives import CollectiveGroup
from .head_partition import count_holders, count_replicas, partition_model
from .parallel_attention import TensorContextParallel, set_parallel_context
from .sharded_model import ShardedModel


class TensorParallelModel:
    """How the ranks of a group divide a model, and the shard of this rank.

    Several ranks may hold the same numbers, such as a key that heads of both attend with; each gets
    a part of the gradient. `sum_replicated_gradients` adds these parts up; call it after the
    backward pass and before anything that uses the gradients. All ranks must call every method, in
    the same order.
    """

    def __init__(self, spec: ModelSpec, group: CollectiveGroup) -> None:
        self.group = group
        self.spec = spec
        shards = partition_model(spec, group.size)
        self.own = shards[group.rank].spec
        self.pieces = {name: [shard.pieces[name] for shard in shards] for name in shards[0].pieces}
        self.copied = count_replicas(spec, shards)
        for name, pieces in self.pieces.items():
            if not bool(count_holders(pieces).all()):
                problem = f"{name} ({pieces[0].layout}) joins heads of several ranks"
                raise SpecError(f"{problem}; use data= or context= instead of tensor=")

    def shard_model(self, net: Transformer) -> Transformer:
        """Return this rank's shard of a model that all ranks have built alike; its parameters are
        new tensors.
        """
        with torch.device("meta"):
            part = build(self.own, dropout=net.dropout)
        pieces = {
            name: self.part(name, tensor.detach()) for name, tensor in net.state_dict().items()
        }
        part.load_state_dict(pieces, assign=True)
        for name, tensor in net.named_parameters():
            part.get_parameter(name).requires_grad_(tensor.requires_grad)
        part.checkpointing = net.checkpointing
        set_parallel_context(part, TensorContextParallel(tensor_group=self.group))
        return part.train(net.training)

    def sum_replicated_gradients(self, local_params: Mapping[str, nn.Parameter]) -> None:
        """Set the gradient of every number that several ranks hold to the sum over these ranks."""
        replicated = {name: local_params[name] for name in self.copied if name in local_params}
        for dtype in dict.fromkeys(p.dtype for p in replicated.values()):
            params = {name: p for name, p in replicated.items() if p.dtype == dtype}
            local_grads = [self._local_gradient(name, p) for name, p in params.items()]
            total = self.group.all_reduce(torch.cat([grad.flatten() for grad in local_grads]))
            parts = total.split([grad.numel() for grad in local_grads])
            for (name, p), part in zip(params.items(), parts, strict=True):
                p.grad = self.part(name, part)

    def _local_gradient(self, name: str, p: Tensor) -> Tensor:
        """Return the gradient of the full tensor with this rank's contribution, zero elsewhere."""
        piece = self.pieces[name][self.group.rank]
        whole = p.new_zeros(piece.layout.shape(piece.sizes))
        if p.grad is not None:
            piece.write_into(p.grad, whole)
        return whole

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's piece of a full tensor, which has the shape of parameter `name`."""
        return self.pieces[name][self.group.rank].of(full)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Gather the full tensor from the pieces of all ranks, bit for bit; a collective call."""
        pieces = self.pieces[name]
        full = part.new_empty(pieces[0].layout.shape(pieces[0].sizes))
        sizes = [math.prod(piece.shape) for piece in pieces]
        flat = part.new_zeros(max(sizes))
        flat[: part.numel()] = part.flatten()
        for piece, size, stored in zip(pieces, sizes, self.group.all_gather(flat), strict=True):
            piece.write_into(stored[:size], full)
        return full

    def num_holders(self, name: str) -> Tensor:
        """Return the number of ranks that hold each element of this rank's piece of a tensor."""
        piece = self.pieces[name][self.group.rank]
        return (
            self.copied[name][piece.cut_indices].expand(piece.unmerged_shape).reshape(piece.shape)
        )

    def as_sharded(self, part: ShardedModel) -> ShardedModel:
        """Return the full model of which `part` holds this rank's heads."""
        names = [name for name, pieces in self.pieces.items() if pieces[0].indices]
        return replace(
            part,
            spec=self.spec,
            shardings={name: TensorParallelSharding(self, name) for name in names},
            collect_gradients=lambda: self.sum_replicated_gradients(part.own),
        )


class TensorParallelSharding:
    """A tensor divided over the ranks of tensor parallelism."""

    dims = ("tensor",)

    def __init__(self, model: TensorParallelModel, name: str) -> None:
        self.model = model
        self.name = name
        self._num_holders = model.num_holders(name) if name in model.copied else torch.ones(())

    def part(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        return self.model.part(self.name, full)

    def whole(self, part: Tensor) -> Tensor:
        """Gather the full tensor from the parts of all ranks; a collective call."""
        return self.model.whole(self.name, part)

    def square(self, part: Tensor) -> Tensor:
        """Return the sum of squares of a part, each element divided by the number of ranks that
        hold it.
        """
        return (part.square() / self._num_holders.to(part.device)).sum()
