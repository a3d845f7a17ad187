"""The way from a batch to what a model says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data import Batch
from ..errors import SpecError
from ..model_spec import ModelSpec
from ..models import Transformer, build
from .collectives import CollectiveGroup, GradientBuckets
from .context_parallel import check_context_parallel, shard_tokens
from .head_partition import partition_model
from .launch import ProcessInfo
from .parallel_attention import TensorContextParallel, set_parallel_context
from .parallelism import Parallelism
from .ranks import GRADIENT_DIMS, BatchShard, ProcessMesh


class BatchForward(nn.Module):
    """A model from what it reads to what its first head says, in one call: tensors that are put together for a call
    are there inside and let go behind it.

    `hidden` is how it comes to its states, compiled or not.
    """

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        self.net, self.hidden = net, net.hidden

    def forward(self, batch: Batch, index: Tensor | None = None) -> Tensor:
        """[B, T, outputs] or [B, outputs]; [1, n, outputs] of the n states that `index` names among all rows'."""
        h = self.hidden(batch.x, sequence=batch.tokens, source=batch.source, source_sequence=batch.source_tokens)
        if index is not None:
            h = h.flatten(0, 1).index_select(0, index)[None]
        return self.net.read(h, sequence=batch.tokens)


# --- What one rank holds of a model, and how it becomes one with what the others hold ------------------


class TensorSharding(Protocol):
    """How one tensor lies over ranks, of which each holds a part."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Over which ways of the spread."""
        ...

    def part(self, full: Tensor) -> Tensor:
        """What this rank holds of the whole."""
        ...

    def whole(self, part: Tensor) -> Tensor:
        """All parts put together; every rank must ask."""
        ...

    def square(self, part: Tensor) -> Tensor:
        """The sum of its squares, each number shared by as many ranks of these ways as hold it."""
        ...


def _collect_nothing() -> None:
    """Gradients are where they are wanted."""


