"""A model whose heads and feed-forwards are divided among ranks: each has all tokens, and some heads of every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..model_spec import ModelSpec
from ..models import Transformer, build
from .collectives import CollectiveGroup
from .head_partition import count_holders, count_replicas, partition_model
from .parallel_attention import TensorContextParallel, set_parallel_context
from .sharded_model import ShardedModel, TensorSharding

NO_SHARDINGS: Mapping[str, TensorSharding] = MappingProxyType({})


class TensorParallelModel:
    """How the ranks of a wire hold a model between them: this one's portion, and what others hold of it besides.

    What several of them hold, keys that heads of both read, say, gets a part of its gradient from each: `settle` adds
    them up, and must be called between the last gradient and whatever reads it. All of them call every method, in
    the same order.
    """

    def __init__(self, spec: ModelSpec, group: CollectiveGroup) -> None:
        self.group, self.spec, every = group, spec, partition_model(spec, group.size)
        self.own = every[group.rank].spec
        self.pieces = {name: [portion.pieces[name] for portion in every] for name in every[0].pieces}
        self.copied = count_replicas(spec, every)
        for name, pieces in self.pieces.items():
            if not bool(count_holders(pieces).all()):
                said = f"{name} ({pieces[0].layout}) joins heads of several ranks"
                raise SpecError(f"{said}; use data= or context= in the place of tensor=")

    def shard_model(self, net: Transformer) -> Transformer:
        """This rank's portion of a model that all have built alike; its parameters are new tensors."""
        with torch.device("meta"):
            part = build(self.own, dropout=net.dropout)
        held = {name: self.part(name, tensor.detach()) for name, tensor in net.state_dict().items()}
        part.load_state_dict(held, assign=True)
        for name, tensor in net.named_parameters():
            part.get_parameter(name).requires_grad_(tensor.requires_grad)
        part.checkpointing = net.checkpointing
        set_parallel_context(part, TensorContextParallel(tensor_group=self.group))
        return part.train(net.training)

    def sum_replicated_gradients(
        self, local_params: Mapping[str, nn.Parameter], shardings: Mapping[str, TensorSharding] = NO_SHARDINGS
    ) -> None:
        """Give every number that several ranks hold the sum of what they found as its gradient.

        Of those in `slices` a rank holds no more than a slice of its piece.
        """
        held = {name: local_params[name] for name in self.copied if name in local_params}
        for dtype in dict.fromkeys(p.dtype for p in held.values()):
            some = {name: p for name, p in held.items() if p.dtype == dtype}
            found = [self._local_gradient(name, p, shardings) for name, p in some.items()]
            total = self.group.total(torch.cat([whole.flatten() for whole in found]))
            parts = total.split([whole.numel() for whole in found])
            for (name, p), part in zip(some.items(), parts, strict=True):
                grad = self.pieces[name][self.group.rank].of(part)
                p.grad = shardings[name].part(grad) if name in shardings else grad

    def _local_gradient(self, name: str, p: Tensor, slices: Mapping[str, TensorSharding]) -> Tensor:
        """The gradient of a whole tensor as far as this rank found it."""
        piece = self.pieces[name][self.group.rank]
        whole = p.new_zeros(piece.layout.shape(piece.sizes))
        grad = slices[name].whole(torch.zeros_like(p) if p.grad is None else p.grad) if name in slices else p.grad
        if grad is not None:
            piece.put(grad, whole)
        return whole

    def part(self, name: str, full: Tensor) -> Tensor:
        """This rank's piece of something with the shape of a tensor of the model."""
        return self.pieces[name][self.group.rank].of(full)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """All pieces put together, to the bit; every rank must ask."""
        pieces = self.pieces[name]
        found = part.new_empty(pieces[0].layout.shape(pieces[0].sizes))
        sizes = [math.prod(piece.shape) for piece in pieces]
        flat = part.new_zeros(max(sizes))
        flat[: part.numel()] = part.flatten()
        for piece, size, held in zip(pieces, sizes, self.group.beside(flat), strict=True):
            piece.put(held[:size], found)
        return found

    def held(self, name: str) -> Tensor:
        """How many ranks hold each number of this rank's piece of a tensor."""
        piece = self.pieces[name][self.group.rank]
        return self.copied[name][piece.cut_indices].expand(piece.unmerged_shape).reshape(piece.shape)

    def holding(self, inner: ShardedModel) -> ShardedModel:
        """What a rank holds of its portion, as what it holds of the whole."""
        names = [name for name, pieces in self.pieces.items() if pieces[0].kept]
        slices = inner.shardings

        def fetch() -> None:
            inner.collect_gradients()
            self.sum_replicated_gradients(inner.own, slices)

        lying = {name: TensorParallelSharding(self, name, slices.get(name)) for name in names}
        return replace(inner, spec=self.spec, shardings={**slices, **lying}, collect_gradients=fetch)


class TensorParallelSharding:
    """How a tensor lies over the ranks that divide a model's heads, and over those that divide these pieces."""

    def __init__(self, model: TensorParallelModel, name: str, inner: TensorSharding | None) -> None:
        self.model, self.name, self.inner = model, name, inner
        self.dims = ("tensor", *(inner.dims if inner else ()))
        held = model.held(name) if name in model.copied else torch.ones(())
        self._num_holders = inner.part(held) if inner and held.dim() else held

    def part(self, full: Tensor) -> Tensor:
        """What this rank holds of the whole."""
        piece = self.model.part(self.name, full)
        return self.inner.part(piece) if self.inner else piece

    def whole(self, part: Tensor) -> Tensor:
        """All parts put together; every rank must ask."""
        return self.model.whole(self.name, self.inner.whole(part) if self.inner else part)

    def square(self, part: Tensor) -> Tensor:
        """The sum of its squares, each number shared by as many ranks as hold it."""
        return (part.square() / self._num_holders.to(part.device)).sum()
