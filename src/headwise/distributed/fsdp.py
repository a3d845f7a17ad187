"""Fully sharded data parallelism: tensors are divided among ranks and gathered layer by layer (FSDP2, 2304.11277)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ..models import Transformer
from .collectives import GradientBuckets
from .ranks import ProcessMesh
from .sharded_model import BatchForward, ShardedModel, get_gradient_group


class FSDPSharding:
    """A tensor whose first axis is divided as FSDP2 does: ceil(n / ranks) rows per rank, fewer on the last.

    >>> [FSDPSharding(5, rank, 3).part(torch.arange(5)).tolist() for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """

    dims = ("shards",)

    def __init__(self, length: int, rank: int, num_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self.length, self.rank, self.ranks, self.group = length, rank, num_ranks, group
        self.each = -(-length // num_ranks)

    def part(self, full: Tensor) -> Tensor:
        """Return the slice of this rank, which may be empty."""
        return full[self.rank * self.each : (self.rank + 1) * self.each]

    def whole(self, part: Tensor) -> Tensor:
        """Gather the full tensor from the slices of all ranks; a collective call."""
        padded = part.new_zeros(self.each, *part.shape[1:])
        padded[: len(part)] = part
        slices = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(slices, padded, group=self.group)
        return torch.cat(slices)[: self.length]

    def square(self, part: Tensor) -> Tensor:
        """Return the sum of squares of a slice; no other rank of the group holds its elements."""
        return part.square().sum()


def apply_fsdp(net: Transformer, process_mesh: ProcessMesh) -> ShardedModel:
    """Shard a model with FSDP2: one layer is gathered at a time, embeddings and heads once per step.

    Tied tensors stay whole because they are read outside the layer that owns them; scalars stay whole as well.
    """
    copies = [way for way in ("data", "context") if getattr(process_mesh.spread, way) > 1]  # at most one of them
    mesh = process_mesh.device_mesh[*copies, "shards"] if copies else process_mesh.device_mesh["shards"]
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    tied = {name for name, weight in net.spec.params().items() if weight.tied_to}
    unsharded = {name: p for name, p in net.named_parameters() if name in tied or not p.dim()}
    whole, lengths = set(unsharded.values()), {name: len(p) for name, p in trainable.items() if name not in unsharded}
    for layers in net.stacks.values():
        for layer in layers.blocks:
            fully_shard(layer, mesh=mesh, ignored_params=whole)
    batch_forward = BatchForward(net)
    fully_shard(batch_forward, mesh=mesh, ignored_params=whole)
    for module in batch_forward.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are already parts of one mean, so gradients are summed
            module.set_force_sum_reduction_for_comms(True)
    group, rank = process_mesh.group("shards"), process_mesh.place["shards"]
    shardings = {
        name: FSDPSharding(length, rank, process_mesh.spread.shards, group) for name, length in lengths.items()
    }
    slices = {name: cast(DTensor, p) for name, p in net.named_parameters() if name in shardings}
    own = {name: unsharded[name] if name in unsharded else _local_parameter(slices[name]) for name in trainable}
    summed = GradientBuckets(
        [p for name, p in unsharded.items() if name in trainable], get_gradient_group(process_mesh)
    )
    return ShardedModel(
        batch_forward,
        process_mesh,
        own,
        summed,
        net.spec,
        shardings,
        collect_gradients=lambda: _collect_gradients(own, slices),
    )


def _local_parameter(param: DTensor) -> nn.Parameter:
    """Return this rank's slice as a plain parameter that shares the memory of the DTensor."""
    return nn.Parameter(cast(DTensor, param.detach()).to_local())


def _collect_gradients(own: Mapping[str, nn.Parameter], slices: Mapping[str, DTensor]) -> None:
    """Move the gradients of slices from FSDP2's parameters to those of the optimiser."""
    for name, param in slices.items():
        own[name].grad = None if param.grad is None else cast(DTensor, param.grad).to_local()
        param.grad = None
