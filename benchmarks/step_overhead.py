"""What one decoded token costs beyond the same maths written by hand, for one small layer on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw

from .timing import Case, interleaved

MODEL, HEADS, KV, BATCH, CAPACITY, PAST = 256, 8, 2, 1, 512, 100


def by_hand(layer: hw.Attention, rotary: bool) -> Callable[[Tensor, int], Tensor]:
    """A step as one would write it for this layer alone: rotation from a table, a sliced cache, one SDPA call."""
    p = dict(layer.named_parameters())
    q_w, k_w, v_w, o_w = (p[name].detach() for name in ("project.q", "project.k", "project.v", "output.o"))
    dim = layer.spec.heads.dim
    k_cache, v_cache = torch.zeros(BATCH, KV, CAPACITY, dim), torch.zeros(BATCH, KV, CAPACITY, dim)
    angle = torch.arange(CAPACITY)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos(), angle.sin()

    def turn(x: Tensor, t: int) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos[t] - b * sin[t], a * sin[t] + b * cos[t]], -1)

    def step(x_B1D: Tensor, t: int) -> Tensor:
        q = F.linear(x_B1D, q_w).view(BATCH, HEADS, 1, dim)
        k = F.linear(x_B1D, k_w).view(BATCH, KV, 1, dim)
        v = F.linear(x_B1D, v_w).view(BATCH, KV, 1, dim)
        if rotary:
            q, k = turn(q, t), turn(k, t)
        k_cache[:, :, t : t + 1], v_cache[:, :, t : t + 1] = k, v
        rows = q.view(BATCH, KV, HEADS // KV, dim)
        o = F.scaled_dot_product_attention(rows, k_cache[:, :, : t + 1], v_cache[:, :, : t + 1])
        return F.linear(o.reshape(BATCH, 1, HEADS * dim), o_w)

    return step


def cases() -> list[Case]:
    """Without positions, and with rotary ones."""
    return [_case("one-token step", ()), _case("one-token step, rotary", (hw.Rotary(),))]


def _case(name: str, modifiers: tuple[object, ...]) -> Case:
    torch.manual_seed(0)
    spec = hw.design(model=MODEL, heads=HEADS, kv=KV, pattern="causal()", modifiers=modifiers)
    layer = hw.Attention(spec).eval()
    x = torch.randn(BATCH, PAST + 1, MODEL)
    hand = by_hand(layer, bool(modifiers))
    with torch.no_grad():
        cache = layer.cache(batch=BATCH, capacity=CAPACITY)
        ours = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(PAST + 1)], 1)
        theirs = torch.cat([hand(x[:, t : t + 1], t) for t in range(PAST + 1)], 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    last = x[:, PAST:]
    state = {"cache": cache}

    def run_ours() -> None:
        if state["cache"].used >= CAPACITY:
            state["cache"] = layer.cache(batch=BATCH, capacity=CAPACITY)
        layer(last, cache=state["cache"])

    state["t"] = PAST

    def run_hand() -> None:
        state["t"] = state["t"] + 1 if state["t"] + 1 < CAPACITY else 0
        hand(last, state["t"])

    return Case(name, run_ours, {"by hand": run_hand})


def main() -> list[dict[str, object]]:
    """Rows of the table."""
    with torch.no_grad():
        return [interleaved(case, repeats=9, calls=400) for case in cases()]
