"""Activations, norms, feed-forwards and mixtures of experts, built from their specs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.interfaces.core_types import HasParallelContext
from ..attention.parts.initialisers import (
    normal_with_std,
    uniform_within,
    xavier_uniform_bound,
    zeros_init,
)
from ..kernels.counter_rng import dropout
from ..kernels.linear import linear, linear_many
from ..util.errors import SpecError, suggest
from .model_spec import ExpertsSpec, FeedForwardSpec, NormSpec, WeightSpec

# first axes of tables, which hold one vector per index
TABLE_AXES = ("token", "position", "type", "first")


def initialise_weight(weight: WeightSpec) -> Tensor:
    """Return the initial tensor: zeros for biases, N(0, 1/width) for tables, Xavier-uniform for
    each matrix.

    The matrices of experts are initialised one expert at a time, so that the first axis does not
    change the bound.

    >>> from headwise.models.model_spec import FeedForwardSpec
    >>> up, down = FeedForwardSpec(2).weights(4)
    >>> (
    ...     bool(initialise_weight(up).abs().max() <= 1),
    ...     initialise_weight(up).shape,
    ... )  # sqrt(6 / (2 + 4))
    (True, torch.Size([2, 4]))
    """
    shape = weight.shape
    axes = weight.layout.axes
    if weight.name.endswith("bias"):
        return zeros_init(shape)
    if axes[0] in TABLE_AXES:
        return normal_with_std(shape[-1] ** -0.5)(shape)
    matrix_shape = shape[1:] if axes[0] == "expert" and len(axes) == 3 else shape
    bound = xavier_uniform_bound((matrix_shape[0], math.prod(matrix_shape[1:])))
    return uniform_within(bound, shape)


ActivationFunction = Callable[[Tensor], Tensor]
ProjectionLookup = Callable[[str], Tensor]  # the projection of the input by name, "up" or "gate"


# Functions of the module, which other processes can import, as pickle needs.
def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _linear(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, ActivationFunction] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": _relu2,
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "quick_gelu": _quick_gelu,
    "linear": _linear,
}
BOUNDED_SILU_PATTERN = re.compile(r"bounded_silu\(([-+.\w]+), ([-+.\w]+)\)")


def get_activation(name: str) -> ActivationFunction:
    """Return the activation function of this name.

    >>> get_activation("relu2")(torch.tensor([-3.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if name not in ACTIVATIONS:
        raise SpecError(f"there is no activation {name!r}; {suggest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def make_hidden_activation(spec: FeedForwardSpec) -> Callable[[ProjectionLookup], Tensor]:
    """Return the function from projections to hidden channels: act(up), or act(gate) * up if gated.

    "bounded_silu(gain, limit)" clamps first, g <= limit and |u| <= limit: g sigmoid(gain g) (u + 1)
    (2508.10925).
    """
    if bounded := BOUNDED_SILU_PATTERN.fullmatch(spec.activation):
        if spec.form != "gated":
            raise SpecError(f"{spec.activation} needs a gate; give FeedForwardSpec(form='gated')")
        return partial(_bounded_silu_glu, *(float(number) for number in bounded.groups()))
    act = get_activation(spec.activation)
    if spec.form == "gated":
        if spec.activation == "silu":
            return _swiglu
        return partial(_gated, act)
    return partial(_ungated, act)


def _ungated(act: ActivationFunction, project: ProjectionLookup) -> Tensor:
    return act(project("up"))


def _gated(act: ActivationFunction, project: ProjectionLookup) -> Tensor:
    return act(project("gate")) * project("up")


def _swiglu(project: ProjectionLookup) -> Tensor:
    gate = project("gate")
    up = project("up")
    return F.silu(gate) * up


def _bounded_silu_glu(gain: float, limit: float, project: ProjectionLookup) -> Tensor:
    gate = project("gate").clamp(max=limit)
    up = project("up").clamp(-limit, limit)
    return gate * torch.sigmoid(gain * gate) * (up + 1)


# --- Norms and feed-forwards ----------------------------------------------------------------------


class SpecModule(nn.Module):
    """Base class of modules that hold the tensors that their spec declares,
    under the same names.
    """

    def register_weights(self, weights: Iterable[WeightSpec]) -> None:
        """Register and initialise the weights of this module, except submodules' (names with a
        dot).
        """
        for weight in weights:
            if "." in weight.name:
                continue
            if weight.trainable:
                self.register_parameter(weight.name, nn.Parameter(initialise_weight(weight)))
            else:
                self.register_buffer(weight.name, initialise_weight(weight))

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Apply the matrix of this name to x, and its bias if it has one."""
        return linear(x, getattr(self, name), self.get_weight(f"{name}_bias"))

    def get_weight(self, name: str) -> Tensor | None:
        """Return the parameter or buffer of this name; None if there is none."""
        return self._parameters[name] if name in self._parameters else self._buffers.get(name)


class NormLayer(SpecModule):
    """Layer norm or RMS norm over channels, computed in at least single precision.

    >>> NormLayer(NormSpec("rms"), 2)(
    ...     torch.tensor([1.0, 7.0])
    ... ).tolist()  # the root mean square is 5
    [0.199..., 1.399...]
    """

    def __init__(self, spec: NormSpec, width: int) -> None:
        super().__init__()
        self.kind = spec.kind
        self.eps = spec.eps
        self.shape = (width,)
        self.register_weights(spec.weights(width))
        weight = self.get_weight("weight")
        if weight is not None:
            with torch.no_grad():
                weight.fill_(0.0 if self.kind == "rms_unit_offset" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dimension."""
        if self.kind in ("layer", "layer_no_bias", "layer_no_affine"):
            return F.layer_norm(
                x, self.shape, self.get_weight("weight"), self.get_weight("bias"), self.eps
            )
        weight = cast(Tensor, self.weight)
        return F.rms_norm(
            x, self.shape, weight + 1 if self.kind == "rms_unit_offset" else weight, self.eps
        )

    def extra_repr(self) -> str:
        """Return the arguments that `print(net)` shows."""
        return f"{self.kind!r}, {self.shape[0]}, eps={self.eps}"


class FeedForward(HasParallelContext, SpecModule):
    """y = W_down act(W_up x), or W_down (act(W_gate x) * W_up x); dropout applies to the hidden
    channels.

    >>> FeedForward(FeedForwardSpec(12, form="gated"), 3)(torch.zeros(2, 5, 3)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, spec: FeedForwardSpec, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.join = make_hidden_activation(spec)
        self.dropout = dropout
        self.register_weights(spec.weights(width))
        bias_free = spec.form == "gated" and not set("gu") & set(spec.bias)
        self._fused_names = ("gate", "up") if bias_free else ()  # projections computed in one call

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, in the shape of `x`: [..., model]."""
        x = self.parallel.copy_to_heads(x)
        fused = ()
        if self._fused_names:
            fused = linear_many(
                x, [cast(Tensor, self.get_weight(name)) for name in self._fused_names]
            )
        projections = dict(zip(self._fused_names, fused, strict=True))
        hidden = self.join(
            lambda name: projections[name] if name in projections else self.linear(x, name)
        )
        with self.parallel.head_local_rng(self.training):
            hidden = dropout(hidden, self.dropout, self.training)
        # by one rank only
        bias = self.get_weight("down_bias") if self.parallel.adds_output_bias else None
        return self.parallel.reduce_from_heads(linear(hidden, cast(Tensor, self.down), bias))


class ExpertFeedForwards(HasParallelContext, SpecModule):
    """The feed-forwards of all experts, with weights stacked along the first axis."""

    def __init__(
        self, spec: FeedForwardSpec, width: int, num_experts: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.join = make_hidden_activation(spec)
        self.dropout = dropout
        self.register_weights(spec.weights(width, num_experts))

    def forward(self, x: Tensor, expert: int | slice = slice(None)) -> Tensor:
        """Apply one expert to x [tokens, model]; by default all experts, which returns [expert,
        tokens, model].
        """

        def project(x: Tensor, name: str) -> Tensor:
            bias = None
            if name != "down" or self.parallel.adds_output_bias:
                bias = self.get_weight(f"{name}_bias")
            y = torch.matmul(x, getattr(self, name)[expert].mT)
            return y if bias is None else y + bias[expert].unsqueeze(-2)

        hidden = self.join(lambda name: project(x, name))
        with self.parallel.head_local_rng(self.training):
            hidden = dropout(hidden, self.dropout, self.training)
        return project(hidden, "down")


class MixtureOfExperts(HasParallelContext, SpecModule):
    """Sum of the `active` highest-scored of `count` experts per token, weighted by the router, plus
    a shared one.

    Tokens are sorted by expert, and each expert processes only its own tokens. Under torch.compile,
    where shapes cannot depend on the router's choice, every expert processes all tokens.
    """

    def __init__(self, spec: ExpertsSpec, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        self.register_weights(spec.weights(width))
        self.expert = ExpertFeedForwards(spec.expert, width, spec.count, dropout)
        self.shared = FeedForward(spec.shared, width, dropout) if spec.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, in the shape of `x`: [..., model]."""
        flat = self.parallel.copy_to_heads(x).flatten(0, -2)
        share, chosen = self.route(flat)
        run = self._run_all_experts if torch.compiler.is_compiling() else self._run_chosen_experts
        y = self.parallel.reduce_from_heads(run(flat, share.to(x.dtype), chosen).view(x.shape))
        return y if self.shared is None else y + self.shared(x)

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of the chosen experts, both [tokens, active]."""
        spec = self.spec
        dtype = torch.promote_types(flat.dtype, torch.float32)
        bias = cast("Tensor | None", self.get_weight("router_bias"))
        learned = bias.to(dtype) if bias is not None and spec.bias == "learned" else None
        logits = F.linear(flat.to(dtype), cast(Tensor, self.router).to(dtype), learned)
        score = ROUTER_SCORES[spec.scores](logits)
        ranking = score if bias is None or learned is not None else score + bias
        if spec.top_k_groups < spec.groups:
            ranking = _keep_best_groups(ranking, spec)
        chosen = ranking.topk(spec.top_k, dim=-1).indices
        share = score.gather(-1, chosen)
        if spec.scores == "softmax_of_top_k":
            share = share.softmax(-1)
        elif spec.scores == "sigmoid":
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return share * spec.scale, chosen

    def _run_chosen_experts(self, flat: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.spec.count).tolist()
        rows = flat[order // chosen.shape[-1]].split(counts)
        out = torch.cat(
            [self.expert(tokens, expert) for expert, tokens in enumerate(rows) if len(tokens)]
            or [flat]
        )
        inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        return (out[inverse].view(*chosen.shape, -1) * share[..., None]).sum(-2)

    def _run_all_experts(self, flat: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        weights = flat.new_zeros(len(flat), self.spec.count).scatter(-1, chosen, share)
        return torch.einsum("ne,end->nd", weights, self.expert(flat))


def _keep_best_groups(ranking: Tensor, spec: ExpertsSpec) -> Tensor:
    """Return the ranking [tokens, expert] with -inf for experts outside each
    token's best groups.
    """
    grouped = ranking.unflatten(-1, (spec.groups, -1))
    best_scores = grouped.topk(2 if spec.group_score == "top2" else 1, dim=-1).values
    best_groups = best_scores.sum(-1).topk(spec.top_k_groups, dim=-1).indices
    is_excluded = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=ranking.device)
    is_excluded = is_excluded.scatter(-1, best_groups, False)
    return grouped.masked_fill(is_excluded.unsqueeze(-1), -torch.inf).flatten(-2)


ROUTER_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "softmax_of_top_k": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "sigmoid_sum": torch.sigmoid,
}
