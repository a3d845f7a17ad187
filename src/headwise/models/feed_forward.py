"""Activations by the names that blueprints use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SpecError, suggest
from ..kernels import small_batch_ops
from ..model_spec import ExpertsSpec, FeedForwardSpec, NormSpec, WeightSpec
from ..nn.parallel_context import HasParallelContext
from ..ops.dropout import dropout
from ..ops.linear import linear, linear_many
from .initialisation import usual

Act = Callable[[Tensor], Tensor]
Maps = Callable[[str], Tensor]  # what one of the maps before the last, "up" or "gate", makes of the input

ACTIVATIONS: dict[str, Act] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "linear": lambda x: x,
}
BOUNDED = re.compile(r"bounded_silu\(([-+.\w]+), ([-+.\w]+)\)")


def activation(name: str) -> Act:
    """The function of this name.

    >>> activation("relu2")(torch.tensor([-3.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if name not in ACTIVATIONS:
        raise SpecError(f"there is no activation {name!r}; {suggest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def joined(described: FeedForwardSpec) -> Callable[[Maps], Tensor]:
    """What a feed-forward makes of its first maps, before the last: act(up), or act(gate) up.

    "bounded_silu(gain, limit)" bounds both first: g sigmoid(gain g) (u + 1), g <= limit, |u| <= limit (2508.10925).
    """
    if bounded := BOUNDED.fullmatch(described.activation):
        if described.form != "gated":
            raise SpecError(f"{described.activation} bounds a gate too; give Dense(form='gated')")
        return _bounded(*(float(number) for number in bounded.groups()))
    act = activation(described.activation)
    if described.form == "gated":
        if described.activation == "silu":
            return _swish
        return lambda maps: act(maps("gate")) * maps("up")
    return lambda maps: act(maps("up"))


def _swish(maps: Maps) -> Tensor:
    gate, up = maps("gate"), maps("up")
    return (
        small_batch_ops.silu_and_multiply(gate, up).view(up.shape)
        if small_batch_ops.is_small_batch(gate, up)
        else F.silu(gate) * up
    )


def _bounded(gain: float, limit: float) -> Callable[[Maps], Tensor]:
    def join(maps: Maps) -> Tensor:
        gate, up = maps("gate").clamp(max=limit), maps("up").clamp(-limit, limit)
        return gate * torch.sigmoid(gain * gate) * (up + 1)

    return join


# SECTION: Norms and feed-forwards, made of what a blueprint says of them.


class Declared(nn.Module):
    """What holds the tensors that a description declares, under their names."""

    def declare(self, weights: Iterable[WeightSpec]) -> None:
        """Make those that stand here, and none further inside."""
        for weight in weights:
            if "." in weight.name:
                continue
            if weight.trainable:
                self.register_parameter(weight.name, nn.Parameter(usual(weight)))
            else:
                self.register_buffer(weight.name, usual(weight))

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x through the matrix of this name, with its bias if it has one."""
        return linear(x, getattr(self, name), self.maybe(f"{name}_bias"))

    def maybe(self, name: str) -> Tensor | None:
        """The tensor of this name, if there is one."""
        return self._parameters[name] if name in self._parameters else self._buffers.get(name)


class Normed(Declared):
    """x normalised over its channels, in at least single precision.

    >>> Normed(NormSpec("rms"), 2)(torch.tensor([1.0, 7.0])).tolist()  # a root mean square of 5
    [0.199..., 1.399...]
    """

    def __init__(self, described: NormSpec, model: int) -> None:
        super().__init__()
        self.kind, self.eps, self.shape = described.kind, described.eps, (model,)
        self.declare(described.weights(model))
        if (weight := self.maybe("weight")) is not None:
            with torch.no_grad():
                weight.fill_(0.0 if self.kind == "offset" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.kind in ("layer", "unbiased", "bare"):
            return F.layer_norm(x, self.shape, self.maybe("weight"), self.maybe("bias"), self.eps)
        weight = cast(Tensor, self.weight)
        if small_batch_ops.is_small_batch(x, weight):
            return small_batch_ops.rms_norm(x, weight, self.eps, 1.0 if self.kind == "offset" else 0.0)
        return F.rms_norm(x, self.shape, weight + 1 if self.kind == "offset" else weight, self.eps)

    def extra_repr(self) -> str:
        """As `print(net)` shows it."""
        return f"{self.kind!r}, {self.shape[0]}, eps={self.eps}"


class Feed(HasParallelContext, Declared):
    """y = W_down act(W_up x), or with a gate; what is inside may be dropped in training.

    >>> Feed(FeedForwardSpec(12, form="gated"), 3)(torch.zeros(2, 5, 3)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, described: FeedForwardSpec, model: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.join, self.dropout = joined(described), dropout
        self.declare(described.weights(model))
        bare = described.form == "gated" and not set("gu") & set(described.bias)
        self._both = ("gate", "up") if bare else ()  # what x meets in one go

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = self.parallel.copy_to_heads(x)
        told = linear_many(x, [cast(Tensor, self.maybe(name)) for name in self._both]) if self._both else ()
        both = dict(zip(self._both, told, strict=True))
        inner = self.join(lambda name: both[name] if name in both else self.linear(x, name))
        with self.parallel.head_local_rng(self.training):
            inner = dropout(inner, self.dropout, self.training)
        bias = self.maybe("down_bias") if self.parallel.adds_output_bias else None  # it is added once
        return self.parallel.reduce_from_heads(linear(inner, cast(Tensor, self.down), bias))


class Each(HasParallelContext, Declared):
    """As many feed-forwards as there are experts, held side by side."""

    def __init__(self, described: FeedForwardSpec, model: int, count: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.join, self.dropout = joined(described), dropout
        self.declare(described.weights(model, count))

    def forward(self, x: Tensor, chosen: int | slice = slice(None)) -> Tensor:
        """[tokens, model] through one expert; through all of them, [expert, tokens, model]."""

        def through(x: Tensor, name: str) -> Tensor:
            bias = self.maybe(f"{name}_bias") if name != "down" or self.parallel.adds_output_bias else None
            y = torch.matmul(x, getattr(self, name)[chosen].mT)
            return y if bias is None else y + bias[chosen].unsqueeze(-2)

        inner = self.join(lambda name: through(x, name))
        with self.parallel.head_local_rng(self.training):
            inner = dropout(inner, self.dropout, self.training)
        return through(inner, "down")


class Mixture(HasParallelContext, Declared):
    """`active` of `count` feed-forwards for each token, added up by their scores, and one shared by all.

    Tokens are sorted by expert, and each expert meets only its own; a compiled graph, whose shapes may not depend on
    the scores, runs all experts on all tokens.
    """

    def __init__(self, described: ExpertsSpec, model: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.described = described
        self.declare(described.weights(model))
        self.each = Each(described.each, model, described.count, dropout)
        self.shared = Feed(described.shared, model, dropout) if described.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        flat = self.parallel.copy_to_heads(x).flatten(0, -2)
        share, chosen = self.routed(flat)
        run = self._all if torch.compiler.is_compiling() else self._sorted
        y = self.parallel.reduce_from_heads(run(flat, share.to(x.dtype), chosen).view(x.shape))
        return y if self.shared is None else y + self.shared(x)

    def routed(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The share of each chosen expert and which ones they are, both [tokens, active]."""
        told, exact = self.described, torch.promote_types(flat.dtype, torch.float32)
        bias = cast("Tensor | None", self.maybe("router_bias"))
        learned = bias.to(exact) if bias is not None and told.bias == "learned" else None
        logits = F.linear(flat.to(exact), cast(Tensor, self.router).to(exact), learned)
        score = SCORES[told.scores](logits)
        wanted = score if bias is None or learned is not None else score + bias
        chosen = wanted.topk(told.active, dim=-1).indices
        share = score.gather(-1, chosen)
        if told.scores == "chosen":
            share = share.softmax(-1)
        elif told.scores == "sigmoid":
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return share * told.scale, chosen

    def _sorted(self, flat: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.described.count).tolist()
        rows = flat[order // chosen.shape[-1]].split(counts)
        out = torch.cat([self.each(some, expert) for expert, some in enumerate(rows) if len(some)] or [flat])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (out[back].view(*chosen.shape, -1) * share[..., None]).sum(-2)

    def _all(self, flat: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        every = flat.new_zeros(len(flat), self.described.count).scatter(-1, chosen, share)
        return torch.einsum("ne,end->nd", every, self.each(flat))


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "chosen": lambda logits: logits,
    "sigmoid": torch.sigmoid,
}
