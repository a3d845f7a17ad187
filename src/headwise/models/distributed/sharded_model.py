"""The part of a model that one rank holds, how it is gathered, loaded and clipped: a part of every
tensor (FSDP2, 2304.11277), or some heads and hidden units (tensor parallelism).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...util.errors import SpecError
from .. import Transformer, build
from ..batch import Batch
from ..model_spec import ModelSpec
from .head_partition import DIVIDED_ROLES, count_holders, partition_model
from .parallel_attention import (
    CollectiveGroup,
    GradientBuckets,
    TensorContextParallel,
    check_context_parallel,
    set_parallel_context,
    shard_tokens,
)
from .parallelism import Parallelism, ProcessInfo
from .ranks import GRADIENT_DIMS, BatchShard, ProcessMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class BatchForward(nn.Module):
    """Module that maps a batch to the outputs of the model's first head in one forward call.

    FSDP gathers and frees tensors around this call. `hidden` computes the final states, compiled or
    not.
    """

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        self.net = net
        self.hidden = net.hidden

    def forward(self, batch: Batch, index: Tensor | None = None) -> Tensor:
        """Return [B, T, outputs] or [B, outputs]; with `index`, [1, n, outputs] for n of the B * T
        states.
        """
        h = self.hidden(
            batch.x, sequence=batch.tokens, source=batch.source, source_sequence=batch.source_tokens
        )
        if index is not None:
            h = h.flatten(0, 1).index_select(0, index)[None]
        return self.net.apply_head(h, sequence=batch.tokens)


# --- The shard of one rank ------------------------------------------------------------------------


@dataclass(eq=False)
class ShardedModel:
    """The part of a model that one rank holds.

    `own` maps the names of the spec to this rank's trainable tensors, the only ones that the
    optimiser gets; tensors in `shardings` are parts, the others full. `forward` runs the model;
    `collect_gradients` moves gradients to `own`.
    """

    forward: BatchForward
    world: ProcessMesh
    own: Mapping[str, nn.Parameter]
    buckets: GradientBuckets
    spec: ModelSpec
    shardings: Mapping[str, TensorParallelSharding | FSDPSharding] = field(
        default_factory=dict[str, "TensorParallelSharding | FSDPSharding"]
    )
    collect_gradients: Callable[[], None] | None = None
    context: CollectiveGroup | None = None

    @property
    def net(self) -> Transformer:
        """The model; its parameters may be shards."""
        return self.forward.net

    def shard(self, batch: Batch) -> BatchShard:
        """Return this rank's part of a batch that all ranks have: some of its rows, and some tokens
        of these.
        """
        rows = self.world.shard(batch, "data", "shards")
        if self.context is None:
            return rows
        return rows._replace(batch=shard_tokens(rows.batch, self.context))

    # --- gradients ---

    def begin_final_backward(self) -> None:
        """Announce that the next backward pass is the last one of this step, so that gradients can
        be sent early.
        """
        self.buckets.begin_final_backward()

    def finish(self) -> None:
        """Finish summing the gradients over the ranks and move them to `own`."""
        self.buckets.finish()
        if self.collect_gradients is not None:
            self.collect_gradients()

    def norm(self) -> Tensor:
        """Return the norm of the gradient of the full model, the same on every rank."""
        if not self.shardings:
            return nn.utils.get_total_norm(
                [p.grad for p in self.own.values() if p.grad is not None]
            )
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for name, parameter in self.own.items():
            if parameter.grad is not None:
                grad = parameter.grad.double()
                sharding = self.shardings.get(name)
                square = sharding.square(grad) if sharding else grad.square().sum()
                parts = 1
                for dim in sharding.dims if sharding else ():
                    parts *= getattr(self.world.parallelism, dim)
                total += square / (self.world.size // parts)  # ranks that hold the same part
        dist.all_reduce(total)
        exact = torch.promote_types(torch.float32, next(iter(self.own.values())).dtype)
        return total.sqrt().to(exact)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradient down from norm `norm` to at most `max_norm`."""
        nn.utils.clip_grads_with_norm_(self.own.values(), max_norm, norm)

    # --- whole tensors ---

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and full value of every tensor; every rank must iterate to the end."""
        for name, tensor in self.net.state_dict().items():
            yield name, self.whole(name, self.own[name].detach() if name in self.own else tensor)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Gather a tensor with the sharding of `name`, such as an optimiser moment; a scalar is
        returned as it is.
        """
        return self.shardings[name].whole(part) if name in self.shardings and part.dim() else part

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor with the sharding of `name`; a scalar is
        returned as it is.
        """
        return self.shardings[name].part(full) if name in self.shardings and full.dim() else full

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the full tensors of a state dict, each rank its own part."""
        unsharded = {name: tensor for name, tensor in tensors.items() if name not in self.shardings}
        self.net.load_state_dict(unsharded, strict=not self.shardings)
        constants = dict(self.net.named_buffers())
        with torch.no_grad():
            for name in self.shardings:
                stored = self.own[name] if name in self.own else constants[name]
                stored.copy_(self.part(name, tensors[name]))

    def gathered(self) -> Transformer:
        """Return the full model on the leader, and the shard on other ranks; a collective call."""
        if not self.shardings:
            return self.net
        tensors = {name: tensor.cpu() for name, tensor in self.tensors() if self.world.is_leader}
        return self.assemble_model(tensors) if self.world.is_leader else self.net

    def assemble_model(self, tensors: Mapping[str, Tensor]) -> Transformer:
        """Return a full model with these weights on this rank: the current model if no other rank
        takes part.
        """
        if not self.shardings and self.context is None:
            self.net.load_state_dict(tensors)
            return self.net
        with torch.device("meta"):
            net = build(self.spec, dropout=self.net.dropout)
        net.load_state_dict(tensors, assign=True)
        net.usage = self.net.usage
        return net.to(self.world.device)


