"""Mixture of heads (MoH) with half of the heads active per token: the core, whole layers, and a
decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.attention import Attention
from headwise.attention.attention_call import AttentionArguments
from headwise.attention.backends import BACKENDS, CallSignature, CoreInputs, CoreSteps
from headwise.attention.interfaces.core_types import Probe, QueryContext
from headwise.attention.interfaces.part import REGISTRY
from headwise.attention.masking.sequence_info import AttentionMask, SequenceInfo
from headwise.attention.presets import design

from .harness import (
    BenchmarkCase,
    CaseKind,
    RequiredWork,
    SpeedTarget,
    TimedCall,
)
from .reference_models import ReferenceMoH

MODEL_WIDTH = 512
NUM_HEADS = 8
NUM_SHARED_HEADS = 2
NUM_ROUTED_HEADS = 2
HEAD_DIM = MODEL_WIDTH // NUM_HEADS
NUM_CACHED = 4096
CAPACITY = 8192
PUBLISHED_MOH = "MoH as published (plain PyTorch)"
DENSE_SDPA = "all heads, SDPA"
SPEEDUP_LIMIT_NOTE = (
    "keys and values are projected for all heads, so the limit is 1.33x at 2k "
    "tokens, 1.6x if Q and W_O are skipped"
)
ALL_HEADS_NOTE = (
    "computes all heads; active heads only are not adjacent in memory, and take 1.4 "
    "to 1.9 times as long"
)


def mixture_of_heads_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield cores and layers of 2k and 4k tokens, forward and with backward, and a decode step."""
    for tokens in (2048, 4096):
        for backward in (False, True):
            yield _RoutedCore(tokens).case(backward)
    for tokens in (2048,) if quick else (2048, 4096):
        for backward in (False, True):
            yield _layer_case(tokens, backward)
    yield _decode_step_case()


def _make_layer() -> Attention:
    torch.manual_seed(0)
    routed = REGISTRY["MixtureOfHeads"](always=NUM_SHARED_HEADS, active=NUM_ROUTED_HEADS)
    return Attention(
        design(model=MODEL_WIDTH, heads=NUM_HEADS, pattern="causal()", modifiers=(routed,))
    )


