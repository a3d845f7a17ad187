"""Trace the attention that the forward of any module computes, by the torch functions that it
calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..method_patches import EAGER_STANCE
from ..observed_call import AttentionInputs, ObservedCall, WeightsOnlyCall
from ..site import POSSIBLE, Ability

BATCH_FIRST = "batch first"
HEADS_FIRST = "heads first"
UNKNOWN_ORDER = "unknown"


class JointAxis(NamedTuple):
    """Number of heads on a joint axis, and the order of batch and heads there."""

    num_heads: int
    order: str

    @property
    def candidates(self) -> list[JointAxis]:
        """The two orders if the order is unknown, else this one."""
        if self.order != UNKNOWN_ORDER:
            return [self]
        return [self._replace(order=BATCH_FIRST), self._replace(order=HEADS_FIRST)]

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

    def join(self, tensor: Tensor) -> Tensor:
        """Join [batch, heads, ...] as [batch * heads, ...]."""
        return (tensor if self.order == BATCH_FIRST else tensor.transpose(0, 1)).flatten(0, 1)

    def split_call(self, call: ObservedCall) -> ObservedCall:
        """Split the inputs or weights of a call whose batch axis is the joint axis, and which has
        one head.
        """
        if isinstance(call, WeightsOnlyCall):
            return WeightsOnlyCall(self.split(call.weights[:, 0]))
        assert isinstance(call, AttentionInputs)
        q, k, v = (
            self.split(side[:, :, 0]).transpose(1, 2)
            for side in (call.q_BTHK, call.k_BSGK, call.v_BSGV)
        )
        mask = call.mask
        if mask is not None and mask.shape[0] > 1:
            mask = self.split(mask[:, 0])
        return replace(call, q_BTHK=q, k_BSGK=k, v_BSGV=v, mask=mask)


def find_joint_axis(size: int, before: Tensor, after: Tensor) -> JointAxis | None:
    """The joint axis of `size`, from the output of a module before and after slice 1 of the axis
    was changed.

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
    """Whether a module can be hooked: calling it must run the forward of its class."""
    return INSTANCE_FORWARD if "forward" in vars(module) else POSSIBLE


# --- Trace attention while a module's own code runs -----------------------------------------------

SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MAX_OPEN_WEIGHTS = 4  # softmax outputs remembered at once


class TracedAttention(NamedTuple):
    """One traced attention computation: its inputs (`call`) and head outputs.

    `depth` is the number of enclosing modules that were running both when the weights were computed
    and when the values were multiplied. `joint` is the size of an axis that joins batch and heads,
    if it could not be split; it is the batch axis of `z_BTHV` then. `reason` is set if the
    computation is not understood.
    """

    call: ObservedCall | None = None
    z_BTHV: Tensor | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    depth: int = 0
    joint: int = 0
    reason: str = ""


@dataclass
class SoftmaxCall:
    """A softmax over a tensor of `num_axes`, the modules running then, and whether its output was
    applied to values.
    """

    running_modules: tuple[nn.Module, ...]
    num_axes: int
    has_output: bool = False


class OpenWeights(NamedTuple):
    """The output of a softmax, and the tensor derived from it by dropout (`used`)."""

    used: Tensor
    weights: Tensor
    softmax: SoftmaxCall


class OutputAxes(NamedTuple):
    """How the output of a product is laid out: the permutation to [batch, heads, T, V], or to
    [batch * heads, T, V].
    """

    to_heads: tuple[int, ...]

    @property
    def from_heads(self) -> tuple[int, ...]:
        """The inverse permutation."""
        return tuple(self.to_heads.index(axis) for axis in range(len(self.to_heads)))


TraceCallback = Callable[[TracedAttention], Tensor | None]
ConcatenationCallback = Callable[[Sequence[Tensor]], Sequence[Tensor] | None]


