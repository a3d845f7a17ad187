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

from . import counting
from .backends import Job, sdpa
from .counting import bills
from .counting.checkpoints import fused_backward
from .counting.keeping import activations, fuses, refused
from .counting.pricing import Load
from .counting.watching import Watch
from .errors import SpecError
from .module import Attention
from .spec import AttentionSpec
from .terms import Work

BATCH, TOKENS = 2, 11
PRODUCT = re.compile(
    r"attention|transformer|(^|_)(mm|bmm|addmm|baddbmm|addbmm|matmul|mv|addmv|dot|vdot|ger|addr|linear|bilinear"
    r"|convolution)(_|$)"
)


class Uncounted(ValueError):
    """Something that multiplies matrices, of which nobody knows how many FLOPs it has."""


def _forth(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (dim + v[-1])


def _back(grad: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Scores once more and the gradients of queries and keys; those of weights and values."""
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (3 * dim + 2 * v[-1])


_ATEN = torch.ops.aten
# What torch's own counter leaves out: the CPU's fused kernel and its gradients.
FUSED: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forth,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _back,
}


class Guard(TorchDispatchMode):
    """Refuses operations that look like a product but have no formula: a silent zero would look like a saving."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        packet = func._overloadpacket
        if PRODUCT.search(packet.__name__) and packet not in flop_registry and packet not in FUSED:
            raise Uncounted(f"{packet} multiplies but has no formula; add one to auditing.FUSED, or run it otherwise")
        return func(*args, **(kwargs or {}))


@contextmanager
def counter() -> Iterator[FlopCounterMode]:
    """torch's counter, with the CPU's fused kernel, and an error where it would count a product as nothing.

    >>> import torch.nn.functional as F
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with counter() as counted:
    ...     _ = F.scaled_dot_product_attention(q, q, q)
    >>> counted.get_total_flops()  # 2 products of 5 x 5 x 8 for each of 2 heads
    1600
    """
    missing = {packet: formula for packet, formula in FUSED.items() if packet not in flop_registry}
    with Guard(), FlopCounterMode(display=False, custom_mapping=missing) as counted:
        yield counted


class Check(NamedTuple):
    """One quantity, as the formula has it and as it was measured."""

    what: str
    formula: int
    measured: int

    @property
    def holds(self) -> bool:
        """Whether the two are equal, to the last one."""
        return self.formula == self.measured


def audit(spec: AttentionSpec) -> list[Check]:
    """Every formula against a layer of this spec, made small: parameters, products, gradients, what is kept, cache.

    First in plain operations, of which torch's counter sees every one; then fused, where the spec can be.

    >>> import headwise as hw
    >>> all(check.holds for check in audit(hw.design(preset="mla")))
    True
    """
    spec = small(spec)
    layer = Attention(spec, backend="dense")
    checks = [
        Check("parameters", counting.params(spec), sum(p.numel() for p in layer.parameters())),
        Check("constants", counting.constants(spec), sum(b.numel() for b in layer.buffers())),
        *_trained(spec, layer, "dense"),
    ]
    if not refused(spec):
        checks += _trained(spec, Attention(spec, backend="sdpa"), "sdpa")
    return [*checks, *_cached(spec)] if spec.pattern.opening == 0 and spec.source is None else checks


def small(spec: AttentionSpec) -> AttentionSpec:
    """The same spec in the smallest widths that its parts allow."""
    heads = spec.heads
    for dim in (4, 8, 16, 32, 64):
        wide = {"dim": dim, "vdim": max(1, heads.vdim * dim // heads.dim)}
        try:
            fewer = replace(heads, **wide)
            for _, part in spec.parts():
                fewer = part.widened(fewer)
            return replace(spec, model=min(spec.model, 24), heads=fewer, source=spec.source and min(spec.source, 20))
        except SpecError:
            continue
    return spec


def _trained(spec: AttentionSpec, layer: Attention, profile: str) -> Iterator[Check]:
    """One step of training, watched: products forth and back, and what is kept between."""
    x, z = _inputs(spec)
    keys = TOKENS if z is None else TOKENS + 2
    work = Work(BATCH, TOKENS, keys, keys)
    with counter() as counted, Watch.over(layer) as watch:
        y = layer(x, source=z)
        ahead = counted.get_total_flops()
        y.sum().backward()
    forth, back = _expected(spec, work, profile)
    kept = activations(spec, Load(BATCH, TOKENS, "fp32", "cpu"), profile, source=None if z is None else keys)
    told = "" if profile == "dense" else f", {profile}"
    yield Check(f"prefill, FLOP{told}", forth, ahead)
    yield Check(f"its gradients, FLOP{told}", back, counted.get_total_flops() - ahead)
    yield Check(f"kept, bytes{told}", kept.total, watch.total)


def _inputs(spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(BATCH, TOKENS, spec.model, requires_grad=True)
    if spec.source is None:
        return x, None
    return x, torch.randn(BATCH, TOKENS + 2, spec.source, requires_grad=True)


def _expected(spec: AttentionSpec, work: Work, profile: str) -> tuple[int, int]:
    """FLOPs forth and back, as formulas; a sink of the fused call is a key more."""
    if profile == "dense":
        return bills.forward(spec, work).total, bills.backward(spec, work).total
    job = Job(spec, spec.core_of(spec.form(one=False)), grad=True, training=True)
    forth = counting.spent(spec, work, sdpa.spent(job, work))
    more = forth - bills.forward(spec, work).total
    if fuses(spec, "fp32"):
        return forth, fused_backward(spec, work).total
    return forth, bills.backward(spec, work).total + 2 * more


def _cached(spec: AttentionSpec) -> Iterator[Check]:
    layer, one = Attention(spec), torch.randn(BATCH, 1, spec.model)
    cache = layer.cache(batch=BATCH, capacity=TOKENS)
    yield Check("cache, bytes", counting.cache_bytes(spec, batch=BATCH, capacity=TOKENS), cache.nbytes)
    if spec.stateful:
        return  # a state's own updates are elementwise, which torch's counter does not see
    layer.only = "dense"
    with torch.no_grad(), counter() as counted:
        for _ in range(TOKENS):
            before = counted.get_total_flops()
            layer(one, cache=cache)
    first, last = spec.pattern.memory
    slots = TOKENS if last is None else min(TOKENS, first + last)
    step = bills.forward(spec, Work(BATCH, 1, 1, slots)).total
    yield Check("a decoding step, FLOP", step, counted.get_total_flops() - before)