def _published_moh(layer: Attention) -> ReferenceMoH:
    project, output, routed = (
        layer.weights[name] for name in ("project", "output", "mixture_of_heads")
    )
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
    """Attention core of routed heads: from queries, keys, values and gates to head outputs."""

    tokens: int

    def case(self, backward: bool) -> BenchmarkCase:
        """Return the case; the peer computes all heads and scales them by their gates."""
        layer = _make_layer()
        probe = Probe("q", "k", "v")
        x = torch.randn(1, self.tokens, MODEL_WIDTH)
        with torch.no_grad():
            _, (gate,) = layer.head_outputs_and_gates(AttentionArguments(x, probe=probe))
        qkv = [
            probe.tensors[name].detach().clone().requires_grad_(backward)
            for name in ("q", "k", "v")
        ]
        runs = {
            DENSE_SDPA: _all_heads_core(gate),
            "ours": self._headwise_run(layer, x, gate, backward),
        }
        calls = {
            name: _forward_backward(run, qkv) if backward else _forward(run, qkv)
            for name, run in runs.items()
        }
        pairs = self.tokens * (self.tokens + 1) // 2
        flops = layer.spec.core.flops(pairs) * (NUM_SHARED_HEADS + NUM_ROUTED_HEADS) // NUM_HEADS
        required = RequiredWork(flops=flops * 7 // 2 if backward else flops)
        ours = calls.pop("ours")
        return BenchmarkCase(
            _case_name("core", self.tokens, backward),
            ours,
            calls,
            targets=(SpeedTarget(DENSE_SDPA, 1.5),),
            required_work=required,
        )

    def _headwise_run(
        self, layer: Attention, x: Tensor, gate: Tensor, backward: bool
    ) -> Callable[..., Tensor]:
        at = SequenceInfo.contiguous(0, self.tokens, "cpu")
        call = CallSignature(layer.spec, layer.spec.core, grad_enabled=backward)
        steps = CoreSteps.from_spec(layer.spec, layer.weights)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = AttentionMask(at, at, layer.spec.pattern)
            context = QueryContext(x, q, HEAD_DIM**-0.5, at)
            inputs = CoreInputs(q, k, v, mask, steps, context, {}, gates=(gate,))
            return BACKENDS["routed"].attend(call, inputs) * gate

        return run


def _all_heads_core(gate: Tensor) -> Callable[..., Tensor]:
    def run(*qkv: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2) * gate

    return run


def _forward(run: Callable[..., Any], args: list[Tensor]) -> TimedCall:
    def once() -> Any:
        with torch.no_grad():
            return run(*args)

    return once


def _forward_backward(run: Callable[..., Tensor], args: list[Tensor]) -> TimedCall:
    def once() -> Any:
        y = run(*args)
        return torch.autograd.grad(y, args, torch.ones_like(y))

    return once


def _layer_case(tokens: int, backward: bool) -> BenchmarkCase:
    """Return the case of a whole layer; the published code computes all heads."""
    layer = _make_layer()
    x = torch.randn(1, tokens, MODEL_WIDTH)
    published = _published_moh(layer)
    weights = [*published.maps.values()]

    def theirs(x: Tensor, *weights: Tensor) -> Tensor:
        return published._replace(maps=dict(zip(published.maps, weights, strict=True)))(x)

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        return layer(x)

    parts = {name: layer.weights[name] for name in ("project", "output", "mixture_of_heads")}
    params = {key: weight for part in parts.values() for key, weight in part.named_parameters()}
    our_args = [x.clone().requires_grad_(backward), *(params[name] for name in published.maps)]
    their_args = [
        x.clone().requires_grad_(backward),
        *(weight.clone().requires_grad_(backward) for weight in weights),
    ]
    make_call = _forward_backward if backward else _forward
    return BenchmarkCase(
        _case_name("layer", tokens, backward),
        make_call(ours, our_args),
        {PUBLISHED_MOH: make_call(theirs, their_args)},
        notes={"limit": SPEEDUP_LIMIT_NOTE},
    )


def _decode_step_case() -> BenchmarkCase:
    """Return the case of one decode step; the cache grows with every call and is replaced when it
    is full.
    """
    layer = _make_layer().eval()
    published = _published_moh(layer)
    x = torch.randn(1, NUM_CACHED + 1, MODEL_WIDTH)
    first = x[:, :NUM_CACHED]
    last = x[:, NUM_CACHED:]
    k, v = (torch.zeros(1, NUM_HEADS, CAPACITY, HEAD_DIM) for _ in "kv")
    with torch.no_grad():
        cache = layer.cache(batch=1, capacity=CAPACITY)
        layer(first, cache=cache)
        for cached, name in ((k, "k"), (v, "v")):
            cached[:, :, :NUM_CACHED] = (
                F.linear(first, published.maps[name])
                .view(1, NUM_CACHED, NUM_HEADS, HEAD_DIM)
                .transpose(1, 2)
            )
    state: dict[str, Any] = {"cache": deepcopy(cache), "t": NUM_CACHED}

    def ours() -> Tensor:
        if state["cache"].used >= CAPACITY:
            state["cache"] = deepcopy(cache)
        return layer(last, cache=state["cache"])

    def theirs() -> Tensor:
        t = state["t"] = state["t"] + 1 if state["t"] < CAPACITY else NUM_CACHED + 1
        q, k_new, v_new = (
            F.linear(last, published.maps[n]).view(1, 1, NUM_HEADS, HEAD_DIM).transpose(1, 2)
            for n in "qkv"
        )
        k[:, :, t - 1 : t], v[:, :, t - 1 : t] = k_new, v_new
        o = F.scaled_dot_product_attention(q, k[:, :, :t], v[:, :, :t])
        o = o * published.gates(last).transpose(1, 2)[..., None]
        return F.linear(o.transpose(1, 2).flatten(2), published.maps["o"])

    name = f"one decoded token, {NUM_CACHED:,} cached"
    return BenchmarkCase(
        name,
        _forward(ours, []),
        {PUBLISHED_MOH: _forward(theirs, [])},
        notes={"decode": ALL_HEADS_NOTE},
    )


KINDS = {
    "mixture_of_heads": CaseKind(
        "Mixture of heads, half of the heads active", mixture_of_heads_cases
    ),
}
