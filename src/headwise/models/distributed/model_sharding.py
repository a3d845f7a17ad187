"""Divide a model among ranks: tensor and context parallelism, and fully sharded data parallelism
(FSDP2, 2304.11277).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import Tensor, nn

from ...util.errors import SpecError
from .. import Transformer
from ..model_spec import ModelSpec
from .collectives import CollectiveGroup, GradientBuckets
from .head_partition import partition_model
from .parallel_attention import TensorContextParallel, check_context_parallel, set_parallel_context
from .parallelism import Parallelism
from .ranks import GRADIENT_DIMS, ProcessMesh
from .sharded_model import BatchForward, ShardedModel
from .tensor_parallel import TensorParallelModel

# Importing FSDP2 and its tensors takes half a second, and every command that trains needs this
# module.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard_model(net: Transformer, mesh: ProcessMesh) -> ShardedModel:
    """Return this rank's part of a model that every rank has built in full; the rest is freed."""
    check_partition(net.spec, mesh.parallelism)
    groups = {
        dim: CollectiveGroup(mesh.group(dim))
        for dim in ("context", "tensor")
        if getattr(mesh.parallelism, dim) > 1
    }
    if "tensor" in groups:
        divided = TensorParallelModel(net.spec, groups["tensor"])
        sharded = divided.as_sharded(_shard_parameters(divided.shard_model(net), mesh))
    else:
        sharded = _shard_parameters(net, mesh)
    if groups:
        set_parallel_context(
            sharded.net, TensorContextParallel(groups.get("tensor"), groups.get("context"))
        )
    return replace(sharded, context=groups.get("context"))


def check_partition(spec: ModelSpec, parallelism: Parallelism) -> None:
    """Raise SpecError if a model cannot be divided this way, before anything is built."""
    if min(parallelism.data, parallelism.context, parallelism.shards) > 1:
        raise SpecError(
            f"{parallelism}: FSDP2 supports one replicated dimension beside shards=; leave out "
            "data= or context="
        )
    if min(parallelism.shards, parallelism.tensor) > 1:
        raise SpecError(
            f"{parallelism}: FSDP2 divides whole tensors, and tensor= parts of them; leave out "
            "shards= or tensor="
        )
    if parallelism.context > 1:
        check_context_parallel(spec)
    if parallelism.tensor > 1:
        partition_model(spec, parallelism.tensor)


def _shard_parameters(net: Transformer, mesh: ProcessMesh) -> ShardedModel:
    """Apply FSDP2, or keep all parameters and sum their gradients in buckets."""
    if mesh.parallelism.shards > 1:
        return apply_fsdp(net, mesh)
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    buckets = GradientBuckets(params.values(), _gradient_group(mesh))
    return ShardedModel(BatchForward(net), mesh, params, buckets, net.spec)


def _gradient_group(mesh: ProcessMesh) -> dist.ProcessGroup | None:
    """Return the group of ranks with different data, whose gradients are summed; None for a single
    worker.
    """
    return mesh.group(*GRADIENT_DIMS) if mesh.num_workers > 1 else None


class FSDPSharding:
    """A tensor whose first axis is divided as that of a parameter of FSDP2."""

    dims = ("shards",)

    def __init__(self, param: DTensor) -> None:
        self.param = param

    def part(self, full: Tensor) -> Tensor:
        """Return the slice of this rank, which may be empty."""
        from torch.distributed.tensor import distribute_tensor

        mesh = self.param.device_mesh
        sliced = distribute_tensor(full, mesh, self.param.placements, src_data_rank=None)
        return sliced.to_local()

    def whole(self, part: Tensor) -> Tensor:
        """Gather the full tensor from the slices of all ranks; a collective call."""
        from torch.distributed.tensor import DTensor

        size = self.param.shape
        placed = (self.param.device_mesh, self.param.placements)
        sliced = DTensor.from_local(part, *placed, shape=size, stride=self.param.stride())
        return sliced.full_tensor()

    def square(self, part: Tensor) -> Tensor:
        """Return the sum of squares of a slice; no other rank of the group holds its elements."""
        return part.square().sum()


def apply_fsdp(net: Transformer, process_mesh: ProcessMesh) -> ShardedModel:
    """Shard a model with FSDP2: one layer is gathered at a time, embeddings and heads once per
    step.

    Tied tensors stay whole because they are read outside the layer that owns them; scalars stay
    whole as well.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    copies = [dim for dim in ("data", "context") if getattr(process_mesh.parallelism, dim) > 1]
    mesh = process_mesh.device_mesh[(*copies, "shards") if copies else "shards"]
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    tied = {name for name, weight in net.spec.params().items() if weight.tied_to}
    unsharded = {name: p for name, p in net.named_parameters() if name in tied or not p.dim()}
    whole = set(unsharded.values())
    for layers in net.stacks.values():
        for layer in layers.blocks:
            fully_shard(layer, mesh=mesh, ignored_params=whole)
    batch_forward = BatchForward(net)
    fully_shard(batch_forward, mesh=mesh, ignored_params=whole)
    for module in batch_forward.modules():
        if isinstance(module, FSDPModule):
            # Losses are already parts of one mean, so gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    slices = {
        name: cast("DTensor", p)
        for name, p in net.named_parameters()
        if name in trainable and name not in unsharded
    }
    own = dict[str, nn.Parameter]()
    for name in trainable:
        if name in unsharded:
            own[name] = unsharded[name]
        else:  # this rank's slice, which shares the memory of the DTensor
            own[name] = nn.Parameter(cast("DTensor", slices[name].detach()).to_local())
    summed = [p for name, p in unsharded.items() if name in trainable]
    return ShardedModel(
        batch_forward,
        process_mesh,
        own,
        GradientBuckets(summed, _gradient_group(process_mesh)),
        net.spec,
        {name: FSDPSharding(param) for name, param in slices.items()},
        collect_gradients=lambda: _collect_gradients(own, slices),
    )


def _collect_gradients(own: Mapping[str, nn.Parameter], slices: Mapping[str, DTensor]) -> None:
    """Move the gradients of slices from FSDP2's parameters to those of the optimiser."""
    for name, param in slices.items():
        own[name].grad = None if param.grad is None else cast("DTensor", param.grad).to_local()
        param.grad = None
