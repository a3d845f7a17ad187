"""Every tensor divided among ranks, and put together layer by layer where it is needed: FSDP2 (2304.11277)."""

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
    """A tensor whose first axis is divided among ranks as FSDP2 does: ceil(n / ranks) each, as long as there are any.

    >>> [FSDPSharding(5, rank, 3).part(torch.arange(5)).tolist() for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """

    dims = ("shards",)

    def __init__(self, length: int, rank: int, num_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self.length, self.rank, self.ranks, self.group = length, rank, num_ranks, group
        self.each = -(-length // num_ranks)

    def part(self, full: Tensor) -> Tensor:
        """The slice of this rank, which may be empty."""
        return full[self.rank * self.each : (self.rank + 1) * self.each]

    def whole(self, part: Tensor) -> Tensor:
        """All slices behind each other; every rank must ask."""
        padded = part.new_zeros(self.each, *part.shape[1:])
        padded[: len(part)] = part
        slices = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(slices, padded, group=self.group)
        return torch.cat(slices)[: self.length]

    def square(self, part: Tensor) -> Tensor:
        """The sum of its squares: no other slice has these numbers."""
        return part.square().sum()


def apply_fsdp(net: Transformer, process_mesh: ProcessMesh) -> ShardedModel:
    """A rank's slices of a model. Layers are put together one at a time, what stands around them once a step.

    A tensor that layers hold in common is read outside the layer that owns it: it stays whole, as does a single number.
    """
    copies = [way for way in ("data", "context") if getattr(process_mesh.spread, way) > 1]  # one of them at most
    mesh = process_mesh.device_mesh[*copies, "shards"] if copies else process_mesh.device_mesh["shards"]
    learned = {name: p for name, p in net.named_parameters() if p.requires_grad}
    common = {name for name, weight in net.spec.params().items() if weight.tied_to}
    kept = {name: p for name, p in net.named_parameters() if name in common or not p.dim()}
    whole, lengths = set(kept.values()), {name: len(p) for name, p in learned.items() if name not in kept}
    for layers in net.stacks.values():
        for layer in layers.blocks:
            fully_shard(layer, mesh=mesh, ignored_params=whole)
    path = BatchForward(net)
    fully_shard(path, mesh=mesh, ignored_params=whole)
    for module in path.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are parts of one mean already: sums, not means, of these
            module.set_force_sum_reduction_for_comms(True)
    group, rank = process_mesh.group("shards"), process_mesh.place["shards"]
    lying = {name: FSDPSharding(length, rank, process_mesh.spread.shards, group) for name, length in lengths.items()}
    slices = {name: cast(DTensor, p) for name, p in net.named_parameters() if name in lying}
    own = {name: kept[name] if name in kept else _local_parameter(slices[name]) for name in learned}
    summed = GradientBuckets([p for name, p in kept.items() if name in learned], get_gradient_group(process_mesh))
    return ShardedModel(
        path, process_mesh, own, summed, net.spec, lying, collect_gradients=lambda: _collect_gradients(own, slices)
    )


def _local_parameter(param: DTensor) -> nn.Parameter:
    """The slice of this rank as a plain tensor, in the memory of the other."""
    return nn.Parameter(cast(DTensor, param.detach()).to_local())


def _collect_gradients(own: Mapping[str, nn.Parameter], slices: Mapping[str, DTensor]) -> None:
    """Gradients of slices, from where FSDP2 leaves them to where the optimiser looks."""
    for name, param in slices.items():
        own[name].grad = None if param.grad is None else cast(DTensor, param.grad).to_local()
        param.grad = None