def wrap_single_process(net: Transformer, device: torch.device | str = "cpu") -> ShardedModel:
    """Wrap a full model of a single process."""
    return ShardedModel(
        BatchForward(net),
        ProcessMesh(ProcessInfo(), Parallelism(), device),
        {name: p for name, p in net.named_parameters() if p.requires_grad},
        GradientBuckets((), None),
        net.spec,
    )


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
        divided = [
            name
            for name, weight in spec.params().items()
            if weight.role in DIVIDED_ROLES and weight.trainable
        ]
        replicas = dict[str, Tensor]()
        for name in divided:
            count = count_holders([shard.pieces[name] for shard in shards])
            if int(count.max()) > 1:
                replicas[name] = count
        self.copied = replicas
        for name, pieces in self.pieces.items():
            if not bool(count_holders(pieces).all()):
                problem = f"{name} ({pieces[0].layout}) joins heads of several ranks"
                raise SpecError(f"{problem}; use data= or context= instead of tensor=")

    def shard_model(
        self, net: Transformer, full: Iterable[tuple[str, Tensor]] | None = None
    ) -> Transformer:
        """Return this rank's shard of a model, cut from the tensors of `net` or from `full`; its
        parameters are new tensors.
        """
        with torch.device("meta"):
            part = build(self.own, dropout=net.dropout)
        full = net.state_dict().items() if full is None else full
        pieces = {name: self.part(name, tensor.detach()) for name, tensor in full}
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
        return self.pieces[name][self.group.rank].cut_from(full)

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


def shard_model(
    net: Transformer, mesh: ProcessMesh, dtype: torch.dtype | None = None
) -> ShardedModel:
    """Return this rank's part of a model, on its device; the rest is freed.

    Every rank has built the model in full. With `shards` or `tensor`, only the leader needs to: the
    others may have built it on meta. `dtype` is that of autocast; `shards` are gathered in it.
    """
    check_partition(net.spec, mesh.parallelism)
    groups = {
        dim: CollectiveGroup(mesh.group(dim))
        for dim in ("context", "tensor")
        if getattr(mesh.parallelism, dim) > 1
    }
    if "tensor" in groups:
        divided = TensorParallelModel(net.spec, groups["tensor"])
        part = divided.shard_model(net, _receive_tensors(net.state_dict(), mesh))
        part = _shard_parameters(part, mesh, dtype)
        names = [name for name, pieces in divided.pieces.items() if pieces[0].indices]
        sharded = replace(
            part,
            spec=divided.spec,
            shardings={name: TensorParallelSharding(divided, name) for name in names},
            collect_gradients=lambda: divided.sum_replicated_gradients(part.own),
        )
    else:
        sharded = _shard_parameters(net, mesh, dtype)
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


def _shard_parameters(
    net: Transformer, mesh: ProcessMesh, dtype: torch.dtype | None
) -> ShardedModel:
    """Apply FSDP2, or keep all parameters and sum their gradients in buckets."""
    if mesh.parallelism.shards > 1:
        return apply_fsdp(net, mesh, dtype)
    net = net.to(mesh.device)
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    buckets = GradientBuckets(params.values(), _gradient_group(mesh))
    return ShardedModel(BatchForward(net), mesh, params, buckets, net.spec)