class AttentionTracer(TorchFunctionMode):
    """Calls `callback` for each attention computation; a tensor that it returns replaces the head
    outputs.

    `joint_axis` splits an axis that joins batch and heads. `running_modules` is the stack of
    running modules, which the caller maintains. `on_concatenation` gets the tensors of each `cat`
    or `stack`, and may return others for them.
    """

    def __init__(
        self,
        callback: TraceCallback,
        joint_axis: JointAxis | None = None,
        running_modules: Sequence[nn.Module] = (),
        on_concatenation: ConcatenationCallback | None = None,
    ) -> None:
        super().__init__()
        self.callback = callback
        self.joint_axis = joint_axis
        self.running_modules = running_modules
        self.on_concatenation = on_concatenation
        self.open_weights: deque[OpenWeights] = deque(maxlen=MAX_OPEN_WEIGHTS)
        self.softmax_calls: list[SoftmaxCall] = []
        self.contexts = ExitStack()

    def __enter__(self) -> Self:
        self.contexts.enter_context(
            EAGER_STANCE.active()
        )  # a compiled function such as flex_attention is traced too
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.contexts.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in CONCATENATIONS and self.on_concatenation is not None:
            pieces = self.on_concatenation(args[0] if args else kwargs["tensors"])
            args, kwargs = (
                (args, kwargs)
                if pieces is None
                else ((pieces, *args[1:]), _without(kwargs, "tensors"))
            )
        result = func(*args, **kwargs)
        handler = TRACED_FUNCTIONS.get(name)
        return result if handler is None else handler(self, args, kwargs, result)

    def on_sdpa(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Fused attention: its arguments are the inputs."""
        arguments = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | dict(kwargs)
        depth = len(self.running_modules)
        num_axes = arguments["query"].dim()
        if num_axes not in (3, 4):
            return self._report_unclear(depth, _axes_reason(arguments["query"]), o)
        if num_axes == 3:
            traced = TracedAttention(
                inputs_of_sdpa(_add_head_axis(arguments)), o[:, :, None], depth=depth
            )
            return self._report_joint(traced, o, OutputAxes((0, 1, 2)))
        _, kv, _, dim = arguments["key"].shape
        traced = TracedAttention(inputs_of_sdpa(arguments), o.transpose(1, 2), kv, dim, depth)
        return self._report(traced, o, IN_ORDER)

    def on_flex(
        self, args: Any, kwargs: Mapping[str, Any], outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """`flex_attention`: its functions give the scores and the mask of each pair."""
        q, k, _, score_function, block_mask, scale, *_ = args
        o = outputs[0]
        weights = weights_of_flex(q, k, scale, FlexFunctions(score_function, block_mask[-1]))
        call = WeightsOnlyCall(weights)
        depth = len(self.running_modules)
        traced = TracedAttention(call, o.transpose(1, 2), k.shape[1], k.shape[3], depth)
        return (self._report(traced, o, IN_ORDER), *outputs[1:])

    def on_softmax(self, args: Any, kwargs: Mapping[str, Any], weights: Tensor) -> Tensor:
        """Remember a possible tensor of weights; it is one if values are
        multiplied with it later.
        """
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if weights.dim() >= 3 and dim in (-1, weights.dim() - 1):
            self.softmax_calls.append(SoftmaxCall(tuple(self.running_modules), weights.dim()))
            self.open_weights.append(OpenWeights(weights, weights, self.softmax_calls[-1]))
        return weights

    def on_normalisation(self, args: Any, kwargs: Mapping[str, Any], weights: Any) -> Any:
        """Remember the result of an element-wise function if each row sums to one, as a softmax
        written by hand.
        """
        if isinstance(weights, Tensor) and weights.dim() >= 3 and _sums_to_one(weights):
            softmax = SoftmaxCall(tuple(self.running_modules), weights.dim())
            self.open_weights.append(OpenWeights(weights, weights, softmax))
        return weights

    def on_dropout(self, args: Any, kwargs: Mapping[str, Any], dropped: Tensor) -> Tensor:
        """Remember dropped-out weights as derived from the weights before."""
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
                weights = self._find_weights(factor.transpose(-2, -1) if is_transposed else factor)
                if weights is not None:
                    order = tuple(range(o.dim()))
                    axes = OutputAxes(
                        (*order[:-2], o.dim() - 1, o.dim() - 2) if is_transposed else order
                    )
                    return self._report_product(weights, o, axes)
        return o

    def on_einsum(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Report attention if the equation contracts the last axis of weights with the values."""
        equation, *operands = (args[0], *args[1]) if isinstance(args[1], (list, tuple)) else args
        if not isinstance(equation, str):
            return o
        for number, operand in enumerate(operands):
            entry = self._find_weights(operand) if operand.dim() >= 3 else None
            if entry is not None:
                axes = axes_of_einsum(equation, number, operand.dim())
                if axes is not None:
                    return self._report_product(entry, o, axes)
                reason = f"it applies its weights to values by einsum {equation!r}"
                return self._report_unclear(self._common_depth(entry), reason, o)
        return o

    def _report_product(self, entry: OpenWeights, o: Tensor, axes: OutputAxes) -> Tensor:
        """Report the product `o` of weights and values."""
        weights = entry.weights
        depth = self._common_depth(entry)
        if weights.dim() not in (3, 4) or len(axes.to_heads) != o.dim():
            return self._report_unclear(depth, _axes_reason(weights), o)
        ordered = o.permute(axes.to_heads)
        if weights.dim() == 4 and ordered.dim() == 3:  # values of a batch of one, without its axis
            ordered = ordered.reshape(*weights.shape[:3], -1)
            axes = OutputAxes(tuple(range(4)))
        if weights.dim() == 3:
            traced = TracedAttention(
                WeightsOnlyCall(weights[:, None]), ordered[:, :, None], depth=depth
            )
            return self._report_joint(traced, o, axes)
        traced = TracedAttention(WeightsOnlyCall(weights), ordered.transpose(1, 2), depth=depth)
        return self._report(traced, o, axes)

    def _common_depth(self, entry: OpenWeights) -> int:
        """Number of enclosing modules that were running when these weights were computed and still
        are.
        """
        entry.softmax.has_output = True
        both = zip(entry.softmax.running_modules, self.running_modules, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))

    def _find_weights(self, tensor: Tensor) -> OpenWeights | None:
        """The remembered weights that equal this tensor, if any."""
        return next(
            (entry for entry in reversed(self.open_weights) if _is_same_tensor(entry.used, tensor)),
            None,
        )

    def _report_unclear(self, depth: int, reason: str, o: Tensor) -> Tensor:
        self.callback(TracedAttention(depth=depth, reason=reason))
        return o

    def _report(self, traced: TracedAttention, o: Tensor, axes: OutputAxes) -> Tensor:
        """Report attention whose output is laid out along `axes`; returns the output, or its
        replacement.
        """
        z_BTHV = self.callback(traced)
        return (
            o
            if z_BTHV is None
            else z_BTHV.transpose(1, 2).permute(axes.from_heads).reshape(o.shape)
        )

    def _report_joint(self, traced: TracedAttention, o: Tensor, axes: OutputAxes) -> Tensor:
        """Report attention on tensors [batch * heads, T, V], split if their joint axis is known."""
        assert traced.z_BTHV is not None
        assert traced.call is not None
        size = len(traced.z_BTHV)
        if self.joint_axis is None or size % self.joint_axis.num_heads:
            z_BTHV = self.callback(traced._replace(joint=size))
            return o if z_BTHV is None else z_BTHV[:, :, 0].permute(axes.from_heads)
        for axis in self.joint_axis.candidates:
            split = axis.split(traced.z_BTHV[:, :, 0]).transpose(1, 2)
            call = axis.split_call(traced.call)
            z_BTHV = self.callback(traced._replace(call=call, z_BTHV=split))
            if z_BTHV is not None:
                return axis.join(z_BTHV.transpose(1, 2)).permute(axes.from_heads)
        return o


