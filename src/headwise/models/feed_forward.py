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
from .initialisation import initialise_weight

ActivationFunction = Callable[[Tensor], Tensor]
ProjectionLookup = Callable[[str], Tensor]  # what one of the maps before the last, "up" or "gate", makes of the input

ACTIVATIONS: dict[str, ActivationFunction] = {
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
BOUNDED_SILU_PATTERN = re.compile(r"bounded_silu\(([-+.\w]+), ([-+.\w]+)\)")


def get_activation(name: str) -> ActivationFunction:
    """The function of this name.

    >>> get_activation("relu2")(torch.tensor([-3.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if name not in ACTIVATIONS:
        raise SpecError(f"there is no activation {name!r}; {suggest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def make_hidden_activation(spec: FeedForwardSpec) -> Callable[[ProjectionLookup], Tensor]:
    """What a feed-forward makes of its first maps, before the last: act(up), or act(gate) up.

    "bounded_silu(gain, limit)" bounds both first: g sigmoid(gain g) (u + 1), g <= limit, |u| <= limit (2508.10925).
    """
    if bounded := BOUNDED_SILU_PATTERN.fullmatch(spec.activation):
        if spec.form != "gated":
            raise SpecError(f"{spec.activation} bounds a gate too; give Dense(form='gated')")
        return _bounded_silu_glu(*(float(number) for number in bounded.groups()))
    act = get_activation(spec.activation)
    if spec.form == "gated":
        if spec.activation == "silu":
            return _swiglu
        return lambda maps: act(maps("gate")) * maps("up")
    return lambda maps: act(maps("up"))


def _swiglu(maps: ProjectionLookup) -> Tensor:
    gate, up = maps("gate"), maps("up")
    return (
        small_batch_ops.silu_and_multiply(gate, up).view(up.shape)
        if small_batch_ops.is_small_batch(gate, up)
        else F.silu(gate) * up
    )


def _bounded_silu_glu(gain: float, limit: float) -> Callable[[ProjectionLookup], Tensor]:
    def join(maps: ProjectionLookup) -> Tensor:
        gate, up = maps("gate").clamp(max=limit), maps("up").clamp(-limit, limit)
        return gate * torch.sigmoid(gain * gate) * (up + 1)

    return join


# --- Norms and feed-forwards, made of what a blueprint says of them ------------------------------------


class SpecModule(nn.Module):
    """What holds the tensors that a description declares, under their names."""

    def register_weights(self, weights: Iterable[WeightSpec]) -> None:
        """Make those that stand here, and none further inside."""
        for weight in weights:
            if "." in weight.name:
                continue
            if weight.trainable:
                self.register_parameter(weight.name, nn.Parameter(initialise_weight(weight)))
            else:
                self.register_buffer(weight.name, initialise_weight(weight))

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x through the matrix of this name, with its bias if it has one."""
        return linear(x, getattr(self, name), self.get_weight(f"{name}_bias"))

    def get_weight(self, name: str) -> Tensor | None:
        """The tensor of this name, if there is one."""
        return self._parameters[name] if name in self._parameters else self._buffers.get(name)


class NormLayer(SpecModule):
    """x normalised over its channels, in at least single precision.

    >>> NormLayer(NormSpec("rms"), 2)(torch.tensor([1.0, 7.0])).tolist()  # a root mean square of 5
    [0.199..., 1.399...]
    """

    def __init__(self, spec: NormSpec, width: int) -> None:
        super().__init__()
        self.kind, self.eps, self.shape = spec.kind, spec.eps, (width,)
        self.register_weights(spec.weights(width))
        if (weight := self.get_weight("weight")) is not None:
            with torch.no_grad():
                weight.fill_(0.0 if self.kind == "offset" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.kind in ("layer", "unbiased", "bare"):
            return F.layer_norm(x, self.shape, self.get_weight("weight"), self.get_weight("bias"), self.eps)
        weight = cast(Tensor, self.weight)
        if small_batch_ops.is_small_batch(x, weight):
            return small_batch_ops.rms_norm(x, weight, self.eps, 1.0 if self.kind == "offset" else 0.0)
        return F.rms_norm(x, self.shape, weight + 1 if self.kind == "offset" else weight, self.eps)

    def extra_repr(self) -> str:
        """As `print(net)` shows it."""
        return f"{self.kind!r}, {self.shape[0]}, eps={self.eps}"


class FeedForward(HasParallelContext, SpecModule):
    """y = W_down act(W_up x), or with a gate; what is inside may be dropped in training.

    >>> FeedForward(FeedForwardSpec(12, form="gated"), 3)(torch.zeros(2, 5, 3)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, spec: FeedForwardSpec, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.join, self.dropout = make_hidden_activation(spec), dropout
        self.register_weights(spec.weights(width))
        bare = spec.form == "gated" and not set("gu") & set(spec.bias)
        self._fused_names = ("gate", "up") if bare else ()  # what x meets in one go

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = self.parallel.copy_to_heads(x)
        told = (
            linear_many(x, [cast(Tensor, self.get_weight(name)) for name in self._fused_names])
            if self._fused_names
            else ()
        )
        both = dict(zip(self._fused_names, told, strict=True))
        inner = self.join(lambda name: both[name] if name in both else self.linear(x, name))
        with self.parallel.head_local_rng(self.training):
            inner = dropout(inner, self.dropout, self.training)
        bias = self.get_weight("down_bias") if self.parallel.adds_output_bias else None  # it is added once
        return self.parallel.reduce_from_heads(linear(inner, cast(Tensor, self.down), bias))


class ExpertFeedForwards(HasParallelContext, SpecModule):
    """As many feed-forwards as there are experts, held side by side."""

    def __init__(self, spec: FeedForwardSpec, width: int, num_experts: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.join, self.dropout = make_hidden_activation(spec), dropout
        self.register_weights(spec.weights(width, num_experts))

    def forward(self, x: Tensor, expert: int | slice = slice(None)) -> Tensor:
        """[tokens, model] through one expert; through all of them, [expert, tokens, model]."""

        def through(x: Tensor, name: str) -> Tensor:
            bias = self.get_weight(f"{name}_bias") if name != "down" or self.parallel.adds_output_bias else None
            y = torch.matmul(x, getattr(self, name)[expert].mT)
            return y if bias is None else y + bias[expert].unsqueeze(-2)

        inner = self.join(lambda name: through(x, name))
        with self.parallel.head_local_rng(self.training):
            inner = dropout(inner, self.dropout, self.training)
        return through(inner, "down")


class MixtureOfExperts(HasParallelContext, SpecModule):
    """`active` of `count` feed-forwards for each token, added up by their scores, and one shared by all.

    Tokens are sorted by expert, and each expert meets only its own; a compiled graph, whose shapes may not depend on
    the scores, runs all experts on all tokens.
    """

    def __init__(self, spec: ExpertsSpec, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        self.register_weights(spec.weights(width))
        self.each = ExpertFeedForwards(spec.each, width, spec.count, dropout)
        self.shared = FeedForward(spec.shared, width, dropout) if spec.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        flat = self.parallel.copy_to_heads(x).flatten(0, -2)
        share, chosen = self.route(flat)
        run = self._run_all_experts if torch.compiler.is_compiling() else self._run_chosen_experts
        y = self.parallel.reduce_from_heads(run(flat, share.to(x.dtype), chosen).view(x.shape))
        return y if self.shared is None else y + self.shared(x)

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The share of each chosen expert and which ones they are, both [tokens, active]."""
        told, exact = self.spec, torch.promote_types(flat.dtype, torch.float32)
        bias = cast("Tensor | None", self.get_weight("router_bias"))
        learned = bias.to(exact) if bias is not None and told.bias == "learned" else None
        logits = F.linear(flat.to(exact), cast(Tensor, self.router).to(exact), learned)
        score = ROUTER_SCORES[told.scores](logits)
        wanted = score if bias is None or learned is not None else score + bias
        chosen = wanted.topk(told.active, dim=-1).indices
        share = score.gather(-1, chosen)
        if told.scores == "chosen":
            share = share.softmax(-1)
        elif told.scores == "sigmoid":
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return share * told.scale, chosen

    def _run_chosen_experts(self, flat: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.spec.count).tolist()
        rows = flat[order // chosen.shape[-1]].split(counts)
        out = torch.cat([self.each(some, expert) for expert, some in enumerate(rows) if len(some)] or [flat])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (out[back].view(*chosen.shape, -1) * share[..., None]).sum(-2)

    def _run_all_experts(self, flat: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        every = flat.new_zeros(len(flat), self.spec.count).scatter(-1, chosen, share)
        return torch.einsum("ne,end->nd", every, self.each(flat))


ROUTER_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "chosen": lambda logits: logits,
    "sigmoid": torch.sigmoid,
}