@dataclass(eq=False)
class ShardedModel:
    """A model as far as a rank holds it.

    `own` are its learned tensors by the names of the description, whole, or a part where `lying` says how; the
    optimiser sees nothing else. Calls go by `path`; `fetch` brings gradients to `own`.
    """

    path: BatchForward
    world: ProcessMesh
    own: Mapping[str, nn.Parameter]
    summed: GradientBuckets
    spec: ModelSpec
    shardings: Mapping[str, TensorSharding] = field(default_factory=dict[str, "TensorSharding"])
    collect_gradients: Callable[[], None] = _collect_nothing
    context: CollectiveGroup | None = None

    @property
    def net(self) -> Transformer:
        """The model itself."""
        return self.path.net

    def share(self, batch: Batch) -> BatchShard:
        """What this rank learns from of a batch that all of them have: some of the rows, and of these some tokens."""
        rows = self.world.share(batch, "data", "shards")
        return rows if self.context is None else rows._replace(batch=shard_tokens(rows.batch, self.context))

    # --- gradients ---

    def begin_final_backward(self) -> None:
        """The next way back is the last one of this step."""
        self.summed.begin_final_backward()

    def finish(self) -> None:
        """Bring the gradients of all ranks together, each where it is held."""
        self.summed.finish()
        self.collect_gradients()

    def norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        if not self.shardings:
            return nn.utils.get_total_norm([p.grad for p in self.own.values() if p.grad is not None])
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for name, parameter in self.own.items():
            if parameter.grad is not None:
                grad, lying = parameter.grad.double(), self.shardings.get(name)
                total += (lying.square(grad) if lying else grad.square().sum()) / self._num_replicas(name)
        dist.all_reduce(total)
        exact = torch.promote_types(torch.float32, next(iter(self.own.values())).dtype)
        return total.sqrt().to(exact)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Shorten a gradient of this norm to at most so much."""
        nn.utils.clip_grads_with_norm_(self.own.values(), max_norm, norm)

    def _num_replicas(self, name: str) -> int:
        """How many ranks hold the same numbers of a tensor."""
        parts = 1
        for way in self.shardings[name].dims if name in self.shardings else ():
            parts *= getattr(self.world.spread, way)
        return self.world.size // parts

    # --- whole tensors ---

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, whole, by its name; every rank must ask for all."""
        for name, tensor in self.net.state_dict().items():
            yield name, self.whole(name, self.own[name].detach() if name in self.own else tensor)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """What is held of something with the shape of a tensor, put together; a single number is the same for all."""
        return self.shardings[name].whole(part) if name in self.shardings and part.dim() else part

    def part(self, name: str, full: Tensor) -> Tensor:
        """What this rank holds of such a thing."""
        return self.shardings[name].part(full) if name in self.shardings and full.dim() else full

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take every tensor of the model from whole ones."""
        rest = {name: tensor for name, tensor in tensors.items() if name not in self.shardings}
        self.net.load_state_dict(rest, strict=not self.shardings)
        constants = dict(self.net.named_buffers())
        with torch.no_grad():
            for name in self.shardings:
                held = self.own[name] if name in self.own else constants[name]
                held.copy_(self.part(name, tensors[name]))

    def gathered(self) -> Transformer:
        """The whole model as it is now, on the leader; every rank must ask, and the others have what they had."""
        if not self.shardings:
            return self.net
        tensors = {name: tensor.cpu() for name, tensor in self.tensors() if self.world.is_leader}
        return self.assemble_model(tensors) if self.world.is_leader else self.net

    def assemble_model(self, tensors: Mapping[str, Tensor]) -> Transformer:
        """A model that is whole on this rank, with these weights: the one in hand if nobody else has to do with it."""
        if not self.shardings and self.context is None:
            self.net.load_state_dict(tensors)
            return self.net
        with torch.device("meta"):
            net = build(self.spec, dropout=self.net.dropout)
        net.load_state_dict(tensors, assign=True)
        net.usage = self.net.usage
        return net.to(self.world.device)


def wrap_single_process(net: Transformer, device: torch.device | str = "cpu") -> ShardedModel:
    """A whole model that no other rank has to do with."""
    return ShardedModel(
        BatchForward(net),
        ProcessMesh(ProcessInfo(), Parallelism(), device),
        _trainable_params(net),
        GradientBuckets((), None),
        net.spec,
    )


def shard_model(net: Transformer, mesh: ProcessMesh) -> ShardedModel:
    """What this rank is to hold of a model that all ranks have whole; the rest of it is let go."""
    check_partition(net.spec, mesh.spread)
    wires = {way: CollectiveGroup(mesh.group(way)) for way in ("context", "tensor") if getattr(mesh.spread, way) > 1}
    if "tensor" in wires:
        from .tensor_parallel import TensorParallelModel

        divided = TensorParallelModel(net.spec, wires["tensor"])
        holding = divided.holding(_shard_parameters(divided.shard_model(net), mesh))
    else:
        holding = _shard_parameters(net, mesh)
    if wires:
        set_parallel_context(holding.net, TensorContextParallel(wires.get("tensor"), wires.get("context")))
    return replace(holding, context=wires.get("context"))


def check_partition(spec: ModelSpec, parallelism: Parallelism) -> None:
    """Refuse a model that cannot be divided so, before anything is built."""
    if min(parallelism.data, parallelism.context, parallelism.shards) > 1:
        raise SpecError(f"{parallelism}: FSDP2 shares slices with ranks of one more way; leave out data= or context=")
    if parallelism.context > 1:
        check_context_parallel(spec)
    if parallelism.tensor > 1:
        partition_model(spec, parallelism.tensor)


def _shard_parameters(net: Transformer, mesh: ProcessMesh) -> ShardedModel:
    """With whom work is shared is not asked here."""
    if mesh.spread.shards > 1:
        from .fsdp import apply_fsdp

        return apply_fsdp(net, mesh)
    learned = _trainable_params(net)
    return ShardedModel(
        BatchForward(net), mesh, learned, GradientBuckets(learned.values(), get_gradient_group(mesh)), net.spec
    )


def get_gradient_group(mesh: ProcessMesh) -> dist.ProcessGroup | None:
    """Those that work on something else each, so that gradients are summed over them; None for one alone."""
    return mesh.group(*GRADIENT_DIMS) if mesh.num_workers > 1 else None


def _trainable_params(net: Transformer) -> dict[str, nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}
