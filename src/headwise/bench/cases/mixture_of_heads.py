"""Mixture of heads with half of the heads shut for each token: the core alone, whole layers, and a decoded token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends import BACKENDS, CallSignature, CoreInputs, CoreSteps
from ...interfaces.core_types import QueryContext
from ...interfaces.probe import Probe
from ...interfaces.registry import REGISTRY
from ...masking.sequence_info import AttentionMask, SequenceInfo
from ...nn.attention import Attention
from ...nn.attention_call import AttentionArguments
from ...presets import design
from ..benchmark_case import BenchmarkCase, RequiredWork, SpeedTarget, TimedCall
from ..reference_models import ReferenceMoH

TITLE = "Mixture of heads, half of them shut"
HISTORY = (
    "Chunks of queries in torch's own calls, masked and joined: 1.19 to 1.26 forward at 2,048 tokens on two threads. "
    "Units of 64 queries in a kernel, the longest first: 2.8 forward, 3.1 with backward. See "
    "log/2026-11-22-fast-routed.md."
)
MODEL_WIDTH, NUM_HEADS, NUM_SHARED_HEADS, NUM_ROUTED_HEADS = 512, 8, 2, 2
HEAD_DIM = MODEL_WIDTH // NUM_HEADS
NUM_CACHED, CAPACITY = 4096, 8192
PUBLISHED_MOH = "MoH as published (plain PyTorch)"
DENSE_SDPA = "all heads, SDPA"
SPEEDUP_LIMIT_NOTE = (
    "keys and values are projected for all heads: 1.33x is the limit at 2k tokens, 1.6x if Q and W_O skipped too"
)
ALL_HEADS_NOTE = "all heads are read: those that speak alone lie apart in memory, and took 1.4 to 1.9 times as long"


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Cores and layers of 2k and 4k tokens, forward and backward; and a step."""
    for tokens in (2048, 4096):
        for backward in (False, True):
            yield _RoutedCore(tokens).case(backward)
    for tokens in (2048,) if quick else (2048, 4096):
        for backward in (False, True):
            yield _layer_case(tokens, backward)
    yield _decode_step_case()


def _make_layer() -> Attention:
    torch.manual_seed(0)
    routed = REGISTRY["Routed"](always=NUM_SHARED_HEADS, active=NUM_ROUTED_HEADS)
    return Attention(design(model=MODEL_WIDTH, heads=NUM_HEADS, pattern="causal()", modifiers=(routed,)))


def _published_moh(layer: Attention) -> ReferenceMoH:
    project, output, routed = (layer.weights[name] for name in ("project", "output", "routed"))
    maps = {name: project[name].detach() for name in ("q", "k", "v")} | {"o": output["o"].detach()}
    return ReferenceMoH(
        NUM_HEADS,
        NUM_SHARED_HEADS,
        NUM_ROUTED_HEADS,
        maps | {name: routed[name].detach() for name in ("router", "shared", "kind")},
    )


def _case_name(what: str, tokens: int, backward: bool) -> str:
    return f"{what}, {tokens:,} tokens, {'forward and backward' if backward else 'forward'}"


@dataclass(frozen=True)
class _RoutedCore:
    """From queries, keys, values and gates to what heads say."""

    tokens: int

    def case(self, backward: bool) -> BenchmarkCase:
        """Ours, and all heads asked and scaled by their gates."""
        layer, seen = _make_layer(), Probe("q", "k", "v")
        x = torch.randn(1, self.tokens, MODEL_WIDTH)
        with torch.no_grad():
            _, (gate,) = layer.head_outputs_and_gates(AttentionArguments(x, probe=seen))
        own = [seen.tensors[name].detach().clone().requires_grad_(backward) for name in ("q", "k", "v")]
        runs = {DENSE_SDPA: _all_heads_core(gate), "ours": self._headwise_run(layer, x, gate, backward)}
        how = {name: _forward_backward(run, own) if backward else _forward(run, own) for name, run in runs.items()}
        pairs = self.tokens * (self.tokens + 1) // 2
        flops = layer.spec.core.flops(pairs) * (NUM_SHARED_HEADS + NUM_ROUTED_HEADS) // NUM_HEADS
        need = RequiredWork(flops=flops * 7 // 2 if backward else flops)
        ours = how.pop("ours")
        return BenchmarkCase(
            _case_name("core", self.tokens, backward),
            ours,
            how,
            targets=(SpeedTarget(DENSE_SDPA, 1.5),),
            required_work=need,
            history=HISTORY,
        )

    def _headwise_run(self, layer: Attention, x: Tensor, gate: Tensor, backward: bool) -> Callable[..., Tensor]:
        at = SequenceInfo.contiguous(0, self.tokens, "cpu")
        job, bound = (
            CallSignature(layer.spec, layer.spec.core, needs_grad=backward),
            CoreSteps.from_spec(layer.spec, layer.weights),
        )

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = CoreInputs(q, k, v, QueryContext(x, q, HEAD_DIM**-0.5, at), {}, {}, (gate,))
            return BACKENDS["routed"].attend(job, AttentionMask(at, at, layer.spec.pattern), given, bound, None) * gate

        return run


def _all_heads_core(gate: Tensor) -> Callable[..., Tensor]:
    def run(*own: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in own)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2) * gate

    return run


