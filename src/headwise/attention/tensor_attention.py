"""`attend`: attention over queries, keys and values that are given as tensors, without a layer.

Shapes: B batch, T queries, S keys, H query heads, G key-value heads, K and V channels of a head.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ..kernels.operand_checks import is_under_functorch
from ..util.errors import suggest
from . import backends
from .backends import CallSignature, CoreDispatch, CoreInputs, CoreSteps
from .bound_parts import PartWeights
from .interfaces.core_types import Probe, QueryContext
from .masking.sequence_info import AttentionMask, SequenceInfo
from .presets import design_core
from .spec.attention_spec import AttentionSpec

MAX_PLANS = 1024


class AttendOptions(TypedDict, total=False):
    """Keyword arguments of `attend`."""

    causal: bool
    scale: float | None
    dropout: float | nn.Dropout | None
    need_weights: bool


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Unpack[AttendOptions],
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale * query key^T + bias) value, and the weights if `need_weights`, else None.

    Shapes are [B, H, T, K], [B, G, S, K] and [B, G, S, V], where H is a multiple of G; for one head
    also without H, or without B and H. `mask` is True or 1 where a query may attend to a key;
    `bias` is added to the scores. Both broadcast to [B, H, T, S]. With `causal`, the last query
    sees all keys. `scale` is 1/sqrt(K) unless given. `dropout` is a probability, or a module with
    a training mode. A query that may attend to nothing gets zeros. Weights and biases
    need all scores in memory; other calls run on the first backend that supports them.

    >>> q, k, v = torch.randn(3, 2, 8, 5, 16)
    >>> output, weights = attend(q, k, v, mask=torch.ones(5, 5).tril(), need_weights=True)
    >>> output.shape, weights.shape
    (torch.Size([2, 8, 5, 16]), torch.Size([2, 8, 5, 5]))
    """
    _check_tensors(query, key, value)
    unknown = sorted(set(options) - set(AttendOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"attend has no {unknown[0]!r}; {suggest(unknown[0], AttendOptions.__annotations__)}"
        )
    dims = query.dim()
    causal = options.get("causal", False)
    need_weights = options.get("need_weights", False)
    dropout = _dropout_probability(options.get("dropout"))
    q, k, v = (_with_heads(tensor) for tensor in (query, key, value))
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if causal and shape[2] > shape[3]:
        raise ValueError(
            f"causal attention of {shape[2]} queries needs as many keys; here are {shape[3]}"
        )
    allowed = (
        None if mask is None else _broadcastable("mask", mask, dims, shape).to(q.device, torch.bool)
    )
    probe = _make_probe(
        None if bias is None else _broadcastable("bias", bias, dims, shape), need_weights
    )
    sizes = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    choices = (causal, options.get("scale"), dropout)
    plan = _find_plan(sizes, choices, _signature(q, allowed, probe, training=dropout > 0))
    o = _run_core(plan, (q, k, v), allowed, probe)
    weights = None if probe is None else probe.tensors.get("weights")
    return _without_heads(o.transpose(1, 2), dims), None if weights is None else _without_heads(
        weights, dims
    )


class CorePlan(NamedTuple):
    """How one kind of call runs."""

    spec: AttentionSpec
    dispatch: CoreDispatch
    steps: CoreSteps
    scale: float


_plans: dict[tuple[object, ...], CorePlan] = {}


def _find_plan(
    sizes: tuple[int, int, int, int],
    choices: tuple[bool, float | None, float],
    signature: dict[str, object],
) -> CorePlan:
    """Return how calls of this kind run.

    `sizes` are the query heads, key-value heads, and channels of queries and of values; `choices`
    the arguments causal, scale and dropout.
    """
    key = (sizes, choices, *signature.values())
    if key in _plans:
        return _plans[key]
    causal, scale, dropout = choices
    spec = design_core(sizes, causal=causal, scale=scale, dropout=dropout)
    core = spec.core_of(spec.projection_form(False))
    call = CallSignature(spec, core, **signature)  # pyright: ignore[reportArgumentType] - a dict
    parts = {name: part for name, part in spec.parts() if name not in ("project", "output")}
    weights = {name: PartWeights(spec, part).train(dropout > 0) for name, part in parts.items()}
    steps = CoreSteps.from_spec(spec, weights)
    dispatch = backends.make_dispatch(call)
    plan = CorePlan(spec, dispatch, steps, spec.similarity.score_scale(call.core))
    if not call.is_compiling:  # a plan made in a graph would be a new constant, and recompile it
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _signature(
    q_BHTK: Tensor, mask: Tensor | None, probe: Probe | None, training: bool
) -> dict[str, object]:
    """The properties besides the spec that decide the backend."""
    return {
        "device": q_BHTK.device.type,
        "dtype": q_BHTK.dtype,
        "grad_enabled": torch.is_grad_enabled(),
        "single_query": q_BHTK.shape[2] == 1,
        "has_caller_mask": mask is not None,
        "training": training,
        "probed_tensors": frozenset[str]() if probe is None else probe.points,
        "is_compiling": torch.compiler.is_compiling(),
        "is_transformed": is_under_functorch(),
    }


def _run_core(
    plan: CorePlan, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, probe: Probe | None
) -> Tensor:
    """Head outputs o [B, T, H, V] of q, k and v [B, heads, tokens, channels]."""
    q_BTHK, k_BSGK, v_BSGV = (tensor.transpose(1, 2) for tensor in tensors)
    num_queries = q_BTHK.shape[1]
    num_keys = k_BSGK.shape[1]
    queries = SequenceInfo.contiguous(max(num_keys - num_queries, 0), num_queries, q_BTHK.device)
    keys = SequenceInfo.contiguous(0, num_keys, q_BTHK.device)
    x_BTD = q_BTHK[:, :, 0]  # there is no layer input, and no part of these specs reads one
    context = QueryContext(x_BTD, q_BTHK, plan.scale, queries)
    own_mask = AttentionMask(queries, keys, plan.spec.pattern, mask)
    entry = {"k": k_BSGK, "v": v_BSGV}
    return plan.dispatch.attend(
        CoreInputs(q_BTHK, k_BSGK, v_BSGV, own_mask, plan.steps, context, entry, probe)
    )


def _make_probe(bias: Tensor | None, need_weights: bool) -> Probe | None:
    """Adds the bias to the scores, and keeps the weights."""
    points = [*(["scores"] if bias is not None else []), *(["weights"] if need_weights else [])]
    if not points:
        return None
    probe = Probe(*points)
    probe.callback = partial(_change_or_keep, probe, bias)
    return probe


def _change_or_keep(probe: Probe, bias: Tensor | None, point: str, tensor: Tensor) -> Tensor | None:
    if point == "scores" and bias is not None:
        return tensor + bias
    probe.tensors[point] = tensor
    return None


def _with_heads(tensor: Tensor) -> Tensor:
    """[B, H, tokens, channels] of a tensor that may lack H, or B and H."""
    return tensor[:, None] if tensor.dim() == 3 else tensor[(None,) * (4 - tensor.dim())]


def _without_heads(tensor: Tensor, dims: int) -> Tensor:
    return tensor if dims == 4 else tensor[:, 0] if dims == 3 else tensor[0, 0]


def _dropout_probability(dropout: float | nn.Dropout | None) -> float:
    """The dropout probability: of a module only in training mode; 0 for None."""
    if isinstance(dropout, nn.Dropout):
        return dropout.p if dropout.training else 0.0
    return 0.0 if dropout is None else dropout


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not 2 <= query.dim() <= 4 or {query.dim()} != {key.dim(), value.dim()}:
        raise ValueError(
            f"{shapes}: give each as [batch, heads, tokens, channels], or all without heads or "
            "batch"
        )
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{shapes}: queries and keys need equal channels, keys and values equal other sizes"
        )
    if query.dim() == 4 and (key.shape[1] == 0 or query.shape[1] % key.shape[1]):
        raise ValueError(
            f"{shapes}: {query.shape[1]} query heads are not a multiple of {key.shape[1]} "
            "key-value heads"
        )
    if query.dim() > 2 and query.shape[0] != key.shape[0]:
        raise ValueError(f"{shapes}: the batches have different sizes")
    if not query.is_floating_point() or {query.dtype} != {key.dtype, value.dtype}:
        dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        raise ValueError(f"{dtypes}: give three tensors of one floating-point dtype")


def _broadcastable(
    name: str, tensor: Tensor, dims: int, shape: tuple[int, int, int, int]
) -> Tensor:
    """A mask or bias as [B or 1, H or 1, T or 1, S or 1]; one of three dimensions has no heads."""
    if (
        name == "mask"
        and tensor.is_floating_point()
        and not bool(((tensor == 0) | (tensor == 1)).all())
    ):
        raise ValueError(
            "mask has values other than 0 and 1; give additive values as bias=, or a mask of "
            "booleans"
        )
    expanded = (
        tensor[:, None]
        if tensor.dim() == 3
        else tensor.reshape((1,) * (4 - tensor.dim()) + tensor.shape)
    )
    if tensor.dim() > 4 or any(
        have not in (1, want) for have, want in zip(expanded.shape, shape, strict=True)
    ):
        target = (
            list(shape)
            if dims == 4
            else list(shape[-dims:])
            if dims == 2
            else [shape[0], *shape[2:]]
        )
        raise ValueError(
            f"{name} {list(tensor.shape)} does not broadcast to {target}; give it one of these "
            "sizes, or 1"
        )
    return expanded
