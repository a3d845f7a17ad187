"""Formulas held against the thing itself: a small layer is built, run and watched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .. import costs
from ..backends import CallSignature, sdpa
from ..errors import SpecError
from ..interfaces.core_types import CallSize
from ..nn.attention import Attention
from ..spec.attention_spec import AttentionSpec
from . import flops
from .activations import fused_unsupported_reason, is_fused_on_cpu, layer_activation_memory
from .cost_report import Workload
from .saved_tensors import SavedTensorRecorder
from .training_memory import fused_backward_flops

BATCH, TOKENS = 2, 11
PRODUCT_OPERATION = re.compile(
    r"attention|transformer|(^|_)(mm|bmm|addmm|baddbmm|addbmm|matmul|mv|addmv|dot|vdot|ger|addr|linear|bilinear"
    r"|convolution)(_|$)"
)


class UncountedOperation(ValueError):
    """Something that multiplies matrices, of which nobody knows how many FLOPs it has."""


def _forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (dim + v[-1])


def _backward_flops(grad: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Scores once more and the gradients of queries and keys; those of weights and values."""
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (3 * dim + 2 * v[-1])


_ATEN = torch.ops.aten
# What torch's own counter leaves out: the CPU's fused kernel and its gradients.
FUSED_FLOPS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


class UncountedGuard(TorchDispatchMode):
    """Refuses operations that look like a product but have no formula: a silent zero would look like a saving."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        packet = func._overloadpacket
        if PRODUCT_OPERATION.search(packet.__name__) and packet not in flop_registry and packet not in FUSED_FLOPS:
            raise UncountedOperation(
                f"{packet} multiplies but has no formula; add one to auditing.FUSED, or run it otherwise"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """torch's counter, with the CPU's fused kernel, and an error where it would count a product as nothing.

    >>> import torch.nn.functional as F
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with flop_counter() as counted:
    ...     _ = F.scaled_dot_product_attention(q, q, q)
    >>> counted.get_total_flops()  # 2 products of 5 x 5 x 8 for each of 2 heads
    1600
    """
    missing = {packet: formula for packet, formula in FUSED_FLOPS.items() if packet not in flop_registry}
    with UncountedGuard(), FlopCounterMode(display=False, custom_mapping=missing) as counted:
        yield counted


class FormulaCheck(NamedTuple):
    """One quantity, as the formula has it and as it was measured."""

    what: str
    formula: int
    measured: int

    @property
    def holds(self) -> bool:
        """Whether the two are equal, to the last one."""
        return self.formula == self.measured


def check_formulas(spec: AttentionSpec) -> list[FormulaCheck]:
    """Every formula against a layer of this spec, made small: parameters, products, gradients, what is kept, cache.

    First in plain operations, of which torch's counter sees every one; then fused, where the spec can be.

    >>> import headwise as hw
    >>> all(check.holds for check in check_formulas(hw.design(preset="mla")))
    True
    """
    spec = shrink_spec(spec)
    layer = Attention(spec, backend="dense")
    checks = [
        FormulaCheck("parameters", costs.count_parameters(spec), sum(p.numel() for p in layer.parameters())),
        FormulaCheck("constants", costs.count_constants(spec), sum(b.numel() for b in layer.buffers())),
        *_trained(spec, layer, "dense"),
    ]
    if not fused_unsupported_reason(spec):
        checks += _trained(spec, Attention(spec, backend="sdpa"), "sdpa")
    return [*checks, *_cached(spec)] if spec.pattern.tokens_before_decode == 0 and spec.source is None else checks


def shrink_spec(spec: AttentionSpec) -> AttentionSpec:
    """The same spec in the smallest widths that its parts allow."""
    heads = spec.heads
    for dim in (4, 8, 16, 32, 64):
        wide = {"dim": dim, "vdim": max(1, heads.vdim * dim // heads.dim)}
        try:
            fewer = replace(heads, **wide)
            for _, part in spec.parts():
                fewer = part.widen_heads(fewer)
            return replace(spec, model=min(spec.model, 24), heads=fewer, source=spec.source and min(spec.source, 20))
        except SpecError:
            continue
    return spec


def _trained(spec: AttentionSpec, layer: Attention, profile: str) -> Iterator[FormulaCheck]:
    """One step of training, watched: products forth and back, and what is kept between."""
    x, z = _inputs(spec)
    keys = TOKENS if z is None else TOKENS + 2
    work = CallSize(BATCH, TOKENS, keys, keys)
    with flop_counter() as counted, SavedTensorRecorder.for_module(layer) as watch:
        y = layer(x, source=z)
        ahead = counted.get_total_flops()
        y.sum().backward()
    forth, back = _expected(spec, work, profile)
    kept = layer_activation_memory(
        spec, Workload(BATCH, TOKENS, "fp32", "cpu"), profile, source=None if z is None else keys
    )
    told = "" if profile == "dense" else f", {profile}"
    yield FormulaCheck(f"prefill, FLOP{told}", forth, ahead)
    yield FormulaCheck(f"its gradients, FLOP{told}", back, counted.get_total_flops() - ahead)
    yield FormulaCheck(f"kept, bytes{told}", kept.total, watch.total_bytes)


def _inputs(spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(BATCH, TOKENS, spec.model, requires_grad=True)
    if spec.source is None:
        return x, None
    return x, torch.randn(BATCH, TOKENS + 2, spec.source, requires_grad=True)


def _expected(spec: AttentionSpec, work: CallSize, profile: str) -> tuple[int, int]:
    """FLOPs forth and back, as formulas; a sink of the fused call is a key more."""
    if profile == "dense":
        return flops.forward_flops(spec, work).total, flops.backward_flops(spec, work).total
    job = CallSignature(spec, spec.core_of(spec.projection_form(one=False)), needs_grad=True, training=True)
    forth = costs.executed_flops(spec, work, sdpa.executed_flops(job, work))
    more = forth - flops.forward_flops(spec, work).total
    if is_fused_on_cpu(spec, "fp32"):
        return forth, fused_backward_flops(spec, work).total
    return forth, flops.backward_flops(spec, work).total + 2 * more


def _cached(spec: AttentionSpec) -> Iterator[FormulaCheck]:
    layer, one = Attention(spec), torch.randn(BATCH, 1, spec.model)
    cache = layer.cache(batch=BATCH, capacity=TOKENS)
    yield FormulaCheck("cache, bytes", costs.cache_bytes(spec, batch=BATCH, capacity=TOKENS), cache.nbytes)
    if spec.is_recurrent:
        return  # a state's own updates are elementwise, which torch's counter does not see
    layer.backend_name = "dense"
    with torch.no_grad(), flop_counter() as counted:
        for _ in range(TOKENS):
            before = counted.get_total_flops()
            layer(one, cache=cache)
    first, last = spec.pattern.retention
    slots = TOKENS if last is None else min(TOKENS, first + last)
    step = flops.forward_flops(spec, CallSize(BATCH, 1, 1, slots)).total
    yield FormulaCheck("a decoding step, FLOP", step, counted.get_total_flops() - before)