CONCATENATIONS = ("cat", "concat", "concatenate", "stack")
IN_ORDER = OutputAxes((0, 1, 2, 3))
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


def _without(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}


def _sums_to_one(weights: Tensor) -> bool:
    """Whether every row of a floating-point tensor is zero, or not negative with a sum of one."""
    if (
        not weights.is_floating_point()
        or weights.is_meta
        or weights.shape[-1] < 2
        or not weights.numel()
    ):
        return False
    sums = weights.detach().float().sum(-1)
    tolerance = 1e-4 if weights.dtype.itemsize >= 4 else 2e-2
    is_one = (sums - 1).abs() < tolerance
    return bool(is_one.any()) and bool((is_one | (sums == 0)).all()) and bool((weights >= 0).all())


def axes_of_einsum(equation: str, number: int, num_axes: int) -> OutputAxes | None:
    """Layout of the output of an einsum whose operand `number` are weights [..., T, S]; None if it
    is another product.

    >>> axes_of_einsum("bhts,bshd->bthd", 0, 4)
    OutputAxes(to_heads=(0, 2, 1, 3))
    >>> axes_of_einsum("bhts,hg->bgts", 0, 4) is None
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
    return (
        OutputAxes(tuple(output.index(axis) for axis in (*weights[:-1], *channels)))
        if is_weighted_sum
        else None
    )


class FlexFunctions(NamedTuple):
    """The two functions of `flex_attention`, of a score and its batch, head, query and key, or of
    these four alone.
    """

    score: Callable[..., Tensor]
    mask: Callable[..., Tensor]


def weights_of_flex(q: Tensor, k: Tensor, scale: float, functions: FlexFunctions) -> Tensor:
    """Attention weights [B, H, T, S] of `flex_attention`; a query without any key has weights of
    zero.
    """
    batch, heads, queries, _ = q.shape
    k = k.expand(batch, -1, -1, -1).repeat_interleave(heads // k.shape[1], 1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).transpose(-2, -1) * scale
    indices = [torch.arange(size, device=q.device) for size in (batch, heads, queries, k.shape[2])]
    score_function, mask_function = functions
    for axis in (3, 2, 1, 0):  # the last index varies fastest
        of_index = [0 if number == axis else None for number in range(4)]
        score_function = torch.vmap(score_function, in_dims=(0, *of_index))
        mask_function = torch.vmap(mask_function, in_dims=tuple(of_index))
    scores = score_function(scores, *indices).masked_fill(~mask_function(*indices), -torch.inf)
    return (
        scores.softmax(-1).nan_to_num(0.0)
        if bool((scores == -torch.inf).all(-1).any())
        else scores.softmax(-1)
    )


def inputs_of_sdpa(arguments: Mapping[str, Any]) -> AttentionInputs:
    """Attention inputs from the arguments of F.scaled_dot_product_attention."""
    q, k, v = (arguments[side].transpose(1, 2) for side in ("query", "key", "value"))
    scale = arguments.get("scale")
    mask = arguments.get("attn_mask")
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


def _add_head_axis(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call without a head axis, as a call with one head."""
    q, k, v = (arguments[side][:, None] for side in ("query", "key", "value"))
    mask = arguments.get("attn_mask")
    return {
        **arguments,
        "query": q,
        "key": k,
        "value": v,
        "attn_mask": mask if mask is None else mask[..., None, :, :],
    }


def _axes_reason(tensor: Tensor) -> str:
    return (
        f"its attention tensors have {tensor.dim()} axes, so heads cannot be identified; "
        "declare it with hw.declare"
    )


def _is_same_tensor(used: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors have equal values, up to shape and dtype."""
    if used is tensor:  # also true where some values are NaN
        return True
    if used.numel() != tensor.numel() or used.shape[-2:] != tensor.shape[-2:]:
        return False
    return torch.equal(used.to(tensor.dtype).reshape(tensor.shape), tensor)
