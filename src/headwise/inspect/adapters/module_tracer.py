"""Trace the attention that the forward of any module computes, by the torch functions that it calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..hooks import AttentionCall, AttentionInputs, WeightsOnlyCall
from ..site import POSSIBLE, Ability

INSTANCE_FORWARD = Ability(False, "its forward is set on the module itself, which hides that of its class; remove it")


def hook_ability(module: nn.Module) -> Ability:
    """Whether a module can be hooked: calling it must run the forward of its class."""
    return INSTANCE_FORWARD if "forward" in vars(module) else POSSIBLE


# --- Trace attention while a module's own code runs ------------------------------------------------------

SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MAX_OPEN_WEIGHTS = 4  # softmax outputs remembered at once


class TracedAttention(NamedTuple):
    """One traced attention computation: its inputs (`call`) and head outputs.

    `depth` is the number of enclosing modules that were running both when the weights were computed and when the values
    were multiplied. `reason` is set if the computation is not understood.
    """

    call: AttentionCall | None = None
    z_BTHV: Tensor | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    depth: int = 0
    reason: str = ""


@dataclass
class SoftmaxCall:
    """A softmax over a tensor of `num_axes`, the modules running then, and whether its output was applied to values."""

    running_modules: tuple[nn.Module, ...]
    num_axes: int
    has_output: bool = False


class OpenWeights(NamedTuple):
    """The output of a softmax, and the tensor derived from it by dropout (`used`)."""

    used: Tensor
    weights: Tensor
    softmax: SoftmaxCall


TraceCallback = Callable[[TracedAttention], Tensor | None]


class AttentionTracer(TorchFunctionMode):
    """Calls `callback` for each attention computation; a tensor that it returns replaces the head outputs.

    `num_heads` is used to split a joint batch-and-heads axis; 0 if unknown. `running_modules` is the stack of running
    modules, which the caller maintains.
    """

    def __init__(self, callback: TraceCallback, num_heads: int = 0, running_modules: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.callback, self.num_heads, self.running_modules = callback, num_heads, running_modules
        self.open_weights: deque[OpenWeights] = deque(maxlen=MAX_OPEN_WEIGHTS)
        self.softmax_calls: list[SoftmaxCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        handler = TRACED_FUNCTIONS.get(getattr(func, "__name__", ""))
        return result if handler is None else handler(self, args, kwargs, result)

    def on_sdpa(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Fused attention: its arguments are the inputs."""
        arguments = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | dict(kwargs)
        depth = len(self.running_modules)
        if arguments["query"].dim() != 4:
            return self._report(TracedAttention(depth=depth, reason=_flat_batch_reason(arguments["query"])), o)
        _, kv, _, dim = arguments["key"].shape
        return self._report(TracedAttention(inputs_of_sdpa(arguments), o.transpose(1, 2), kv, dim, depth), o)

    def on_softmax(self, args: Any, kwargs: Mapping[str, Any], weights: Tensor) -> Tensor:
        """Remember a possible tensor of weights; it is one if values are multiplied with it later."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if weights.dim() >= 3 and dim in (-1, weights.dim() - 1):
            self.softmax_calls.append(SoftmaxCall(tuple(self.running_modules), weights.dim()))
            self.open_weights.append(OpenWeights(weights, weights, self.softmax_calls[-1]))
        return weights

    def on_dropout(self, args: Any, kwargs: Mapping[str, Any], dropped: Tensor) -> Tensor:
        """Remember dropped-out weights as derived from the weights before."""
        source = args[0] if args else kwargs["input"]
        if entry := self._find_weights(source):
            self.open_weights.append(entry._replace(used=dropped))
        return dropped

    def on_matmul(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Report attention if the first factor is a tensor of weights."""
        first = args[0] if args else kwargs["input"]
        return self._on_product(first, o) if isinstance(first, Tensor) and first.dim() >= 3 else o

    def on_einsum(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Report attention if the equation contracts the last axis of weights with the values."""
        equation, first, *_ = (args[0], *args[1]) if isinstance(args[1], (list, tuple)) else args
        if not isinstance(equation, str) or first.dim() < 3:
            return o
        operands, _, output_axes = equation.replace(" ", "").partition("->")
        weight_axes, _, value_axes = operands.partition(",")
        if (
            output_axes[: len(weight_axes) - 1] == weight_axes[:-1]
            and weight_axes[-1] in value_axes
            and weight_axes[-1] not in output_axes
        ):
            return self._on_product(first, o)
        entry = self._find_weights(first)
        if entry is None:
            return o
        return self._report(
            TracedAttention(
                depth=self._common_depth(entry), reason=f"it applies its weights to values by einsum {equation!r}"
            ),
            o,
        )

    def _on_product(self, first: Tensor, o: Tensor) -> Tensor:
        entry = self._find_weights(first)
        if entry is None:
            return o
        depth = self._common_depth(entry)
        weights = _split_heads(entry.weights, self.num_heads)
        if weights is None:
            return self._report(TracedAttention(depth=depth, reason=_flat_batch_reason(entry.weights)), o)
        z_BHTV = o.reshape(*weights.shape[:3], o.shape[-1])
        return self._report(TracedAttention(WeightsOnlyCall(weights), z_BHTV.transpose(1, 2), depth=depth), o)

    def _common_depth(self, entry: OpenWeights) -> int:
        """Number of enclosing modules that were running when these weights were computed and still are."""
        entry.softmax.has_output = True
        both = zip(entry.softmax.running_modules, self.running_modules, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))

    def _find_weights(self, tensor: Tensor) -> OpenWeights | None:
        """The remembered weights that equal this tensor, if any."""
        return next((entry for entry in reversed(self.open_weights) if _is_same_tensor(entry.used, tensor)), None)

    def _report(self, traced: TracedAttention, o: Tensor) -> Tensor:
        z_BTHV = self.callback(traced)
        return o if z_BTHV is None else z_BTHV.transpose(1, 2).reshape(o.shape)


TRACED_FUNCTIONS: dict[str, Callable[[AttentionTracer, Any, Mapping[str, Any], Tensor], Tensor]] = {
    "scaled_dot_product_attention": AttentionTracer.on_sdpa,
    "softmax": AttentionTracer.on_softmax,
    "dropout": AttentionTracer.on_dropout,
    "matmul": AttentionTracer.on_matmul,
    "__matmul__": AttentionTracer.on_matmul,
    "bmm": AttentionTracer.on_matmul,
    "einsum": AttentionTracer.on_einsum,
}


def inputs_of_sdpa(arguments: Mapping[str, Any]) -> AttentionInputs:
    """Attention inputs from the arguments of F.scaled_dot_product_attention."""
    q, k, v = (arguments[side].transpose(1, 2) for side in ("query", "key", "value"))
    scale, mask = arguments.get("scale"), arguments.get("attn_mask")
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    batch = q.shape[0]
    return AttentionInputs(
        q,
        k.expand(batch, -1, -1, -1),
        v.expand(batch, -1, -1, -1),
        q.shape[-1] ** -0.5 if scale is None else scale,
        mask,
        bool(arguments.get("is_causal", False)),
    )


def _split_heads(weights: Tensor, heads: int) -> Tensor | None:
    """Weights as [B, H, T, S], or None if the head axis is unknown."""
    if weights.dim() == 4:
        return weights
    return weights.unflatten(0, (-1, heads)) if weights.dim() == 3 and heads and not weights.shape[0] % heads else None


def _flat_batch_reason(tensor: Tensor) -> str:
    return f"its attention tensors have {tensor.dim()} axes, so heads cannot be identified; declare it with hw.declare"


def _is_same_tensor(used: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors have equal values, up to shape and dtype."""
    if used is tensor:  # also true where some values are NaN
        return True
    if used.numel() != tensor.numel() or used.shape[-2:] != tensor.shape[-2:]:
        return False
    return torch.equal(used.to(tensor.dtype).reshape(tensor.shape), tensor)
