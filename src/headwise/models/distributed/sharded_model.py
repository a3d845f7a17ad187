"""The part of a model that one rank holds, how it is gathered, loaded and clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import Transformer, build
from ..batch import Batch
from ..model_spec import ModelSpec
from .collectives import CollectiveGroup, GradientBuckets
from .parallel_attention import shard_tokens
from .parallelism import Parallelism, ProcessInfo
from .ranks import BatchShard, ProcessMesh


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


class TensorSharding(Protocol):
    """How one tensor is divided among ranks."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Parallel dimensions over which the tensor is divided."""
        ...

    def part(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        ...

    def whole(self, part: Tensor) -> Tensor:
        """Gather the full tensor from the parts of all ranks; a collective call."""
        ...

    def square(self, part: Tensor) -> Tensor:
        """Return the sum of squares of a part, each element divided by the number of ranks that
        hold it.
        """
        ...


def _collect_nothing() -> None:
    """Do nothing: the gradients are in `own` already."""


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
    shardings: Mapping[str, TensorSharding] = field(default_factory=dict[str, "TensorSharding"])
    collect_gradients: Callable[[], None] = _collect_nothing
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
        return (
            rows
            if self.context is None
            else rows._replace(batch=shard_tokens(rows.batch, self.context))
        )

    # --- gradients ---

    def begin_final_backward(self) -> None:
        """Announce that the next backward pass is the last one of this step, so that gradients can
        be sent early.
        """
        self.buckets.begin_final_backward()

    def finish(self) -> None:
        """Finish summing the gradients over the ranks and move them to `own`."""
        self.buckets.finish()
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
                total += (
                    sharding.square(grad) if sharding else grad.square().sum()
                ) / self._num_replicas(name)
        dist.all_reduce(total)
        exact = torch.promote_types(torch.float32, next(iter(self.own.values())).dtype)
        return total.sqrt().to(exact)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradient, whose norm is `norm`, down to at most `max_norm`."""
        nn.utils.clip_grads_with_norm_(self.own.values(), max_norm, norm)

    def _num_replicas(self, name: str) -> int:
        """Return the number of ranks that hold the same part of a tensor."""
        parts = 1
        for dim in self.shardings[name].dims if name in self.shardings else ():
            parts *= getattr(self.world.parallelism, dim)
        return self.world.size // parts

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
