"""Formulas held against the thing itself: a small layer is built, run and watched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from . import counting
from .counting import bills
from .errors import SpecError
from .module import Attention
from .spec import AttentionSpec
from .terms import Work

BATCH, TOKENS = 2, 11


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
    """Every formula against a layer of this spec, made small: parameters, products, gradients, cache.

    Products are those of the plain backend, which torch's counter sees one by one.

    >>> import headwise as hw
    >>> all(check.holds for check in audit(hw.design(preset="mla")))
    True
    """
    spec = small(spec)
    layer = Attention(spec, backend="dense")
    checks = [
        Check("parameters", counting.params(spec), sum(p.numel() for p in layer.parameters())),
        Check("constants", counting.constants(spec), sum(b.numel() for b in layer.buffers())),
        *_products(spec, layer),
    ]
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


def _products(spec: AttentionSpec, layer: Attention) -> Iterator[Check]:
    x = torch.randn(BATCH, TOKENS, spec.model, requires_grad=True)
    z = None if spec.source is None else torch.randn(BATCH, TOKENS + 2, spec.source, requires_grad=True)
    keys = TOKENS if z is None else TOKENS + 2
    work = Work(BATCH, TOKENS, keys, keys)
    with FlopCounterMode(display=False) as counter:
        y = layer(x, source=z)
        ahead = counter.get_total_flops()
        y.sum().backward()
    yield Check("prefill, FLOP", bills.forward(spec, work).total, ahead)
    yield Check("its gradients, FLOP", bills.backward(spec, work).total, counter.get_total_flops() - ahead)


def _cached(spec: AttentionSpec) -> Iterator[Check]:
    layer, one = Attention(spec), torch.randn(BATCH, 1, spec.model)
    cache = layer.cache(batch=BATCH, capacity=TOKENS)
    yield Check("cache, bytes", counting.cache_bytes(spec, batch=BATCH, capacity=TOKENS), cache.nbytes)
    if spec.stateful:
        return  # a state's own updates are elementwise, which torch's counter does not see
    layer.only = "dense"
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for _ in range(TOKENS):
            before = counter.get_total_flops()
            layer(one, cache=cache)
    first, last = spec.pattern.memory
    slots = TOKENS if last is None else min(TOKENS, first + last)
    step = bills.forward(spec, Work(BATCH, 1, 1, slots)).total
    yield Check("a decoding step, FLOP", step, counter.get_total_flops() - before)
