"""Patterns that leave most pairs out, at 8k tokens: the core alone, forward, and forward with backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import backends
from ...backends import Bound, Inputs, Job
from ...module import Attention
from ...pattern import Dilated, parse
from ...presets import design
from ...terms import Asked
from ...tokens import Sight, Tokens
from ..case import Absent, Aim, Case, Need, Run
from ..others import given

TITLE = "Windows and sparse patterns, 8,192 tokens"
TOKENS, HEADS, DIM = 8192, 8, 64
WINDOW = "window(256)"
MASKED = "masked SDPA"
LENGTHS = (2048, 4096, 8192, 16384)
Heads = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k, v [1, T, 8, 64] the same of what was read


@dataclass(frozen=True)
class _Core:
    """The core of a layer with this pattern at so many tokens: ours, and what it works on."""

    pattern: str
    tokens: int = TOKENS

    def qkv(self) -> list[Tensor]:
        """Numbers that follow from the seed."""
        drawn = torch.Generator().manual_seed(0)
        return [torch.randn(1, self.tokens, HEADS, DIM, generator=drawn) for _ in "qkv"]

    def ours(self, backward: bool) -> Heads:
        """The backend that a layer of this pattern would choose, as the layer calls it."""
        spec = design(model=HEADS * DIM, heads=HEADS, pattern=self.pattern)
        layer, job = Attention(spec), Job(spec, spec.core, grad=backward, training=backward)
        bound, attend = Bound.of(spec, layer.weights), backends.choose(job).attend
        tokens = Tokens.run(0, self.tokens, "cpu")
        x = torch.zeros(1, self.tokens, 1)

        def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            asked = Asked(x, q, DIM**-0.5, tokens)
            return attend(job, Sight(tokens, tokens, spec.pattern), Inputs(q, k, v, asked, {}, {}), bound, None)

        return heads

    def masked(self) -> Heads:
        """torch's fused call with the pattern as a mask, made beforehand."""
        place = torch.arange(self.tokens)
        mask = parse(self.pattern).allows(place[:, None], place)

        def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

        return heads

    def need(self, backward: bool) -> Need:
        """Products of allowed pairs; backwards twice as many, and the scores, which nobody kept, once more."""
        every = range(self.tokens)
        forward = 4 * parse(self.pattern).pairs(every, every) * HEADS * DIM
        return Need(flops=7 * forward // 2 if backward else forward)


def cases(quick: bool) -> Iterator[Case]:
    """A window with everybody who has one, then other patterns against the mask."""
    for backward in (False, True):
        core, how = _Core(WINDOW), _backward if backward else _forward
        others = {
            "local-attention": given("local_attention", lambda library, how=how, core=core: how(_local(library), core)),
            "FlexAttention, compiled": Absent("it has no backward pass on the CPU")
            if backward
            else how(_flex(core), core),
        }
        yield _case("window of 256", core, backward, others, (Aim(MASKED, 15.0),))
    for name, pattern in (
        ("first 4 keys and a window of 256", "first(4) | window(256)"),
        ("64 keys, every 4th", Dilated(64, rate=4).text),
        ("BigBird, blocks of 64", f"bigbird({TOKENS})"),
    ):
        for backward in (False,) if quick else (False, True):
            yield _case(name, _Core(pattern), backward, {}, ())


def _case(name: str, core: _Core, backward: bool, others: dict[str, Run | Absent], aims: tuple[Aim, ...]) -> Case:
    how = _backward if backward else _forward
    peers = {MASKED: how(core.masked(), core), **others}
    title = f"{name}, {'forward and backward' if backward else 'forward'}"
    ours = how(core.ours(backward), core)
    return Case(title, ours, peers, aims, core.need(backward), notes=_growth(core.pattern, backward))


def _forward(heads: Heads, core: _Core) -> Run:
    q, k, v = core.qkv()

    def run() -> Tensor:
        with torch.no_grad():
            return heads(q, k, v)

    return run


def _backward(heads: Heads, core: _Core) -> Run:
    q, k, v = (x.requires_grad_() for x in core.qkv())
    back = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    return lambda: torch.autograd.grad(heads(q, k, v), (q, k, v), back)


def _growth(pattern: str, backward: bool) -> dict[str, str]:
    """How our time grows with length: the slope of its logarithm, by least squares."""
    if pattern != WINDOW:
        return {}
    seconds = [_seconds(_Core(pattern, tokens), backward) for tokens in LENGTHS]
    x, y = ([math.log(one) for one in each] for each in (LENGTHS, seconds))
    middle = sum(x) / len(x)
    slope = sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)
    return {"growth": f"time grows as length^{slope:.2f} from {LENGTHS[0]:,} to {LENGTHS[-1]:,} tokens"}


def _seconds(core: _Core, backward: bool) -> float:
    run = (_backward if backward else _forward)(core.ours(backward), core)
    run()
    took = list[float]()
    for _ in range(3):
        start = perf_counter()
        run()
        took.append(perf_counter() - start)
    return median(took)


def _local(library: Any) -> Heads:
    """Windows of 85 that look 3 back, held to their exact width: the 255 keys before a query, and its own."""
    theirs = library.LocalAttention(
        85, causal=True, look_backward=3, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False
    )
    return lambda q, k, v: theirs(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _flex(core: _Core) -> Heads:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pattern = parse(core.pattern)
    mask = create_block_mask(
        lambda b, h, i, j: pattern.allows(i, j), None, None, core.tokens, core.tokens, device="cpu"
    )
    flex: Any = torch.compile(flex_attention)
    return lambda q, k, v: flex(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)
