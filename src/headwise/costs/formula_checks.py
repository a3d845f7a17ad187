"""A check of every formula against a small layer that runs: parameters, FLOPs, saved bytes, cache."""

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
from ..attention.attention import Attention
from ..attention.backends import sdpa
from ..attention.interfaces.core_types import CallSize
from ..attention.spec.attention_spec import AttentionSpec
from ..util.errors import SpecError
from . import flops
from .activations import (
    fused_unsupported_reason,
    is_fused_on_cpu,
    layer_activation_memory,
    training_signature,
)
from .saved_tensors import SavedTensorRecorder
from .workload import Workload

BATCH = 2
TOKENS = 11
PRODUCT_OPERATION = re.compile(
    r"attention|transformer|(^|_)(mm|bmm|addmm|baddbmm|addbmm|matmul|mv|addmv|dot|vdot|ger|addr|linear|bilinear"
    r"|convolution)(_|$)"
)


class UncountedOperation(ValueError):
    """An operation multiplies matrices, but neither torch nor this module has a FLOP formula for
    it.
    """


def _sdpa_forward_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (dim + v[-1])


def _backward_flops(
    grad: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """FLOPs of recomputed scores and of gradients of queries, keys (3 dim), weights and values (2
    vdim).
    """
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (3 * dim + 2 * v[-1])


_ATEN = torch.ops.aten
# Operations that torch's counter has no formula for: the CPU's flash attention and its backward
# pass.
FUSED_FLOPS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


class UncountedGuard(TorchDispatchMode):
    """Raises an error for operations that look like a matrix product but have no FLOP formula.

    Counting such an operation as zero would look like a saving.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet = func._overloadpacket
        if (
            PRODUCT_OPERATION.search(packet.__name__)
            and packet not in flop_registry
            and packet not in FUSED_FLOPS
        ):
            raise UncountedOperation(
                f"{packet} multiplies but has no formula; add one to "
                "headwise.costs.formula_checks.FUSED_FLOPS"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """torch's `FlopCounterMode` extended by the CPU's flash attention; it raises an error for
    uncounted products.

    >>> import torch.nn.functional as F
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with flop_counter() as counter:
    ...     _ = F.scaled_dot_product_attention(q, q, q)
    >>> counter.get_total_flops()  # 2 products of 5 x 5 x 8 for each of 2 heads
    1600
    """
    missing = {
        packet: formula for packet, formula in FUSED_FLOPS.items() if packet not in flop_registry
    }
    with UncountedGuard(), FlopCounterMode(display=False, custom_mapping=missing) as counter:
        yield counter


class FormulaCheck(NamedTuple):
    """One quantity: its name, the value of the formula, and the measured value."""

    what: str
    formula: int
    measured: int

    @property
    def holds(self) -> bool:
        """Whether the two values are exactly equal."""
        return self.formula == self.measured


def check_formulas(spec: AttentionSpec) -> list[FormulaCheck]:
    """Compare every formula with a small layer of this spec: parameters, FLOPs, saved tensors and
    cache.

    The layer runs with the dense backend, whose operations torch's counter sees one by one, and
    with `sdpa` if that supports the spec.

    >>> import headwise as hw
    >>> all(check.holds for check in check_formulas(hw.design(preset="mla")))
    True
    """
    spec = shrink_spec(spec)
    layer = Attention(spec, backend="dense")
    checks = [
        FormulaCheck(
            "parameters", costs.count_parameters(spec), sum(p.numel() for p in layer.parameters())
        ),
        FormulaCheck(
            "constants", costs.count_constants(spec), sum(b.numel() for b in layer.buffers())
        ),
        *_check_training_step(spec, layer, "dense"),
    ]
    if not fused_unsupported_reason(spec):
        checks += _check_training_step(spec, Attention(spec, backend="sdpa"), "sdpa")
    if spec.pattern.tokens_before_decode == 0 and spec.source is None:
        checks += _check_decoding(spec)
    return checks


def shrink_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec with the smallest head dimensions that its parts allow, and a model dimension
    of at most 24.
    """
    heads = spec.heads
    for dim in (4, 8, 16, 32, 64):
        try:
            small_heads = replace(heads, dim=dim, vdim=max(1, heads.vdim * dim // heads.dim))
            for _, part in spec.parts():
                small_heads = part.widen_heads(small_heads)
            source = spec.source and min(spec.source, 20)
            return replace(spec, model=min(spec.model, 24), heads=small_heads, source=source)
        except SpecError:
            continue
    return spec


def _check_training_step(
    spec: AttentionSpec, layer: Attention, profile: str
) -> Iterator[FormulaCheck]:
    """Run one training step; check the FLOPs of both passes and the bytes saved between them."""
    x, source = _inputs(spec)
    keys = TOKENS if source is None else TOKENS + 2
    work = CallSize(BATCH, TOKENS, keys, keys)
    with flop_counter() as counter, SavedTensorRecorder.for_module(layer) as recorder:
        y = layer(x, source=source)
        measured_forward = counter.get_total_flops()
        y.sum().backward()
    forward, backward = _expected_flops(spec, work, profile)
    saved = layer_activation_memory(
        spec,
        Workload(BATCH, TOKENS, "fp32", "cpu"),
        profile,
        source=None if source is None else keys,
    )
    suffix = "" if profile == "dense" else f", {profile}"
    yield FormulaCheck(f"forward FLOPs{suffix}", forward, measured_forward)
    yield FormulaCheck(
        f"backward FLOPs{suffix}", backward, counter.get_total_flops() - measured_forward
    )
    yield FormulaCheck(f"saved bytes{suffix}", saved.total, recorder.total_bytes)


def _inputs(spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(BATCH, TOKENS, spec.model, requires_grad=True)
    if spec.source is None:
        return x, None
    return x, torch.randn(BATCH, TOKENS + 2, spec.source, requires_grad=True)


def _expected_flops(spec: AttentionSpec, work: CallSize, profile: str) -> tuple[int, int]:
    """FLOPs of the forward and backward pass by formula; with `sdpa`, an attention sink is one more
    key.
    """
    if profile == "dense":
        return flops.forward_flops(spec, work).total, flops.backward_flops(spec, work).total
    signature = training_signature(spec)
    forward = costs.executed_flops(spec, work, sdpa.executed_flops(signature, work))
    sink_flops = forward - flops.forward_flops(spec, work).total
    if is_fused_on_cpu(spec, "fp32"):
        return forward, fused_backward_flops(spec, work).total
    return forward, flops.backward_flops(spec, work).total + 2 * sink_flops


def fused_backward_flops(spec: AttentionSpec, work: CallSize) -> flops.CostBreakdown:
    """FLOPs of the backward pass with a fused kernel, which recomputes the scores: 5 products
    instead of 4.

    The core has 2 B q T S (3 dim + 2 vdim) (flash attention, 2205.14135), with plain operations 4 B
    q T S (dim + vdim):

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.CallSize(1, 5, 5, 5)
    >>> fused_backward_flops(spec, work).total - flops.backward_flops(
    ...     spec, work
    ... ).total == 2 * 2 * 5 * 5 * 4
    True
    """
    multiples = {"core (scores)": 3, "core (values)": 2}  # of the forward product
    products = flops.list_products(flops.spec_as_executed(spec, work), work)
    return flops.CostBreakdown.from_items(
        (product.name, multiples.get(product.name, product.num_grad_factors) * product.flops)
        for product in products
    )


def _check_decoding(spec: AttentionSpec) -> Iterator[FormulaCheck]:
    """Decode token by token; check the bytes of the cache and the FLOPs of the last step."""
    layer = Attention(spec)
    x = torch.randn(BATCH, 1, spec.model)
    cache = layer.cache(batch=BATCH, capacity=TOKENS)
    yield FormulaCheck(
        "cache bytes", costs.cache_bytes(spec, batch=BATCH, capacity=TOKENS), cache.nbytes
    )
    if spec.is_recurrent:
        return  # updates of a recurrent state are elementwise, which torch's counter does not count
    layer.backend_name = "dense"
    with torch.no_grad(), flop_counter() as counter:
        for _ in range(TOKENS):
            before = counter.get_total_flops()
            layer(x, cache=cache)
    first, last = spec.pattern.retention
    slots = TOKENS if last is None else min(TOKENS, first + last)
    step = flops.forward_flops(spec, CallSize(BATCH, 1, 1, slots)).total
    yield FormulaCheck("decode step FLOPs", step, counter.get_total_flops() - before)
