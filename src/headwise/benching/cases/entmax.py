"""Sparse weights: rows of scores by entmax of several alphas, and whole cores that read values with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...module import Attention
from ...presets import design
from ..case import Absent, Aim, Case, Need, Run
from ..others import given
from .composed import DIM, HEADS, Core

TITLE = "Entmax: 4,096 rows of 1,024 scores, and cores of 16 heads of 64, causal"
ROWS, KEYS, TOKENS = 4096, 1024, 1024
PACKAGE, BISECT, SOFTMAX = "entmax package (entmax15)", "entmax package (entmax_bisect)", "softmax, for scale"
FLASH = "softmax, SDPA, for scale"
Weigh = Callable[[Tensor], Tensor]


def cases(quick: bool) -> Iterator[Case]:
    """Forward, and forward with backward: by the kernel, in plain tensor operations, and these compiled; then cores."""
    layer = Attention(design(preset="entmax", model=64, heads=1))
    part, p = layer.spec.normaliser, layer.weights["normaliser"]
    allowed = torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    ways: list[tuple[str, Weigh, float]] = [
        ("alpha 1.5 by the kernel", lambda s: part.fused(s, allowed, p), 20.0),
        ("alpha 1.5, plain tensor operations", lambda s: part.normalise(s, allowed, p), 2.0),
    ]
    if not quick and any(map(shutil.which, ("c++", "g++", "clang++"))):
        plain: Any = torch.compile(part.normalise, dynamic=False)
        ways.append(("alpha 1.5, plain tensor operations compiled", lambda s: plain(s, allowed, p), 20.0))
    for name, weigh, times in ways:
        for backward in (False, True):
            yield _fixed(name, weigh, times, backward)
    for backward in () if quick else (False, True):
        yield _learned(backward)
    for backward in (False, True):
        yield _core(backward)


class Rows(NamedTuple):
    """Scores, and the gradient of what is made of them."""

    s: Tensor
    grad: Tensor

    @staticmethod
    def of(heads: int) -> Rows:
        """All rows, evenly over so many heads."""
        torch.manual_seed(0)
        return Rows(*(torch.randn(1, heads, ROWS // heads, KEYS) for _ in range(2)))

    def run(self, weigh: Weigh, backward: bool, *learned: Tensor) -> Run:
        """Weights, or the gradients of scores and of what is learned."""
        if not backward:
            return lambda: weigh(self.s)
        leaves = [self.s.clone().requires_grad_(), *learned]
        return lambda: torch.autograd.grad(weigh(leaves[0]), leaves, self.grad)

    def need(self, backward: bool) -> Need:
        """Scores are read; on the way back weights and their gradients too."""
        return Need(reads=self.s.nbytes * (3 if backward else 1))


def _fixed(name: str, ours: Weigh, times: float, backward: bool) -> Case:
    rows = Rows.of(1)
    peers: dict[str, Run | Absent] = {
        PACKAGE: given("entmax", lambda library: rows.run(lambda s: library.entmax15(s, dim=-1), backward)),
        BISECT: given("entmax", lambda library: rows.run(lambda s: library.entmax_bisect(s, 1.5), backward)),
        SOFTMAX: rows.run(lambda s: s.softmax(-1), backward),
    }
    aims, need = (Aim(PACKAGE, times),), rows.need(backward)
    return Case(_title(name, backward), rows.run(ours, backward), peers, aims, need, beside=(SOFTMAX,))


def _learned(backward: bool) -> Case:
    """An alpha for each of 16 heads, from 1.05 to 1.95, with the gradient in it."""
    fixed = design(preset="entmax", model=HEADS * DIM, heads=HEADS)
    part, rows = replace(fixed.normaliser, kind="learned"), Rows.of(HEADS)
    layer = Attention(replace(fixed, normaliser=part))
    p, allowed = layer.weights["normaliser"], torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    with torch.no_grad():
        p["a"].copy_(torch.logit(torch.linspace(0.05, 0.95, HEADS)))

    def alpha() -> Tensor:
        return (1 + p["a"].sigmoid())[:, None, None]

    learned = (p["a"],)
    peers: dict[str, Run | Absent] = {
        BISECT: given(
            "entmax", lambda library: rows.run(lambda s: library.entmax_bisect(s, alpha()), backward, *learned)
        ),
        "plain tensor operations": rows.run(lambda s: part.normalise(s, allowed, p), backward, *learned),
        SOFTMAX: rows.run(lambda s: s.softmax(-1), backward),
    }
    ours = rows.run(lambda s: part.fused(s, allowed, p), backward, *learned)
    name, aims, need = "alpha learned by 16 heads, by the kernel", (Aim(BISECT, 20.0),), rows.need(backward)
    return Case(_title(name, backward), ours, peers, aims, need, beside=(SOFTMAX,))


def _core(backward: bool) -> Case:
    """Scores to per-head outputs; the others form all weights and multiply them with all values."""
    core = Core(design(preset="entmax", model=HEADS * DIM, heads=HEADS, pattern="causal()"), TOKENS)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def read(weigh: Weigh) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in core.qkv)
        return (weigh((q @ k.mT * DIM**-0.5).masked_fill(later, -torch.inf)) @ v).transpose(1, 2)

    def flash() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in core.qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def run(made: Callable[[], Tensor]) -> Run:
        return (lambda: torch.autograd.grad(made(), core.qkv, core.grad)) if backward else torch.no_grad()(made)

    peers: dict[str, Run | Absent] = {
        PACKAGE: given("entmax", lambda library: run(lambda: read(lambda s: library.entmax15(s, dim=-1)))),
        FLASH: run(flash),
    }
    products = core.job.core.flops(TOKENS * (TOKENS + 1) // 2) // 2  # of scores alone: values of few keys are read
    aims, need = (Aim(PACKAGE, 2.0),), Need(flops=(4 if backward else 1) * products)
    name = f"core, alpha 1.5, {TOKENS:,} tokens"
    notes = {"memory": f"keeps {core.kept() / 1e6:.1f} MB for the way back"} if backward else {}
    return Case(_title(name, backward), run(core.run), peers, aims, need, beside=(FLASH,), notes=notes)


def _title(name: str, backward: bool) -> str:
    return f"{name}, {'forward and backward' if backward else 'forward'}"
