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
from .collectives import Wire
from .head_partition import copied, holders, portions
from .parallel_attention import Ranks, set_peers
from .sharded_model import Holding, Lying

NOTHING: Mapping[str, Lying] = MappingProxyType({})


class Divided:
    """How the ranks of a wire hold a model between them: this one's portion, and what others hold of it besides.

    What several of them hold, keys that heads of both read, say, gets a part of its gradient from each: `settle` adds
    them up, and must be called between the last gradient and whatever reads it. All of them call every method, in
    the same order.
    """

    def __init__(self, described: ModelSpec, wire: Wire) -> None:
        self.wire, self.described, every = wire, described, portions(described, wire.size)
        self.own = every[wire.rank].described
        self.pieces = {name: [portion.pieces[name] for portion in every] for name in every[0].pieces}
        self.copied = copied(described, every)
        for name, pieces in self.pieces.items():
            if not bool(holders(pieces).all()):
                said = f"{name} ({pieces[0].layout}) joins heads of several ranks"
                raise SpecError(f"{said}; use data= or context= in the place of tensor=")

    def portion(self, net: Transformer) -> Transformer:
        """This rank's portion of a model that all have built alike; its parameters are new tensors."""
        with torch.device("meta"):
            part = build(self.own, dropout=net.dropout)
        held = {name: self.part(name, tensor.detach()) for name, tensor in net.state_dict().items()}
        part.load_state_dict(held, assign=True)
        for name, tensor in net.named_parameters():
            part.get_parameter(name).requires_grad_(tensor.requires_grad)
        part.checkpointing = net.checkpointing
        set_peers(part, Ranks(tensor=self.wire))
        return part.train(net.training)

    def settle(self, own: Mapping[str, nn.Parameter], slices: Mapping[str, Lying] = NOTHING) -> None:
        """Give every number that several ranks hold the sum of what they found as its gradient.

        Of those in `slices` a rank holds no more than a slice of its piece.
        """
        held = {name: own[name] for name in self.copied if name in own}
        for dtype in dict.fromkeys(p.dtype for p in held.values()):
            some = {name: p for name, p in held.items() if p.dtype == dtype}
            found = [self._alone(name, p, slices) for name, p in some.items()]
            total = self.wire.total(torch.cat([whole.flatten() for whole in found]))
            parts = total.split([whole.numel() for whole in found])
            for (name, p), part in zip(some.items(), parts, strict=True):
                grad = self.pieces[name][self.wire.rank].of(part)
                p.grad = slices[name].part(grad) if name in slices else grad

    def _alone(self, name: str, p: Tensor, slices: Mapping[str, Lying]) -> Tensor:
        """The gradient of a whole tensor as far as this rank found it."""
        piece = self.pieces[name][self.wire.rank]
        whole = p.new_zeros(piece.layout.shape(piece.sizes))
        grad = slices[name].whole(torch.zeros_like(p) if p.grad is None else p.grad) if name in slices else p.grad
        if grad is not None:
            piece.put(grad, whole)
        return whole

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of something with the shape of a tensor of the model."""
        return self.pieces[name][self.wire.rank].of(whole)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """All pieces put together, to the bit; every rank must ask."""
        pieces = self.pieces[name]
        found = part.new_empty(pieces[0].layout.shape(pieces[0].sizes))
        sizes = [math.prod(piece.shape) for piece in pieces]
        flat = part.new_zeros(max(sizes))
        flat[: part.numel()] = part.flatten()
        for piece, size, held in zip(pieces, sizes, self.wire.beside(flat), strict=True):
            piece.put(held[:size], found)
        return found

    def held(self, name: str) -> Tensor:
        """How many ranks hold each number of this rank's piece of a tensor."""
        piece = self.pieces[name][self.wire.rank]
        return self.copied[name][piece.cut_places].expand(piece.opened).reshape(piece.shape)

    def holding(self, inner: Holding) -> Holding:
        """What a rank holds of its portion, as what it holds of the whole."""
        names = [name for name, pieces in self.pieces.items() if pieces[0].kept]
        slices = inner.lying

        def fetch() -> None:
            inner.fetch()
            self.settle(inner.own, slices)

        lying = {name: Pieces(self, name, slices.get(name)) for name in names}
        return replace(inner, described=self.described, lying={**slices, **lying}, fetch=fetch)


class Pieces:
    """How a tensor lies over the ranks that divide a model's heads, and over those that divide these pieces."""

    def __init__(self, divided: Divided, name: str, inner: Lying | None) -> None:
        self.divided, self.name, self.inner = divided, name, inner
        self.ways = ("tensor", *(inner.ways if inner else ()))
        held = divided.held(name) if name in divided.copied else torch.ones(())
        self._held = inner.part(held) if inner and held.dim() else held

    def part(self, whole: Tensor) -> Tensor:
        """What this rank holds of the whole."""
        piece = self.divided.part(self.name, whole)
        return self.inner.part(piece) if self.inner else piece

    def whole(self, part: Tensor) -> Tensor:
        """All parts put together; every rank must ask."""
        return self.divided.whole(self.name, self.inner.whole(part) if self.inner else part)

    def square(self, part: Tensor) -> Tensor:
        """The sum of its squares, each number shared by as many ranks as hold it."""
        return (part.square() / self._held.to(part.device)).sum()