def _gradient_group(mesh: ProcessMesh) -> dist.ProcessGroup | None:
    """Return the ranks that sum their gradients, each with different data; None for one worker."""
    return mesh.group(*GRADIENT_DIMS) if mesh.num_workers > 1 else None


class FSDPSharding:
    """A tensor that is divided along its first axis, as FSDP2 divides parameters."""

    dims = ("shards",)

    def __init__(self, param: DTensor) -> None:
        self.param = param

    def part(self, full: Tensor) -> Tensor:
        """Return this rank's slice of a full tensor; it may be empty."""
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


WHOLE_SUFFIXES = ("router", "_bias")
# weights that only linear maps read
LINEAR_MAP = re.compile(r"\b(project\.(q|k|v|kv_down|k_up|v_up)|output\.o|(feed|expert)\.\w+)$")


def apply_fsdp(
    net: Transformer, process_mesh: ProcessMesh, dtype: torch.dtype | None = None
) -> ShardedModel:
    """Shard a model with FSDP2: one layer is gathered at a time, embeddings and heads once per
    step.

    Tied tensors stay whole because they are read outside the layer that owns them; vectors,
    scalars, routers and biases of experts stay whole as well. Where all other weights of a layer
    are those of linear maps, they are gathered in `dtype`, to which autocast converts them anyway,
    and their gradients are summed in float32; else they are gathered as they are.

    The model is sharded on meta, so that no rank but the leader ever has it as a whole; then the
    leader sends each tensor to all ranks, which keep their slices.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    copies = [dim for dim in ("data", "context") if getattr(process_mesh.parallelism, dim) > 1]
    mesh = process_mesh.device_mesh[(*copies, "shards") if copies else "shards"]
    full = dict(net.state_dict())
    net = net.to("meta")
    trainable = [name for name, p in net.named_parameters() if p.requires_grad]
    tied = {name for name, weight in net.spec.params().items() if weight.tied_to}
    unsharded = {
        name: p
        for name, p in net.named_parameters()
        if name in tied or p.dim() < 2 or not p.numel() or name.endswith(WHOLE_SUFFIXES)
    }
    whole = set(unsharded.values())
    sums = None if dtype is None else torch.float32
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sums, cast_forward_inputs=False)
    as_stored = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layers in net.stacks.values():
        for layer in layers.blocks:
            names = [name for name, p in layer.named_parameters() if p not in whole]
            policy = narrow if all(map(LINEAR_MAP.search, names)) else as_stored
            fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=whole)
    batch_forward = BatchForward(net)
    fully_shard(batch_forward, mesh=mesh, ignored_params=whole)
    for module in batch_forward.modules():
        if isinstance(module, FSDPModule):
            # Losses are already parts of one mean, so gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    batch_forward.to_empty(device=process_mesh.device)
    stored = net.state_dict()
    for name, tensor in _receive_tensors(full, process_mesh):
        if isinstance(stored[name], DTensor):
            slice_of_rank = FSDPSharding(stored[name]).part(tensor)
            stored[name].to_local().copy_(slice_of_rank)
        else:
            stored[name].copy_(tensor)
    parameters = dict(net.named_parameters())
    slices = {
        name: cast("DTensor", parameters[name]) for name in trainable if name not in unsharded
    }
    own = dict[str, nn.Parameter]()
    for name in trainable:
        if name in unsharded:
            own[name] = parameters[name]
        else:  # this rank's slice, which shares the memory of the DTensor
            own[name] = nn.Parameter(cast("DTensor", slices[name].detach()).to_local())
    summed = [own[name] for name in unsharded if name in own]
    return ShardedModel(
        batch_forward,
        process_mesh,
        own,
        GradientBuckets(summed, _gradient_group(process_mesh)),
        net.spec,
        {name: FSDPSharding(param) for name, param in slices.items()},
        collect_gradients=lambda: _collect_gradients(own, slices),
    )


def _receive_tensors(
    tensors: Mapping[str, Tensor], mesh: ProcessMesh
) -> Iterator[tuple[str, Tensor]]:
    """Yield the leader's tensors on the device of each rank, one at a time; a collective call."""
    for name, stored in tensors.items():
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=mesh.device)
        if mesh.is_leader:
            tensor.copy_(stored)
        dist.broadcast(tensor, 0)
        yield name, tensor


def _collect_gradients(own: Mapping[str, nn.Parameter], slices: Mapping[str, DTensor]) -> None:
    """Move the gradients of slices from FSDP2's parameters to the optimiser's."""
    for name, param in slices.items():
        own[name].grad = None if param.grad is None else cast("DTensor", param.grad).to_local()
        param.grad = None
