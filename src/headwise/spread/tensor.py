"""A model whose heads and feed-forwards are divided among ranks: each has all tokens, and some heads of every layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..blueprint import Model
from ..errors import SpecError
from ..models import Transformer, build
from ..peers import Peers
from .portions import holders, portions
from .ranks import set_peers
from .wires import Wire

INSIDE = ("attention", "cross", "feed")  # roles of what is divided; all else every rank does alike


class Divided:
    """How the ranks of a wire hold a model between them: this one's portion, and what others hold of it besides.

    What several of them hold, keys that heads of both read, say, gets a part of its gradient from each: `settle` adds
    them up, and must be called between the last gradient and whatever reads it. All of them call every method, in
    the same order.
    """

    def __init__(self, described: Model, wire: Wire) -> None:
        self.wire, every = wire, portions(described, wire.size)
        self.described = every[wire.rank].described
        self.pieces = {name: [portion.pieces[name] for portion in every] for name in every[0].pieces}
        every_held = {name: holders(pieces) for name, pieces in self.pieces.items()}
        for name, held in every_held.items():
            if not bool(held.all()):
                said = f"{name} ({self.pieces[name][0].layout}) joins heads of several ranks"
                raise SpecError(f"{said}; use data= or context= in the place of tensor=")
        roles = {name: weight.role for name, weight in described.params().items()}
        self._copied = [name for name, held in every_held.items() if roles[name] in INSIDE and int(held.max()) > 1]
        self._held = {name: held[self.pieces[name][wire.rank].cut_places] for name, held in every_held.items()}

    def portion(self, net: Transformer, peers: Peers) -> Transformer:
        """This rank's portion of a model that all have built alike, its parameters new tensors.

        `peers` are those who hold the others, `Ranks(tensor=wire)`.
        """
        with torch.device("meta"):
            part = build(self.described, dropout=net.dropout)
        part.load_state_dict(self.part({name: held.detach() for name, held in net.state_dict().items()}), assign=True)
        part.checkpointing = net.checkpointing
        set_peers(part, peers)
        return part.train(net.training)

    def settle(self, net: nn.Module) -> None:
        """Give every number that several ranks hold the sum of what they found as its gradient."""
        learned = {name: p for name, p in net.named_parameters() if p.requires_grad}
        copied = {name: learned[name] for name in self._copied if name in learned}
        for dtype in dict.fromkeys(p.dtype for p in copied.values()):
            some = {name: p for name, p in copied.items() if p.dtype == dtype}
            wholes = [self._alone(name, p) for name, p in some.items()]
            total = self.wire.total(torch.cat([whole.flatten() for whole in wholes]))
            parts = total.split([whole.numel() for whole in wholes])
            for (name, p), part in zip(some.items(), parts, strict=True):
                p.grad = self.pieces[name][self.wire.rank].of(part)

    def _alone(self, name: str, p: Tensor) -> Tensor:
        """A gradient as a part of that of the whole tensor."""
        piece = self.pieces[name][self.wire.rank]
        whole = p.new_zeros(piece.layout.shape(piece.sizes))
        if p.grad is not None:
            piece.put(p.grad, whole)
        return whole

    def norm(self, net: nn.Module) -> Tensor:
        """The norm of the whole gradient, each number of it once; after `settle`."""
        squares = [
            (p.grad.square().reshape(self.pieces[name][self.wire.rank].opened) / self._held[name].to(p.device)).sum()
            for name, p in net.named_parameters()
            if p.grad is not None
        ]
        return self.wire.total(torch.stack(squares).sum()).sqrt()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the whole model from what all hold, by name; words may stand before a name: "exp_avg NAME".

        What is no tensor of the model, or of another shape, stays as it is.
        """
        return {key: self._joined(key.rpartition(" ")[2], held) for key, held in tensors.items()}

    def _joined(self, name: str, held: Tensor) -> Tensor:
        pieces = self.pieces.get(name, [])
        if not pieces or not pieces[0].kept or held.shape != pieces[self.wire.rank].shape:
            return held
        whole = held.new_empty(pieces[0].layout.shape(pieces[0].sizes))
        for who, piece in enumerate(pieces):
            piece.put(self.wire.told(held if who == self.wire.rank else held.new_empty(piece.shape), who), whole)
        return whole

    def part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of tensors of the whole model, by names as `whole` gives them."""
        return {key: self._own(key.rpartition(" ")[2], whole) for key, whole in tensors.items()}

    def _own(self, name: str, whole: Tensor) -> Tensor:
        piece = self.pieces[name][self.wire.rank] if name in self.pieces else None
        if piece is None or whole.shape != piece.layout.shape(piece.sizes):
            return whole
        return piece.of(whole)
