"""Standing at the forward of modules of anybody's: one replacement for each class, whatever is done there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..hooks import AttentionCall, AttentionInputs, MethodPatch, WeightsOnlyCall, has_hooks
from ..site import POSSIBLE, Ability

ForwardFunction = Callable[..., Any]
ForwardOverride = Callable[[nn.Module, ForwardFunction, tuple[Any, ...], dict[str, Any]], Any]

_OVERRIDES: WeakKeyDictionary[nn.Module, ForwardOverride] = WeakKeyDictionary()
_FORWARD_PATCHES: dict[type, MethodPatch] = {}
_RUNNING: ContextVar[tuple[nn.Module, ...]] = ContextVar("within", default=())

INSTANCE_FORWARD = Ability(False, "its forward was replaced on the module itself, which hides its class's; undo that")


def override_forward(module: nn.Module, override: ForwardOverride) -> None:
    """Let `role(module, run, args, kwargs)` stand for the forward of a module while somebody watches."""
    _OVERRIDES[module] = override


def hook_ability(module: nn.Module) -> Ability:
    """Whether the forward of its class is what runs when a module is called."""
    return INSTANCE_FORWARD if "forward" in vars(module) else POSSIBLE


def make_patches(override: ForwardOverride) -> list[MethodPatch]:
    """What is replaced for all modules that have this role."""
    owners = {_forward_owner(type(module)) for module, own in _OVERRIDES.items() if own is override}
    return [_FORWARD_PATCHES.setdefault(owner, MethodPatch(owner, "forward", _wrap_forward)) for owner in owners]


def _forward_owner(kind: type) -> type:
    """The class whose forward it is: a class and its heir may not both be replaced for one function."""
    return next(one for one in kind.__mro__ if "forward" in vars(one))


def _wrap_forward(original: ForwardFunction) -> ForwardFunction:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        role, within = (_OVERRIDES.get(self), _RUNNING.get()) if has_hooks() else (None, ())
        if role is None or self in within:  # within it is the forward of a class that this one's goes on to
            return original(self, *args, **kwargs)
        token = _RUNNING.set((*within, self))
        try:
            return role(self, lambda *said, **more: original(self, *said, **more), args, kwargs)
        finally:
            _RUNNING.reset(token)

    return forward


# --- What a module compares, overheard while its own code runs -----------------------------------------

SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MAX_OPEN_WEIGHTS = 4  # grids of weights that may be open at once


class TracedAttention(NamedTuple):
    """One comparison: what was compared, and what heads then say.

    `since` is how many of the modules that ran when values were read ran already when their weights were made. `why`
    says what of it is not understood.
    """

    call: AttentionCall | None = None
    z_BTHV: Tensor | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    depth: int = 0
    reason: str = ""


@dataclass
class SoftmaxCall:
    """A softmax over a grid of `axes`: the modules that ran then, and whether values were read by what it gave."""

    running_modules: tuple[nn.Module, ...]
    num_axes: int
    has_output: bool = False


class OpenWeights(NamedTuple):
    """Weights as a softmax gave them, and as they are used since."""

    used: Tensor
    weights: Tensor
    softmax: SoftmaxCall


TraceCallback = Callable[[TracedAttention], Tensor | None]


class AttentionTracer(TorchFunctionMode):
    """Tells of every comparison; what it is told in return takes the place of what heads say.

    `heads` is how many a module says it has, for those who keep batch and heads on one axis; 0 if it does not say.
    `inside` is the modules that run, which somebody else keeps.
    """

    def __init__(self, callback: TraceCallback, num_heads: int = 0, running_modules: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.callback, self.num_heads, self.running_modules = callback, num_heads, running_modules
        self.open_weights: deque[OpenWeights] = deque(maxlen=MAX_OPEN_WEIGHTS)
        self.softmax_calls: list[SoftmaxCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        hears = TRACED_FUNCTIONS.get(getattr(func, "__name__", ""))
        return result if hears is None else hears(self, args, kwargs, result)

    def on_sdpa(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """One function does it all: exactly what it was told."""
        told = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | dict(kwargs)
        since = len(self.running_modules)
        if told["query"].dim() != 4:
            return self._report(TracedAttention(depth=since, reason=_flat_batch_reason(told["query"])), o)
        _, kv, _, dim = told["key"].shape
        return self._report(TracedAttention(inputs_of_sdpa(told), o.transpose(1, 2), kv, dim, since), o)

    def on_softmax(self, args: Any, kwargs: Mapping[str, Any], weights: Tensor) -> Tensor:
        """Perhaps weights: they are, if values are multiplied with them."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if weights.dim() >= 3 and dim in (-1, weights.dim() - 1):
            self.softmax_calls.append(SoftmaxCall(tuple(self.running_modules), weights.dim()))
            self.open_weights.append(OpenWeights(weights, weights, self.softmax_calls[-1]))
        return weights

    def on_dropout(self, args: Any, kwargs: Mapping[str, Any], dropped: Tensor) -> Tensor:
        """Weights, of which some are left out while a model trains."""
        before = args[0] if args else kwargs["input"]
        if grid := self._find_weights(before):
            self.open_weights.append(grid._replace(used=dropped))
        return dropped

    def on_matmul(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Perhaps values, multiplied with weights."""
        first = args[0] if args else kwargs["input"]
        return self._on_product(first, o) if isinstance(first, Tensor) and first.dim() >= 3 else o

    def on_einsum(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """The same, if its letters say so."""
        equation, first, *_ = (args[0], *args[1]) if isinstance(args[1], (list, tuple)) else args
        if not isinstance(equation, str) or first.dim() < 3:
            return o
        operands, _, said = equation.replace(" ", "").partition("->")
        weights, _, values = operands.partition(",")
        if said[: len(weights) - 1] == weights[:-1] and weights[-1] in values and weights[-1] not in said:
            return self._on_product(first, o)
        grid = self._find_weights(first)
        if grid is None:
            return o
        return self._report(
            TracedAttention(depth=self._common_depth(grid), reason=f"it reads values by {equation!r}"), o
        )

    def _on_product(self, first: Tensor, o: Tensor) -> Tensor:
        grid = self._find_weights(first)
        if grid is None:
            return o
        since = self._common_depth(grid)
        weights = _split_heads(grid.weights, self.num_heads)
        if weights is None:
            return self._report(TracedAttention(depth=since, reason=_flat_batch_reason(grid.weights)), o)
        z_BHTV = o.reshape(*weights.shape[:3], o.shape[-1])
        return self._report(TracedAttention(WeightsOnlyCall(weights), z_BHTV.transpose(1, 2), depth=since), o)

    def _common_depth(self, grid: OpenWeights) -> int:
        """How many modules ran both when these weights were made and now."""
        grid.softmax.has_output = True
        both = zip(grid.softmax.running_modules, self.running_modules, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))

    def _find_weights(self, tensor: Tensor) -> OpenWeights | None:
        """The weights that these numbers are, if any."""
        return next((grid for grid in reversed(self.open_weights) if _is_same_tensor(grid.used, tensor)), None)

    def _report(self, heard: TracedAttention, o: Tensor) -> Tensor:
        z_BTHV = self.callback(heard)
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
    """What torch's fused function was told."""
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
    """[B, H, T, S], or None if nobody says which axis is which."""
    if weights.dim() == 4:
        return weights
    return weights.unflatten(0, (-1, heads)) if weights.dim() == 3 and heads and not weights.shape[0] % heads else None


def _flat_batch_reason(grid: Tensor) -> str:
    return f"what it compares has {grid.dim()} axes, so that heads cannot be told apart; hw.declare says how many"


def _is_same_tensor(used: Tensor, tensor: Tensor) -> bool:
    """Whether these are the same numbers, perhaps in another shape or rounded to another type."""
    if used is tensor:  # also where some of them are no numbers
        return True
    if used.numel() != tensor.numel() or used.shape[-2:] != tensor.shape[-2:]:
        return False
    return torch.equal(used.to(tensor.dtype).reshape(tensor.shape), tensor)
