"""Mixture of heads with half of the heads shut for each token: the core alone, whole layers, and a decoded token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends import BACKENDS, Bound, Inputs, Job
from ...module import Attention
from ...presets import design
from ...probe import Probe
from ...registry import REGISTRY
from ...terms import Asked
from ...tokens import Sight, Tokens
from ..case import Aim, Case, Need, Run
from ..published_moh import MoH

TITLE = "Mixture of heads, half of them shut"
TRIED = (
    "Chunks of queries in torch's own calls, masked and joined: 1.19 to 1.26 forward at 2,048 tokens on two threads. "
    "Units of 64 queries in a kernel, the longest first: 2.8 forward, 3.1 with backward. See "
    "log/2026-11-22-fast-routed.md."
)
MODEL, HEADS, ALWAYS, ACTIVE = 512, 8, 2, 2
DIM = MODEL // HEADS
PAST, CAPACITY = 4096, 8192
PUBLISHED = "MoH as published (plain PyTorch)"
DENSE = "all heads, SDPA"
ITS_OWN = "keys and values are projected for all heads: 1.33x is the limit at 2k tokens, 1.6x if Q and W_O skipped too"
ALL_READ = "all heads are read: those that speak alone lie apart in memory, and took 1.4 to 1.9 times as long"


def cases(quick: bool) -> Iterator[Case]:
    """Cores and layers of 2k and 4k tokens, forward and backward; and a step."""
    for tokens in (2048, 4096):
        for backward in (False, True):
            yield _Core(tokens).case(backward)
    for tokens in (2048,) if quick else (2048, 4096):
        for backward in (False, True):
            yield _layer(tokens, backward)
    yield _step()


def _made() -> Attention:
    torch.manual_seed(0)
    routed = REGISTRY["Routed"](always=ALWAYS, active=ACTIVE)
    return Attention(design(model=MODEL, heads=HEADS, pattern="causal()", modifiers=(routed,)))


def _published(layer: Attention) -> MoH:
    project, output, routed = (layer.weights[name] for name in ("project", "output", "routed"))
    maps = {name: project[name].detach() for name in ("q", "k", "v")} | {"o": output["o"].detach()}
    return MoH(HEADS, ALWAYS, ACTIVE, maps | {name: routed[name].detach() for name in ("router", "shared", "kind")})


def _name(what: str, tokens: int, backward: bool) -> str:
    return f"{what}, {tokens:,} tokens, {'forward and backward' if backward else 'forward'}"


@dataclass(frozen=True)
class _Core:
    """From queries, keys, values and gates to what heads say."""

    tokens: int

    def case(self, backward: bool) -> Case:
        """Ours, and all heads asked and scaled by their gates."""
        layer, seen = _made(), Probe("q", "k", "v")
        x = torch.randn(1, self.tokens, MODEL)
        with torch.no_grad():
            _, (gate,) = layer.gated(x, probe=seen)
        own = [seen.seen[name].detach().clone().requires_grad_(backward) for name in ("q", "k", "v")]
        runs = {DENSE: _all(gate), "ours": self._ours(layer, x, gate, backward)}
        how = {name: _both(run, own) if backward else _forth(run, own) for name, run in runs.items()}
        pairs = self.tokens * (self.tokens + 1) // 2
        flops = layer.spec.core.flops(pairs) * (ALWAYS + ACTIVE) // HEADS
        need = Need(flops=flops * 7 // 2 if backward else flops)
        ours = how.pop("ours")
        return Case(_name("core", self.tokens, backward), ours, how, aims=(Aim(DENSE, 1.5),), need=need, tried=TRIED)

    def _ours(self, layer: Attention, x: Tensor, gate: Tensor, backward: bool) -> Callable[..., Tensor]:
        at = Tokens.run(0, self.tokens, "cpu")
        job, bound = Job(layer.spec, layer.spec.core, grad=backward), Bound.of(layer.spec, layer.weights)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = Inputs(q, k, v, Asked(x, q, DIM**-0.5, at), {}, {}, (gate,))
            return BACKENDS["routed"].attend(job, Sight(at, at, layer.spec.pattern), given, bound, None) * gate

        return run


def _all(gate: Tensor) -> Callable[..., Tensor]:
    def run(*own: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in own)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2) * gate

    return run


def _forth(run: Callable[..., Any], own: list[Tensor]) -> Run:
    def once() -> Any:
        with torch.no_grad():
            return run(*own)

    return once


def _both(run: Callable[..., Tensor], own: list[Tensor]) -> Run:
    def once() -> Any:
        y = run(*own)
        return torch.autograd.grad(y, own, torch.ones_like(y))

    return once


def _layer(tokens: int, backward: bool) -> Case:
    """From tokens to tokens: what is published asks all heads, as plain attention does."""
    layer, x = _made(), torch.randn(1, tokens, MODEL)
    published = _published(layer)
    weights = [*published.maps.values()]

    def theirs(x: Tensor, *weights: Tensor) -> Tensor:
        return published._replace(maps=dict(zip(published.maps, weights, strict=True)))(x)

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        return layer(x)

    parts = {name: layer.weights[name] for name in ("project", "output", "routed")}
    held = {key: weight for part in parts.values() for key, weight in part.named_parameters()}
    mine = [x.clone().requires_grad_(backward), *(held[name] for name in published.maps)]
    other = [x.clone().requires_grad_(backward), *(weight.clone().requires_grad_(backward) for weight in weights)]
    how = _both if backward else _forth
    return Case(
        _name("layer", tokens, backward), how(ours, mine), {PUBLISHED: how(theirs, other)}, notes={"limit": ITS_OWN}
    )


def _step() -> Case:
    """One token behind a cache that grows with every call, and begins anew when it is full."""
    layer = _made().eval()
    published = _published(layer)
    x = torch.randn(1, PAST + 1, MODEL)
    first, last = x[:, :PAST], x[:, PAST:]
    k, v = (torch.zeros(1, HEADS, CAPACITY, DIM) for _ in "kv")
    with torch.no_grad():
        cache = layer.cache(batch=1, capacity=CAPACITY)
        layer(first, cache=cache)
        for held, name in ((k, "k"), (v, "v")):
            held[:, :, :PAST] = F.linear(first, published.maps[name]).view(1, PAST, HEADS, DIM).transpose(1, 2)
    state: dict[str, Any] = {"cache": deepcopy(cache), "t": PAST}

    def ours() -> Tensor:
        if state["cache"].used >= CAPACITY:
            state["cache"] = deepcopy(cache)
        return layer(last, cache=state["cache"])

    def theirs() -> Tensor:
        t = state["t"] = state["t"] + 1 if state["t"] < CAPACITY else PAST + 1
        q, k_new, v_new = (F.linear(last, published.maps[n]).view(1, 1, HEADS, DIM).transpose(1, 2) for n in "qkv")
        k[:, :, t - 1 : t], v[:, :, t - 1 : t] = k_new, v_new
        o = F.scaled_dot_product_attention(q, k[:, :, :t], v[:, :, :t])
        o = o * published.gates(last).transpose(1, 2)[..., None]
        return F.linear(o.transpose(1, 2).flatten(2), published.maps["o"])

    name = f"one decoded token, {PAST:,} cached"
    return Case(name, _forth(ours, []), {PUBLISHED: _forth(theirs, [])}, notes={"decode": ALL_READ})
