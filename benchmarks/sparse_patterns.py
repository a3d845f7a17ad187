"""Cores with sparse attention patterns at 8k tokens, forward, and forward with backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention import backends
from headwise.attention.attention import Attention
from headwise.attention.backends import CallSignature, CoreInputs, CoreSteps
from headwise.attention.interfaces.core_types import QueryContext
from headwise.attention.masking.patterns import Dilated, parse_pattern
from headwise.attention.masking.sequence_info import AttentionMask, SequenceInfo
from headwise.attention.presets import design

from .harness import (
    BenchmarkCase,
    CaseKind,
    MissingPeer,
    RequiredWork,
    SpeedTarget,
    TimedCall,
    make_peer,
)

NUM_TOKENS = 8192
NUM_HEADS = 8
HEAD_DIM = 64
WINDOW = "window(256)"
MASKED_SDPA = "masked SDPA"
LENGTHS = (2048, 4096, 8192, 16384)
HeadOutputs = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # q, k, v [1, T, 8, 64] to head outputs [1, T, 8, 64]


@dataclass(frozen=True)
class _PatternCore:
    """The core of a layer with one pattern, and its inputs."""

    pattern: str
    tokens: int = NUM_TOKENS

    def qkv(self) -> list[Tensor]:
        """Return random q, k and v from a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(1, self.tokens, NUM_HEADS, HEAD_DIM, generator=generator) for _ in "qkv"
        ]

    def headwise(self, backward: bool) -> HeadOutputs:
        """Return the core on the backend that a layer with this pattern chooses."""
        spec = design(model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS, pattern=self.pattern)
        layer = Attention(spec)
        call = CallSignature(spec, spec.core, grad_enabled=backward, training=backward)
        steps = CoreSteps.from_spec(spec, layer.weights)
        attend = backends.make_dispatch(call).attend
        tokens = SequenceInfo.contiguous(0, self.tokens, "cpu")
        x = torch.zeros(1, self.tokens, 1)

        def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            query = QueryContext(x, q, HEAD_DIM**-0.5, tokens)
            mask = AttentionMask(tokens, tokens, spec.pattern)
            return attend(CoreInputs(q, k, v, mask, steps, query, {}))

        return heads

    def masked_sdpa(self) -> HeadOutputs:
        """Return SDPA with the pattern as a mask that is built beforehand."""
        position = torch.arange(self.tokens)
        mask = parse_pattern(self.pattern).allows(position[:, None], position)

        def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

        return heads

    def required_work(self, backward: bool) -> RequiredWork:
        """Return the FLOPs on allowed pairs; the backward pass has twice as many, and recomputes
        the scores.
        """
        positions = range(self.tokens)
        forward = 4 * parse_pattern(self.pattern).pairs(positions, positions) * NUM_HEADS * HEAD_DIM
        return RequiredWork(flops=7 * forward // 2 if backward else forward)


def sparse_patterns_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield a sliding window against every library that has one, then other patterns against masked
    SDPA.
    """
    for backward in (False, True):
        core = _PatternCore(WINDOW)
        make_call = _backward if backward else _forward
        others = {
            "local-attention": make_peer(
                "local_attention",
                lambda library, make_call=make_call, core=core: make_call(
                    _local_attention(library), core
                ),
            ),
            "FlexAttention, compiled": MissingPeer("has no backward pass on the CPU")
            if backward
            else make_call(_flex_attention(core), core),
        }
        notes = {} if quick else _measure_growth(backward)
        yield _case(
            "window of 256", core, backward, others, (SpeedTarget(MASKED_SDPA, 15.0),), notes
        )
    for name, pattern in (
        ("first 4 keys and a window of 256", "first(4) | window(256)"),
        ("64 keys, every 4th", Dilated(64, rate=4).text),
        ("BigBird, blocks of 64", f"bigbird({NUM_TOKENS})"),
    ):
        for backward in (False,) if quick else (False, True):
            yield _case(name, _PatternCore(pattern), backward)


def _case(
    name: str,
    core: _PatternCore,
    backward: bool,
    others: Mapping[str, TimedCall | MissingPeer] = {},
    targets: tuple[SpeedTarget, ...] = (),
    notes: Mapping[str, str] = {},
) -> BenchmarkCase:
    make_call = _backward if backward else _forward
    peers = {MASKED_SDPA: make_call(core.masked_sdpa(), core), **others}
    title = f"{name}, {'forward and backward' if backward else 'forward'}"
    ours = make_call(core.headwise(backward), core)
    return BenchmarkCase(title, ours, peers, targets, core.required_work(backward), notes=notes)


def _forward(heads: HeadOutputs, core: _PatternCore) -> TimedCall:
    q, k, v = core.qkv()

    def run() -> Tensor:
        with torch.no_grad():
            return heads(q, k, v)

    return run


def _backward(heads: HeadOutputs, core: _PatternCore) -> TimedCall:
    q, k, v = (x.requires_grad_() for x in core.qkv())
    back = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    return lambda: torch.autograd.grad(heads(q, k, v), (q, k, v), back)


def _measure_growth(backward: bool) -> dict[str, str]:
    """Return a note with the exponent of the time in the length, fitted by least squares on
    logarithms.
    """
    seconds = [_seconds(_PatternCore(WINDOW, tokens), backward) for tokens in LENGTHS]
    x, y = ([math.log(value) for value in values] for values in (LENGTHS, seconds))
    x_mean = sum(x) / len(x)
    slope = sum((a - x_mean) * b for a, b in zip(x, y, strict=True)) / sum(
        (a - x_mean) ** 2 for a in x
    )
    return {
        "growth": f"time grows as length^{slope:.2f} from {LENGTHS[0]:,} to {LENGTHS[-1]:,} tokens"
    }


def _seconds(core: _PatternCore, backward: bool) -> float:
    run = (_backward if backward else _forward)(core.headwise(backward), core)
    run()
    samples = list[float]()
    for _ in range(3):
        start = perf_counter()
        run()
        samples.append(perf_counter() - start)
    return median(samples)


def _local_attention(library: Any) -> HeadOutputs:
    """Return LocalAttention with blocks of 85 that look 3 blocks back: the query's own key and 255
    before it.
    """
    theirs = library.LocalAttention(
        85,
        causal=True,
        look_backward=3,
        exact_windowsize=True,
        autopad=True,
        use_rotary_pos_emb=False,
    )
    return lambda q, k, v: theirs(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _flex_attention(core: _PatternCore) -> HeadOutputs:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pattern = parse_pattern(core.pattern)
    mask = create_block_mask(
        lambda b, h, i, j: pattern.allows(i, j), None, None, core.tokens, core.tokens, device="cpu"
    )
    flex: Any = torch.compile(flex_attention)
    return lambda q, k, v: flex(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(
        1, 2
    )


KINDS = {
    "sparse_patterns": CaseKind("Windows and sparse patterns, 8,192 tokens", sparse_patterns_cases),
}
