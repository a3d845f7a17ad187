"""Small calls of one layer: what is left when there is hardly anything to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...interfaces.registry import REGISTRY
from ...nn.attention import Attention
from ...presets import design
from ..benchmark_case import BenchmarkCase, TimedCall

TITLE = "Small calls of one layer"
MODEL_WIDTH, NUM_HEADS, NUM_KV_HEADS, BATCH, CAPACITY, NUM_CACHED = 256, 8, 2, 1, 512, 100
PROMPT_LENGTHS = (1, 16, 64)


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """A decoded token, without positions and with rotary ones; and a few tokens at once."""
    yield _decode_step_case("one decoded token, 100 cached", ())
    yield _decode_step_case("one decoded token, 100 cached, rotary", (REGISTRY["Rotary"](),))
    for tokens in PROMPT_LENGTHS:
        yield _short_call_case(tokens)


def _short_call_case(tokens: int) -> BenchmarkCase:
    """A layer of as many key heads as query heads, on a row of so many tokens."""
    layer = Attention(design(model=MODEL_WIDTH, heads=NUM_HEADS)).eval()
    theirs = nn.MultiheadAttention(MODEL_WIDTH, NUM_HEADS, bias=False, batch_first=True).eval()
    q, k, v, o = stacked_weights(layer)
    theirs.load_state_dict({"in_proj_weight": torch.cat([q, k, v]), "out_proj.weight": o})
    x = torch.randn(BATCH, tokens, MODEL_WIDTH)

    def bare(x: Tensor) -> Tensor:
        heads = [F.linear(x, each).view(BATCH, tokens, NUM_HEADS, -1).transpose(1, 2) for each in (q, k, v)]
        read = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return F.linear(read.transpose(1, 2).reshape(BATCH, tokens, -1), o)

    peers = {"SDPA by hand": bare, "nn.MultiheadAttention": lambda x: theirs(x, x, x, need_weights=False)[0]}
    name = f"{tokens} token{'s' if tokens > 1 else ''}, {NUM_HEADS} heads of {MODEL_WIDTH // NUM_HEADS}"
    return BenchmarkCase(name, without_grad(layer, x), {name: without_grad(run, x) for name, run in peers.items()})


def _decode_step_case(name: str, modifiers: tuple[Any, ...]) -> BenchmarkCase:
    """One token behind a cache that grows with every call, and begins anew when it is full."""
    layer = Attention(
        design(model=MODEL_WIDTH, heads=NUM_HEADS, kv=NUM_KV_HEADS, pattern="causal()", modifiers=modifiers)
    ).eval()
    x = torch.randn(BATCH, NUM_CACHED + 1, MODEL_WIDTH)
    hand, last = handwritten_step(layer, bool(modifiers)), x[:, NUM_CACHED:]
    with torch.no_grad():
        cache = layer.cache(batch=BATCH, capacity=CAPACITY)
        layer(x[:, :NUM_CACHED], cache=cache)
        for t in range(NUM_CACHED):
            hand(x[:, t : t + 1], t)
    state: dict[str, Any] = {"cache": cache, "t": NUM_CACHED - 1}

    def ours() -> Tensor:
        if state["cache"].used >= CAPACITY:
            state["cache"] = layer.cache(batch=BATCH, capacity=CAPACITY)
        return layer(last, cache=state["cache"])

    def theirs() -> Tensor:
        state["t"] = (state["t"] + 1) % CAPACITY
        return hand(last, state["t"])

    return BenchmarkCase(name, without_grad(ours), {"by hand": without_grad(theirs)})


def handwritten_step(layer: Attention, rotary: bool) -> Callable[[Tensor, int], Tensor]:
    """A step as one would write it for this layer alone: rotation from a table, a sliced cache, one SDPA call."""
    q_w, k_w, v_w, o_w = stacked_weights(layer)
    dim = layer.spec.heads.dim
    k_cache, v_cache = torch.zeros(BATCH, NUM_KV_HEADS, CAPACITY, dim), torch.zeros(BATCH, NUM_KV_HEADS, CAPACITY, dim)
    angle = torch.arange(CAPACITY)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos(), angle.sin()

    def turn(x: Tensor, t: int) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos[t] - b * sin[t], a * sin[t] + b * cos[t]], -1)

    def step(x_B1D: Tensor, t: int) -> Tensor:
        q = F.linear(x_B1D, q_w).view(BATCH, NUM_HEADS, 1, dim)
        k = F.linear(x_B1D, k_w).view(BATCH, NUM_KV_HEADS, 1, dim)
        v = F.linear(x_B1D, v_w).view(BATCH, NUM_KV_HEADS, 1, dim)
        if rotary:
            q, k = turn(q, t), turn(k, t)
        k_cache[:, :, t : t + 1], v_cache[:, :, t : t + 1] = k, v
        rows = q.view(BATCH, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, dim)
        o = F.scaled_dot_product_attention(rows, k_cache[:, :, : t + 1], v_cache[:, :, : t + 1])
        return F.linear(o.reshape(BATCH, 1, NUM_HEADS * dim), o_w)

    return step


def stacked_weights(layer: Attention) -> list[Tensor]:
    """W_Q, W_K, W_V and W_O of a layer, each [out, in]."""
    own = dict(layer.named_parameters())
    return [own[name].detach() for name in ("project.q", "project.k", "project.v", "output.o")]


def without_grad(run: Callable[..., Any], *given: Tensor) -> TimedCall:
    """The same without gradients."""

    def quiet() -> Any:
        with torch.no_grad():
            return run(*given)

    return quiet
