"""Trace the attention that the forward of any module computes, by the torch functions that it
calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..site import POSSIBLE, Ability, AttentionInputs, ObservedCall, UnreadableCall, WeightsOnlyCall

BATCH_FIRST = "batch first"
HEADS_FIRST = "heads first"


class JointAxis(NamedTuple):
    """Describe a joint axis: its number of heads, and its order of batch and heads."""

    num_heads: int
    order: str

    def split(self, tensor: Tensor) -> Tensor:
        """Split [batch * heads, ...] into [batch, heads, ...].

        >>> import torch
        >>> JointAxis(3, "heads first").split(torch.arange(6))
        tensor([[0, 2, 4],
                [1, 3, 5]])
        """
        if self.order == BATCH_FIRST:
            return tensor.unflatten(0, (-1, self.num_heads))
        return tensor.unflatten(0, (self.num_heads, -1)).transpose(0, 1)


def find_joint_axis(size: int, before: Tensor, after: Tensor) -> JointAxis | None:
    """Find the joint axis of `size` from a module's output before and after a change of slice 1.

    The axis of the output with a single changed index is the batch. With the batch first, slice 1
    belongs to row 0 (or, with one head, to row 1); with heads first, it belongs to row 1. None if
    the output shows no such axis.
    """
    if size == 1:
        return JointAxis(1, BATCH_FIRST)
    changed = before != after
    rows: list[tuple[int, int]] = []  # size of an axis, and its only changed index
    for axis in range(min(2, changed.dim())):
        indices = changed.transpose(0, axis).flatten(1).any(1).nonzero().flatten().tolist()
        count = changed.shape[axis]
        if len(indices) == 1 and count > 1 and size % count == 0:
            rows.append((count, indices[0]))
    if len(rows) != 1:
        return None
    batch, row = rows[0]
    heads = size // batch
    if heads == 1:
        return JointAxis(1, BATCH_FIRST) if row == 1 else None
    return JointAxis(heads, (BATCH_FIRST, HEADS_FIRST)[row]) if row < 2 else None


INSTANCE_FORWARD = Ability(
    False, "its forward is set on the module itself, which hides that of its class; remove it"
)


def hook_ability(module: nn.Module) -> Ability:
    """Return the ability to hook a module: calling it must run the forward of its class."""
    return INSTANCE_FORWARD if "forward" in vars(module) else POSSIBLE


# --- Trace attention while a module's own code runs -----------------------------------------------

SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MAX_OPEN_WEIGHTS = 4  # softmax outputs remembered at once


class TracedAttention(NamedTuple):
    """Store one traced attention computation: its inputs (`call`) and head outputs.

    `depth` is the number of enclosing modules that were running both when the weights were computed
    and when the values were multiplied. `kv_shape` is the number and width of key heads where the
    function gets them. `joint` is the size of an axis that joins batch and heads, if it could not
    be split; it is the batch axis of `z_BTHV` then. If a computation is not understood, `call` is
    an `UnreadableCall` with the reason.
    """

    call: ObservedCall
    z_BTHV: Tensor
    depth: int = 0
    kv_shape: tuple[int, ...] = ()
    joint: int = 0

    @property
    def reason(self) -> str:
        """Explain why the computation is not understood; "" if it is."""
        return self.call.unsupported if isinstance(self.call, UnreadableCall) else ""


@dataclass
class SoftmaxCall:
    """Record a softmax over a tensor of `num_axes`.

    Holds the modules running then, and True if its output was applied to values.
    """

    running_modules: tuple[nn.Module, ...]
    num_axes: int
    has_output: bool = False


class OpenWeights(NamedTuple):
    """Hold the output of a softmax, and the tensor derived from it by dropout (`used`)."""

    used: Tensor
    weights: Tensor
    softmax: SoftmaxCall


TraceCallback = Callable[[TracedAttention], Tensor | None]
View = Callable[[Tensor], Tensor]  # returns a view of a tensor with its axes split or reordered


class AttentionTracer(TorchFunctionMode):
    """Call `callback` for each attention computation; a tensor that it returns replaces the
    outputs.

    `joint_axes` are the ways to split an axis that joins batch and heads. `running_modules` is the
    stack of running modules, which the caller maintains. With `joins_heads`, heads are computed one
    by one, and `callback` gets all of them where their outputs are concatenated. The caller makes
    compiled functions such as flex_attention run eagerly, as installed hooks do.
    """

    def __init__(
        self,
        callback: TraceCallback,
        joint_axes: Sequence[JointAxis] = (),
        running_modules: Sequence[nn.Module] = (),
        *,
        joins_heads: bool = False,
    ) -> None:
        super().__init__()
        self.callback = callback
        self.joint_axes = joint_axes
        self.running_modules = running_modules
        self.joins_heads = joins_heads
        self.separate_heads: list[TracedAttention] = []
        self.open_weights: deque[OpenWeights] = deque(maxlen=MAX_OPEN_WEIGHTS)
        self.softmax_calls: list[SoftmaxCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            return self.run_multihead(func, signature(func).bind(*args, **kwargs).arguments)
        if name in CONCATENATIONS and self.joins_heads:
            args, kwargs = self.join_heads(args, kwargs)
        result = func(*args, **kwargs)
        handler = TRACED_FUNCTIONS.get(name)
        return result if handler is None else handler(self, args, kwargs, result)

    def run_multihead(
        self, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the function of `nn.MultiheadAttention`, which projects head outputs itself.

        It runs with an identity matrix in place of the output projection, which is applied
        afterwards.
        """
        query = arguments["query"]
        changed = {
            "out_proj_weight": torch.eye(query.shape[-1], dtype=query.dtype, device=query.device),
            "out_proj_bias": None,
            "need_weights": True,
            "average_attn_weights": False,
        }
        z, weights = function(**{**arguments, **changed})

        def by_head(z: Tensor) -> Tensor:
            z = z if z.dim() == 3 else z[:, None]  # [T, B, channels]
            return z.unflatten(-1, (arguments["num_heads"], -1)).permute(1, 2, 0, 3)

        weights_BHTS = weights if weights.dim() == 4 else weights[None]
        depth = len(self.running_modules)
        z = self._report(z, weights_BHTS, by_head, lambda _: WeightsOnlyCall(weights_BHTS), depth)
        y = F.linear(z, arguments["out_proj_weight"], arguments["out_proj_bias"])
        if not arguments.get("need_weights", True):
            return y, None
        return y, weights.mean(-3) if arguments.get("average_attn_weights", True) else weights

    def join_heads(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace the outputs of separate heads in the arguments of a concatenation."""
        tensors = args[0] if args else kwargs["tensors"]
        outputs = [head.z_BTHV[:, :, 0] for head in self.separate_heads]
        is_joined = len(tensors) == len(outputs) > 1 and all(
            tensor.shape == output.shape and torch.equal(tensor, output)
            for tensor, output in zip(tensors, outputs, strict=True)
        )
        if not is_joined:
            return args, kwargs
        weights = torch.cat([head.call.all_weights() for head in self.separate_heads], 1)
        z_BTHV = torch.stack(outputs, 2)
        replaced = self.callback(TracedAttention(WeightsOnlyCall(weights), z_BTHV))
        if replaced is None:
            return args, kwargs
        others = {name: value for name, value in kwargs.items() if name != "tensors"}
        return (replaced.unbind(2), *args[1:]), others

    def on_sdpa(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Report fused attention: its arguments are the inputs."""
        arguments = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | dict(kwargs)
        depth = len(self.running_modules)
        key = arguments["key"]
        if key.dim() not in (3, 4):
            return self._report_unclear(depth, _axes_reason(key), o)
        make_call = partial(inputs_of_sdpa, arguments)
        kv_shape = (key.shape[1], key.shape[3]) if key.dim() == 4 else ()
        return self._report(o, arguments["query"], _unchanged, make_call, depth, kv_shape)

    def on_flex(
        self, args: Any, kwargs: Mapping[str, Any], outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Report `flex_attention`: its functions give the scores and the mask of each pair."""
        q, k, _, score_function, block_mask, scale, *_ = args
        call = WeightsOnlyCall(weights_of_flex(q, k, scale, score_function, block_mask[-1]))
        depth = len(self.running_modules)
        kv_shape = (k.shape[1], k.shape[3])
        o = self._report(outputs[0], q, _unchanged, lambda _: call, depth, kv_shape)
        return (o, *outputs[1:])

    def on_softmax(self, args: Any, kwargs: Mapping[str, Any], weights: Tensor) -> Tensor:
        """Remember a possible tensor of weights: later code may multiply it with values."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if weights.dim() >= 3 and dim in (-1, weights.dim() - 1):
            self.softmax_calls.append(SoftmaxCall(tuple(self.running_modules), weights.dim()))
            self.open_weights.append(OpenWeights(weights, weights, self.softmax_calls[-1]))
        return weights

    def on_normalisation(self, args: Any, kwargs: Mapping[str, Any], weights: Any) -> Any:
        """Remember an element-wise result with rows that sum to one, as in a softmax written by
        hand.
        """
        if isinstance(weights, Tensor) and weights.dim() >= 3 and _sums_to_one(weights):
            softmax = SoftmaxCall(tuple(self.running_modules), weights.dim())
            self.open_weights.append(OpenWeights(weights, weights, softmax))
        return weights

    def on_dropout(self, args: Any, kwargs: Mapping[str, Any], dropped: Tensor) -> Tensor:
        """Remember dropped-out weights as derived from the weights before dropout."""
        source = args[0] if args else kwargs["input"]
        entry = self._find_weights(source)
        if entry:
            self.open_weights.append(entry._replace(used=dropped))
        return dropped

    def on_matmul(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Report attention if the first factor is a tensor of weights, or the second one is its
        transpose.
        """
        first = args[0] if args else kwargs.get("input")
        second = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mat2"))
        for factor, is_transposed in ((first, False), (second, True)):
            if isinstance(factor, Tensor) and factor.dim() >= 3:
                entry = self._find_weights(factor.transpose(-2, -1) if is_transposed else factor)
                if entry is not None:
                    return self._report_product(
                        entry, o, _transpose if is_transposed else _unchanged
                    )
        return o

    def on_einsum(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Report attention if the equation contracts the last axis of weights with the values."""
        equation, *operands = (args[0], *args[1]) if isinstance(args[1], (list, tuple)) else args
        if not isinstance(equation, str):
            return o
        for number, operand in enumerate(operands):
            entry = self._find_weights(operand) if operand.dim() >= 3 else None
            if entry is not None:
                order = order_of_einsum(equation, number, operand.dim())
                if order is not None and len(order) == o.dim():
                    return self._report_product(entry, o, partial(Tensor.permute, dims=order))
                reason = f"it applies its weights to values by einsum {equation!r}"
                return self._report_unclear(self._common_depth(entry), reason, o)
        return o

    def _report_product(self, entry: OpenWeights, o: Tensor, view: View) -> Tensor:
        """Report the product `o` of weights and values, which `view` lays out as [..., T, V]."""
        weights = entry.weights
        depth = self._common_depth(entry)
        if weights.dim() not in (3, 4) or o.dim() not in (3, weights.dim()):
            return self._report_unclear(depth, _axes_reason(weights), o)

        def by_head(o: Tensor) -> Tensor:
            ordered = view(o)
            if ordered.dim() == weights.dim():
                return ordered
            # values without the axis of a batch of one
            return ordered.unflatten(0, weights.shape[:2])

        return self._report(
            o, weights, by_head, lambda split: WeightsOnlyCall(split(weights)), depth
        )

    def _common_depth(self, entry: OpenWeights) -> int:
        """Count enclosing modules that have been running since these weights were computed."""
        entry.softmax.has_output = True
        both = zip(entry.softmax.running_modules, self.running_modules, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))

    def _find_weights(self, tensor: Tensor) -> OpenWeights | None:
        """Return the remembered weights that equal this tensor, if any."""
        matches = (one for one in reversed(self.open_weights) if _is_same_tensor(one.used, tensor))
        return next(matches, None)

    def _report_unclear(self, depth: int, reason: str, o: Tensor) -> Tensor:
        self.callback(TracedAttention(UnreadableCall(reason), o, depth))
        return o

    def _report(
        self,
        o: Tensor,
        operand: Tensor,
        view: View,
        make_call: Callable[[View], ObservedCall],
        depth: int,
        kv_shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Report attention; returns its output `o`, or its replacement.

        `view` lays out the output as [batch, heads, T, V], or as [batch * heads, T, V] if `operand`
        has three axes; `make_call` gets the function that splits these.
        """
        for split, joint in self._splits(operand):
            by_head = partial(_view_heads, view, split)
            traced = TracedAttention(make_call(split), by_head(o), depth, kv_shape, joint)
            if self.joins_heads:
                self.separate_heads.append(traced)
                return o
            z_BTHV = self.callback(traced)
            if z_BTHV is not None:
                edited = o.clone()
                by_head(edited).copy_(z_BTHV)
                return edited
        return o

    def _splits(self, operand: Tensor) -> list[tuple[View, int]]:
        """Return the ways to split an operand's axes as [batch, heads, ...].

        Also returns the size of an axis that joins both if the split is unknown.
        """
        if operand.dim() == 4:
            return [(_unchanged, 0)]
        axes = [axis for axis in self.joint_axes if len(operand) % axis.num_heads == 0]
        return [(axis.split, 0) for axis in axes] or [(ONE_HEAD.split, len(operand))]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _transpose(tensor: Tensor) -> Tensor:
    return tensor.transpose(-2, -1)


def _view_heads(view: View, split: View, o: Tensor) -> Tensor:
    """View the output of a function as head outputs [B, T, H, V]."""
    return split(view(o)).transpose(1, 2)


ONE_HEAD = JointAxis(1, BATCH_FIRST)
CONCATENATIONS = ("cat", "concat", "concatenate", "stack")
TRACED_FUNCTIONS: dict[str, Callable[[AttentionTracer, Any, Mapping[str, Any], Any], Any]] = {
    "scaled_dot_product_attention": AttentionTracer.on_sdpa,
    "flex_attention": AttentionTracer.on_flex,
    "softmax": AttentionTracer.on_softmax,
    "dropout": AttentionTracer.on_dropout,
    "matmul": AttentionTracer.on_matmul,
    "__matmul__": AttentionTracer.on_matmul,
    "bmm": AttentionTracer.on_matmul,
    "einsum": AttentionTracer.on_einsum,
}
ELEMENTWISE = (
    "div div_ divide true_divide __truediv__ __itruediv__ mul mul_ __mul__ exp exp_ normalize"
)
MASKING = "masked_fill masked_fill_ nan_to_num where"
TRACED_FUNCTIONS |= dict.fromkeys(
    f"{ELEMENTWISE} {MASKING}".split(), AttentionTracer.on_normalisation
)


def _sums_to_one(weights: Tensor) -> bool:
    """Return True if every row of a floating-point tensor is zero, or a distribution.

    A distribution is not negative and sums to one.
    """
    is_real = weights.is_floating_point() and not weights.is_meta
    if not is_real or weights.shape[-1] < 2 or not weights.numel():
        return False
    sums = weights.detach().float().sum(-1)
    tolerance = 1e-4 if weights.dtype.itemsize >= 4 else 2e-2
    is_one = (sums - 1).abs() < tolerance
    return bool(is_one.any()) and bool((is_one | (sums == 0)).all()) and bool((weights >= 0).all())


def order_of_einsum(equation: str, number: int, num_axes: int) -> tuple[int, ...] | None:
    """Return the order of axes in which an einsum's output is [..., T, V].

    Operand `number` holds the weights [..., T, S]. None if it is another product.

    >>> order_of_einsum("bhts,bshd->bthd", 0, 4)
    (0, 2, 1, 3)
    >>> order_of_einsum("bhts,hg->bgts", 0, 4) is None
    True
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        return None
    leading = "ABCDEFGH"[: num_axes - len(operands[number].replace("...", ""))]
    if any("..." in part for part in operands) and not set(leading) & set(equation):
        operands = [part.replace("...", leading) for part in operands]
        output = output.replace("...", leading)
    weights = operands[number]
    values = operands[1 - number]
    channels = [axis for axis in values if axis not in weights]
    is_weighted_sum = (
        len(channels) == 1
        and weights[-1] in values
        and weights[-2] not in values
        and sorted(output) == sorted([*weights[:-1], *channels])
    )
    if not is_weighted_sum:
        return None
    return tuple(output.index(axis) for axis in (*weights[:-1], *channels))


def weights_of_flex(
    q: Tensor,
    k: Tensor,
    scale: float,
    score_function: Callable[..., Tensor],
    mask_function: Callable[..., Tensor],
) -> Tensor:
    """Compute attention weights [B, H, T, S] of `flex_attention`.

    A query without any key has weights of zero.
    """
    batch, heads, queries, _ = q.shape
    k = k.expand(batch, -1, -1, -1).repeat_interleave(heads // k.shape[1], 1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).transpose(-2, -1) * scale
    indices = [torch.arange(size, device=q.device) for size in (batch, heads, queries, k.shape[2])]
    for axis in (3, 2, 1, 0):  # the last index varies fastest
        of_index = [0 if number == axis else None for number in range(4)]
        score_function = torch.vmap(score_function, in_dims=(0, *of_index))
        mask_function = torch.vmap(mask_function, in_dims=tuple(of_index))
    scores = score_function(scores, *indices).masked_fill(~mask_function(*indices), -torch.inf)
    weights = scores.softmax(-1)
    return weights.nan_to_num(0.0) if bool((scores == -torch.inf).all(-1).any()) else weights


def inputs_of_sdpa(arguments: Mapping[str, Any], split: View) -> AttentionInputs:
    """Build attention inputs from the arguments of F.scaled_dot_product_attention.

    `split` turns their axes into [batch, heads, ...].
    """
    query = arguments["query"]
    rows = len(query)
    sides = [arguments[side] for side in ("query", "key", "value")]
    q, k, v = (split(side.expand(rows, *side.shape[1:])).transpose(1, 2) for side in sides)
    scale = arguments.get("scale")
    mask = arguments.get("attn_mask")
    if mask is not None:
        mask = split(mask) if mask.shape[:-2] == query.shape[:-2] else mask
        mask = mask[(None,) * (4 - mask.dim())]
    return AttentionInputs(
        q,
        k,
        v,
        q.shape[-1] ** -0.5 if scale is None else scale,
        mask,
        bool(arguments.get("is_causal", False)),
    )


def _axes_reason(tensor: Tensor) -> str:
    return (
        f"its attention tensors have {tensor.dim()} axes, so heads cannot be identified; "
        "declare it with hw.declare"
    )


def _is_same_tensor(used: Tensor, tensor: Tensor) -> bool:
    """True if two tensors have equal values, up to shape and dtype."""
    if used is tensor:  # also true where some values are NaN
        return True
    if used.numel() != tensor.numel() or used.shape[-2:] != tensor.shape[-2:]:
        return False
    return torch.equal(used.to(tensor.dtype).reshape(tensor.shape), tensor)
