"""Sparse weights: rows of scores by entmax of several alphas, and whole cores that read values with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn.attention import Attention
from ...presets import design
from ..benchmark_case import BenchmarkCase, MissingPeer, RequiredWork, SpeedTarget, TimedCall, make_peer
from .head_composition import HEAD_DIM, NUM_HEADS, MixedHeadCore

TITLE = "Entmax: 4,096 rows of 1,024 scores, and cores of 16 heads of 64, causal"
NUM_ROWS, NUM_KEYS, NUM_CORE_TOKENS = 4096, 1024, 1024
ENTMAX15_PACKAGE, ENTMAX_BISECT_PACKAGE, SOFTMAX_BASELINE = (
    "entmax package (entmax15)",
    "entmax package (entmax_bisect)",
    "softmax, for scale",
)
SOFTMAX_SDPA = "softmax, SDPA, for scale"
WeightFunction = Callable[[Tensor], Tensor]


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Forward, and forward with backward: by the kernel, in plain tensor operations, and these compiled; then cores."""
    layer = Attention(design(preset="entmax", model=64, heads=1))
    part, p = layer.spec.normaliser, layer.weights["normaliser"]
    allowed = torch.ones(1, 1, 1, NUM_KEYS, dtype=torch.bool)
    ways: list[tuple[str, WeightFunction, float]] = [
        ("alpha 1.5 by the kernel", lambda s: part.fused_normalise(s, allowed, p), 20.0),
        ("alpha 1.5, plain tensor operations", lambda s: part.normalise(s, allowed, p), 2.0),
    ]
    if not quick and any(map(shutil.which, ("c++", "g++", "clang++"))):
        plain: Any = torch.compile(part.normalise, dynamic=False)
        ways.append(("alpha 1.5, plain tensor operations compiled", lambda s: plain(s, allowed, p), 20.0))
    for name, weigh, times in ways:
        for backward in (False, True):
            yield _fixed_alpha_case(name, weigh, times, backward)
    for backward in () if quick else (False, True):
        yield _learned_alpha_case(backward)
    for backward in (False, True):
        yield _entmax_core_case(backward)


class ScoreRows(NamedTuple):
    """Scores, and the gradient of what is made of them."""

    s: Tensor
    grad: Tensor

    @staticmethod
    def with_heads(heads: int) -> ScoreRows:
        """All rows, evenly over so many heads."""
        torch.manual_seed(0)
        return ScoreRows(*(torch.randn(1, heads, NUM_ROWS // heads, NUM_KEYS) for _ in range(2)))

    def run(self, weigh: WeightFunction, backward: bool, *learned: Tensor) -> TimedCall:
        """Weights, or the gradients of scores and of what is learned."""
        if not backward:
            return lambda: weigh(self.s)
        leaves = [self.s.clone().requires_grad_(), *learned]
        return lambda: torch.autograd.grad(weigh(leaves[0]), leaves, self.grad)

    def required_work(self, backward: bool) -> RequiredWork:
        """Scores are read; on the way back weights and their gradients too."""
        return RequiredWork(bytes_read=self.s.nbytes * (3 if backward else 1))


def _fixed_alpha_case(name: str, ours: WeightFunction, times: float, backward: bool) -> BenchmarkCase:
    rows = ScoreRows.with_heads(1)
    peers: dict[str, TimedCall | MissingPeer] = {
        ENTMAX15_PACKAGE: make_peer(
            "entmax", lambda library: rows.run(lambda s: library.entmax15(s, dim=-1), backward)
        ),
        ENTMAX_BISECT_PACKAGE: make_peer(
            "entmax", lambda library: rows.run(lambda s: library.entmax_bisect(s, 1.5), backward)
        ),
        SOFTMAX_BASELINE: rows.run(lambda s: s.softmax(-1), backward),
    }
    aims, need = (SpeedTarget(ENTMAX15_PACKAGE, times),), rows.required_work(backward)
    return BenchmarkCase(
        _case_title(name, backward), rows.run(ours, backward), peers, aims, need, reported_peers=(SOFTMAX_BASELINE,)
    )


def _learned_alpha_case(backward: bool) -> BenchmarkCase:
    """An alpha for each of 16 heads, from 1.05 to 1.95, with the gradient in it."""
    fixed = design(preset="entmax", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS)
    part, rows = replace(fixed.normaliser, kind="learned"), ScoreRows.with_heads(NUM_HEADS)
    layer = Attention(replace(fixed, normaliser=part))
    p, allowed = layer.weights["normaliser"], torch.ones(1, 1, 1, NUM_KEYS, dtype=torch.bool)
    with torch.no_grad():
        p["a"].copy_(torch.logit(torch.linspace(0.05, 0.95, NUM_HEADS)))

    def alpha() -> Tensor:
        return (1 + p["a"].sigmoid())[:, None, None]

    learned = (p["a"],)
    peers: dict[str, TimedCall | MissingPeer] = {
        ENTMAX_BISECT_PACKAGE: make_peer(
            "entmax", lambda library: rows.run(lambda s: library.entmax_bisect(s, alpha()), backward, *learned)
        ),
        "plain tensor operations": rows.run(lambda s: part.normalise(s, allowed, p), backward, *learned),
        SOFTMAX_BASELINE: rows.run(lambda s: s.softmax(-1), backward),
    }
    ours = rows.run(lambda s: part.fused_normalise(s, allowed, p), backward, *learned)
    name, aims, need = (
        "alpha learned by 16 heads, by the kernel",
        (SpeedTarget(ENTMAX_BISECT_PACKAGE, 20.0),),
        rows.required_work(backward),
    )
    return BenchmarkCase(_case_title(name, backward), ours, peers, aims, need, reported_peers=(SOFTMAX_BASELINE,))


def _entmax_core_case(backward: bool) -> BenchmarkCase:
    """Scores to per-head outputs; the others form all weights and multiply them with all values."""
    core = MixedHeadCore(
        design(preset="entmax", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS, pattern="causal()"), NUM_CORE_TOKENS
    )
    later = torch.ones(NUM_CORE_TOKENS, NUM_CORE_TOKENS, dtype=torch.bool).triu(1)

    def read(weigh: WeightFunction) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in core.qkv)
        return (weigh((q @ k.mT * HEAD_DIM**-0.5).masked_fill(later, -torch.inf)) @ v).transpose(1, 2)

    def flash() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in core.qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def run(made: Callable[[], Tensor]) -> TimedCall:
        return (lambda: torch.autograd.grad(made(), core.qkv, core.grad)) if backward else torch.no_grad()(made)

    peers: dict[str, TimedCall | MissingPeer] = {
        ENTMAX15_PACKAGE: make_peer("entmax", lambda library: run(lambda: read(lambda s: library.entmax15(s, dim=-1)))),
        SOFTMAX_SDPA: run(flash),
    }
    products = (
        core.job.core.flops(NUM_CORE_TOKENS * (NUM_CORE_TOKENS + 1) // 2) // 2
    )  # of scores alone: values of few keys are read
    aims, need = (SpeedTarget(ENTMAX15_PACKAGE, 2.0),), RequiredWork(flops=(4 if backward else 1) * products)
    name = f"core, alpha 1.5, {NUM_CORE_TOKENS:,} tokens"
    notes = {"memory": f"keeps {core.saved_bytes() / 1e6:.1f} MB for the way back"} if backward else {}
    return BenchmarkCase(
        _case_title(name, backward), run(core.run), peers, aims, need, reported_peers=(SOFTMAX_SDPA,), notes=notes
    )


def _case_title(name: str, backward: bool) -> str:
    return f"{name}, {'forward and backward' if backward else 'forward'}"
