"""The cores of heads that are mixed at every pair: dynamically composed ones, and talking heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import backends
from ...backends import CallSignature, CoreInputs
from ...interfaces.core_types import QueryContext
from ...masking.sequence_info import AttentionMask, SequenceInfo
from ...nn.attention import Attention
from ...presets import design
from ...spec.attention_spec import AttentionSpec
from .. import reference_models as published
from ..benchmark_case import BenchmarkCase, RequiredWork, SpeedTarget, TimedCall

TITLE = "Cores of heads that are mixed at every pair: 16 heads of 64, causal"
NUM_HEADS, HEAD_DIM, NUM_TOKENS = 16, 64, 1024
PLAIN_SDPA, PUBLISHED_DCMHA = "plain heads, SDPA", "DCMHA as published (plain PyTorch)"
TARGET_SHARE = 1 / 3  # at most three times as long as the core of plain heads


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Forward, and forward with backward, beside the core of as many plain heads."""
    yield _dcmha_cases(backward=False)
    yield _dcmha_cases(backward=True)
    yield _talking_heads_case()


class MixedHeadCore:
    """The core of one spec on given queries, keys, values and factors; its gradients go to all of these."""

    def __init__(self, spec: AttentionSpec, tokens: int) -> None:
        torch.manual_seed(0)
        self.layer = Attention(spec)
        with torch.no_grad():  # composition starts next to none
            for parameter in self.layer.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        self.x, self.at = torch.randn(1, tokens, spec.model), SequenceInfo.contiguous(0, tokens, "cpu")
        self.qkv = [torch.randn(1, tokens, NUM_HEADS, HEAD_DIM).requires_grad_() for _ in range(3)]
        self.entry = self._kv_entry()
        self.grad = torch.randn(1, tokens, NUM_HEADS, HEAD_DIM)
        self.job = CallSignature(spec, spec.core, needs_grad=True)
        self.dispatch = backends.make_dispatch(self.job)

    def _kv_entry(self) -> dict[str, Tensor]:
        """What keys bring beside themselves."""
        held = {}
        with torch.no_grad():
            for name, mix, p in self.layer.mixes:
                held |= {f"{name}.{key}": factor for key, factor in mix.key_factors(self.x, p).items()}
        return {name: factor.clone().requires_grad_() for name, factor in held.items()}

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are asked of."""
        own = [
            p for name, p in self.layer.named_parameters() if name.split(".")[-1] in ("mixing", *_QUERY_FACTOR_NAMES)
        ]
        return [*self.qkv, *self.entry.values(), *own]

    def run(self) -> Tensor:
        """o_BTHV."""
        q, k, v = self.qkv
        inputs = CoreInputs(q, k, v, QueryContext(self.x, q, self.job.core.scale, self.at), self.entry, {})
        sight = AttentionMask(self.at, self.at, self.job.spec.pattern)
        return self.dispatch.attend(sight, inputs, self.layer.core_steps, None)

    def saved_bytes(self) -> int:
        """Bytes that it keeps for the way back, each storage once."""
        held: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made = self.run()
        assert made.requires_grad
        return sum(held.values())


_QUERY_FACTOR_NAMES = tuple(f"query_{name}" for name in ("hidden", "source", "target", "gate"))


def _dcmha_cases(backward: bool) -> BenchmarkCase:
    spec = design(preset="dcmha", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS)
    core = MixedHeadCore(spec, NUM_TOKENS)
    title = f"DCMHA core, {NUM_TOKENS:,} tokens, {'forward and backward' if backward else 'forward'}"
    runs = {"ours": core.run, PLAIN_SDPA: lambda: _plain_heads(core), PUBLISHED_DCMHA: lambda: _published_dcmha(core)}
    return _composed_case(title, core, runs, backward, _saved_bytes_growth(spec) if backward else {})


def _talking_heads_case() -> BenchmarkCase:
    spec = design(preset="talking", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS, pattern="causal()")
    core = MixedHeadCore(spec, NUM_TOKENS)
    mixing = [p for name, p in core.layer.named_parameters() if name.endswith("mixing")]
    runs = {"ours": core.run, PLAIN_SDPA: lambda: _plain_heads(core)}
    runs["talking heads by hand (plain PyTorch)"] = lambda: _talking_heads_reference(core, mixing)
    return _composed_case(
        f"talking heads core, {NUM_TOKENS:,} tokens, forward and backward", core, runs, True, _saved_bytes_growth(spec)
    )


def _composed_case(
    name: str, core: MixedHeadCore, runs: dict[str, Callable[[], Tensor]], backward: bool, notes: dict[str, str]
) -> BenchmarkCase:
    held = {who: _forward_backward(run, core, who) if backward else _without_grad(run) for who, run in runs.items()}
    ours = held.pop("ours")
    products = core.job.core.flops(NUM_TOKENS * (NUM_TOKENS + 1) // 2)
    need = RequiredWork(flops=7 * products // 2 if backward else products)
    aims = (SpeedTarget(PLAIN_SDPA, TARGET_SHARE),) if backward else ()
    return BenchmarkCase(name, ours, {**held}, aims, need, notes=notes, reported_peers=(PLAIN_SDPA,))


def _without_grad(run: Callable[[], Tensor]) -> TimedCall:
    def made() -> Tensor:
        with torch.no_grad():
            return run()

    return made


def _forward_backward(run: Callable[[], Tensor], core: MixedHeadCore, who: str) -> TimedCall:
    """Every gradient; of plain heads, those they have."""
    leaves = core.qkv if who == PLAIN_SDPA else core.leaves
    return lambda: torch.autograd.grad(run(), leaves, core.grad)


def _plain_heads(core: MixedHeadCore) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in core.qkv)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _published_dcmha(core: MixedHeadCore) -> Tensor:
    pairs: list[Any] = []
    for name, _, p in core.layer.mixes:
        kept = published.CompositionFactors(
            *(core.entry[f"{name}.{key}"] for key in published.CompositionFactors._fields)
        )
        pairs.append((published.make_branch(p)(core.x), kept))
    return published.composed_attention(core.qkv, pairs[0], pairs[1])


def _talking_heads_reference(core: MixedHeadCore, mixing: Sequence[Tensor]) -> Tensor:
    """a' = P^T a on the scores, and again on the weights (2003.02436)."""
    q, k, v = (t.transpose(1, 2) for t in core.qkv)
    a = torch.einsum("bgts,gh->bhts", q @ k.mT * HEAD_DIM**-0.5, mixing[0])
    later = torch.ones(a.shape[-2:], dtype=torch.bool).triu(1)
    w = torch.einsum("bgts,gh->bhts", a.masked_fill(later, torch.finfo(a.dtype).min).softmax(-1), mixing[1])
    return (w @ v).transpose(1, 2)


def _saved_bytes_growth(spec: AttentionSpec) -> dict[str, str]:
    """What is kept at one length and at twice that."""
    short, long = (MixedHeadCore(spec, count).saved_bytes() / 1e6 for count in (NUM_TOKENS, 2 * NUM_TOKENS))
    return {
        "memory": f"keeps {short:.1f} MB for the way back at {NUM_TOKENS:,} tokens, {long:.1f} MB at {2 * NUM_TOKENS:,}"
    }