def _forward(run: Callable[..., Any], own: list[Tensor]) -> TimedCall:
    def once() -> Any:
        with torch.no_grad():
            return run(*own)

    return once


def _forward_backward(run: Callable[..., Tensor], own: list[Tensor]) -> TimedCall:
    def once() -> Any:
        y = run(*own)
        return torch.autograd.grad(y, own, torch.ones_like(y))

    return once


def _layer_case(tokens: int, backward: bool) -> BenchmarkCase:
    """From tokens to tokens: what is published asks all heads, as plain attention does."""
    layer, x = _make_layer(), torch.randn(1, tokens, MODEL_WIDTH)
    published = _published_moh(layer)
    weights = [*published.maps.values()]

    def theirs(x: Tensor, *weights: Tensor) -> Tensor:
        return published._replace(maps=dict(zip(published.maps, weights, strict=True)))(x)

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        return layer(x)

    parts = {name: layer.weights[name] for name in ("project", "output", "routed")}
    held = {key: weight for part in parts.values() for key, weight in part.named_parameters()}
    mine = [x.clone().requires_grad_(backward), *(held[name] for name in published.maps)]
    other = [x.clone().requires_grad_(backward), *(weight.clone().requires_grad_(backward) for weight in weights)]
    how = _forward_backward if backward else _forward
    return BenchmarkCase(
        _case_name("layer", tokens, backward),
        how(ours, mine),
        {PUBLISHED_MOH: how(theirs, other)},
        notes={"limit": SPEEDUP_LIMIT_NOTE},
    )


def _decode_step_case() -> BenchmarkCase:
    """One token behind a cache that grows with every call, and begins anew when it is full."""
    layer = _make_layer().eval()
    published = _published_moh(layer)
    x = torch.randn(1, NUM_CACHED + 1, MODEL_WIDTH)
    first, last = x[:, :NUM_CACHED], x[:, NUM_CACHED:]
    k, v = (torch.zeros(1, NUM_HEADS, CAPACITY, HEAD_DIM) for _ in "kv")
    with torch.no_grad():
        cache = layer.cache(batch=1, capacity=CAPACITY)
        layer(first, cache=cache)
        for held, name in ((k, "k"), (v, "v")):
            held[:, :, :NUM_CACHED] = (
                F.linear(first, published.maps[name]).view(1, NUM_CACHED, NUM_HEADS, HEAD_DIM).transpose(1, 2)
            )
    state: dict[str, Any] = {"cache": deepcopy(cache), "t": NUM_CACHED}

    def ours() -> Tensor:
        if state["cache"].used >= CAPACITY:
            state["cache"] = deepcopy(cache)
        return layer(last, cache=state["cache"])

    def theirs() -> Tensor:
        t = state["t"] = state["t"] + 1 if state["t"] < CAPACITY else NUM_CACHED + 1
        q, k_new, v_new = (
            F.linear(last, published.maps[n]).view(1, 1, NUM_HEADS, HEAD_DIM).transpose(1, 2) for n in "qkv"
        )
        k[:, :, t - 1 : t], v[:, :, t - 1 : t] = k_new, v_new
        o = F.scaled_dot_product_attention(q, k[:, :, :t], v[:, :, :t])
        o = o * published.gates(last).transpose(1, 2)[..., None]
        return F.linear(o.transpose(1, 2).flatten(2), published.maps["o"])

    name = f"one decoded token, {NUM_CACHED:,} cached"
    return BenchmarkCase(
        name, _forward(ours, []), {PUBLISHED_MOH: _forward(theirs, [])}, notes={"decode": ALL_HEADS_NOTE}
    )
