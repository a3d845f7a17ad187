"""Cores that need all attention weights: heads mixed at every query-key pair, and entmax in place
of softmax.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention import backends
from headwise.attention.attention import Attention
from headwise.attention.backends import CallSignature, CoreInputs
from headwise.attention.interfaces.core_types import QueryContext
from headwise.attention.masking.sequence_info import AttentionMask, SequenceInfo
from headwise.attention.presets import design
from headwise.attention.spec.attention_spec import AttentionSpec

from . import reference_models as published
from .harness import (
    BenchmarkCase,
    CaseKind,
    MissingPeer,
    RequiredWork,
    SpeedTarget,
    TimedCall,
    make_peer,
)

NUM_HEADS = 16
HEAD_DIM = 64
NUM_TOKENS = 1024
PLAIN_SDPA = "plain heads, SDPA"
PUBLISHED_DCMHA = "DCMHA as published (plain PyTorch)"
TARGET_SHARE = 1 / 3  # at most three times as long as the core of plain heads


def head_composition_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield DCMHA and talking heads, against the core of plain heads."""
    yield _dcmha_cases(backward=False)
    yield _dcmha_cases(backward=True)
    yield _talking_heads_case()


class MixedHeadCore:
    """The attention core of one spec with fixed queries, keys, values and mixing factors, which get
    gradients.
    """

    def __init__(self, spec: AttentionSpec, tokens: int) -> None:
        torch.manual_seed(0)
        self.layer = Attention(spec)
        with torch.no_grad():  # the initial composition is nearly the identity
            for parameter in self.layer.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        self.x = torch.randn(1, tokens, spec.model)
        self.at = SequenceInfo.contiguous(0, tokens, "cpu")
        self.qkv = [torch.randn(1, tokens, NUM_HEADS, HEAD_DIM).requires_grad_() for _ in range(3)]
        self.entry = self._kv_entry()
        self.grad = torch.randn(1, tokens, NUM_HEADS, HEAD_DIM)
        self.call = CallSignature(spec, spec.core, grad_enabled=True)
        self.dispatch = backends.make_dispatch(self.call)

    def _kv_entry(self) -> dict[str, Tensor]:
        """Return the mixing factors of the keys, by name."""
        factors = {}
        with torch.no_grad():
            for name, mix, p in self.layer.mixes:
                factors |= {
                    f"{name}.{key}": factor for key, factor in mix.key_factors(self.x, p).items()
                }
        return {name: factor.clone().requires_grad_() for name, factor in factors.items()}

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors that get gradients: q, k, v, the factors of keys, and the parameters of the
        mixing.
        """
        mixing_params = [
            p
            for name, p in self.layer.named_parameters()
            if name.split(".")[-1] in ("mixing", *_QUERY_FACTOR_NAMES)
        ]
        return [*self.qkv, *self.entry.values(), *mixing_params]

    def run(self) -> Tensor:
        """Return the head outputs o_BTHV."""
        q, k, v = self.qkv
        mask = AttentionMask(self.at, self.at, self.call.spec.pattern)
        context = QueryContext(self.x, q, self.call.core.scale, self.at)
        steps = self.layer.core_steps
        return self.dispatch.attend(CoreInputs(q, k, v, mask, steps, context, self.entry))

    def saved_bytes(self) -> int:
        """Return the bytes saved for the backward pass, counting each storage once."""
        bytes_of_storage: dict[int, int] = {}

        def record(tensor: Tensor) -> Tensor:
            bytes_of_storage[tensor.untyped_storage().data_ptr()] = (
                tensor.untyped_storage().nbytes()
            )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            o_BTHV = self.run()
        assert o_BTHV.requires_grad
        return sum(bytes_of_storage.values())


_QUERY_FACTOR_NAMES = tuple(f"query_{name}" for name in ("hidden", "source", "target", "gate"))


def _dcmha_cases(backward: bool) -> BenchmarkCase:
    spec = design(preset="dcmha", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS)
    core = MixedHeadCore(spec, NUM_TOKENS)
    title = (
        f"DCMHA core, {NUM_TOKENS:,} tokens, {'forward and backward' if backward else 'forward'}"
    )
    runs = {
        "ours": core.run,
        PLAIN_SDPA: lambda: _plain_heads(core),
        PUBLISHED_DCMHA: lambda: _published_dcmha(core),
    }
    return _composed_case(
        title, core, runs, backward, _saved_bytes_growth(spec) if backward else {}
    )


def _talking_heads_case() -> BenchmarkCase:
    spec = design(preset="talking", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS, pattern="causal()")
    core = MixedHeadCore(spec, NUM_TOKENS)
    mixing = [p for name, p in core.layer.named_parameters() if name.endswith("mixing")]
    runs = {"ours": core.run, PLAIN_SDPA: lambda: _plain_heads(core)}
    runs["talking heads by hand (plain PyTorch)"] = lambda: _talking_heads_reference(core, mixing)
    return _composed_case(
        f"talking heads core, {NUM_TOKENS:,} tokens, forward and backward",
        core,
        runs,
        True,
        _saved_bytes_growth(spec),
    )


def _composed_case(
    name: str,
    core: MixedHeadCore,
    runs: dict[str, Callable[[], Tensor]],
    backward: bool,
    notes: dict[str, str],
) -> BenchmarkCase:
    calls = {
        name: _forward_backward(run, core, name) if backward else _without_grad(run)
        for name, run in runs.items()
    }
    ours = calls.pop("ours")
    products = core.call.core.flops(NUM_TOKENS * (NUM_TOKENS + 1) // 2)
    required = RequiredWork(flops=7 * products // 2 if backward else products)
    targets = (SpeedTarget(PLAIN_SDPA, TARGET_SHARE),) if backward else ()
    return BenchmarkCase(
        name, ours, {**calls}, targets, required, notes=notes, reported_peers=(PLAIN_SDPA,)
    )


def _without_grad(run: Callable[[], Tensor]) -> TimedCall:
    return torch.no_grad()(run)


def _forward_backward(run: Callable[[], Tensor], core: MixedHeadCore, name: str) -> TimedCall:
    """Return a call that gives the gradients of all leaves; plain heads only have q, k and v."""
    leaves = core.qkv if name == PLAIN_SDPA else core.leaves
    return lambda: torch.autograd.grad(run(), leaves, core.grad)


def _plain_heads(core: MixedHeadCore) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in core.qkv)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _published_dcmha(core: MixedHeadCore) -> Tensor:
    pairs: list[Any] = []
    for name, _, p in core.layer.mixes:
        key_factors = published.CompositionFactors(
            *(core.entry[f"{name}.{key}"] for key in published.CompositionFactors._fields)
        )
        pairs.append((published.make_branch(p)(core.x), key_factors))
    return published.composed_attention(core.qkv, pairs[0], pairs[1])


def _talking_heads_reference(core: MixedHeadCore, mixing: Sequence[Tensor]) -> Tensor:
    """a' = P^T a on the scores, and again on the weights (2003.02436)."""
    q, k, v = (t.transpose(1, 2) for t in core.qkv)
    a = torch.einsum("bgts,gh->bhts", q @ k.mT * HEAD_DIM**-0.5, mixing[0])
    future = torch.ones(a.shape[-2:], dtype=torch.bool).triu(1)
    w = torch.einsum(
        "bgts,gh->bhts", a.masked_fill(future, torch.finfo(a.dtype).min).softmax(-1), mixing[1]
    )
    return (w @ v).transpose(1, 2)


def _saved_bytes_growth(spec: AttentionSpec) -> dict[str, str]:
    """Return a note with the saved bytes at one length and at twice that."""
    short, long = (
        MixedHeadCore(spec, count).saved_bytes() / 1e6 for count in (NUM_TOKENS, 2 * NUM_TOKENS)
    )
    lengths = f"{short:.1f} MB at {NUM_TOKENS:,} tokens, {long:.1f} MB at {2 * NUM_TOKENS:,}"
    return {"memory": f"saved for the backward pass: {lengths}"}


NUM_ROWS = 4096
NUM_KEYS = 1024
NUM_CORE_TOKENS = 1024
ENTMAX15_PACKAGE = "entmax package (entmax15)"
ENTMAX_BISECT_PACKAGE = "entmax package (entmax_bisect)"
SOFTMAX_BASELINE = "softmax, for scale"
SOFTMAX_SDPA = "softmax, SDPA, for scale"
WeightFunction = Callable[[Tensor], Tensor]


def entmax_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield entmax by the kernel, by plain tensor operations and by compiled ones, then cores with
    entmax.
    """
    layer = Attention(design(preset="entmax", model=64, heads=1))
    part = layer.spec.normaliser
    p = layer.weights["normaliser"]
    allowed = torch.ones(1, 1, 1, NUM_KEYS, dtype=torch.bool)
    variants: list[tuple[str, WeightFunction, float]] = [
        ("alpha 1.5 by the kernel", lambda s: part.fused_normalise(s, allowed, p), 20.0)
    ]
    if not quick:
        variants.append(
            ("alpha 1.5, plain tensor operations", lambda s: part.normalise(s, allowed, p), 2.0)
        )
    if not quick and any(map(shutil.which, ("c++", "g++", "clang++"))):
        compiled: Any = torch.compile(part.normalise, dynamic=False)
        variants.append(
            ("alpha 1.5, plain tensor operations compiled", lambda s: compiled(s, allowed, p), 20.0)
        )
    for name, normalise, ratio in variants:
        for backward in (False, True):
            yield _fixed_alpha_case(name, normalise, ratio, backward)
    for backward in () if quick else (False, True):
        yield _learned_alpha_case(backward)
    for backward in (False, True):
        yield _entmax_core_case(backward)


class ScoreRows(NamedTuple):
    """Rows of scores, and the gradient with respect to the weights."""

    s: Tensor
    grad: Tensor

    @staticmethod
    def with_heads(heads: int) -> ScoreRows:
        """Return all rows, divided evenly among `heads` heads."""
        torch.manual_seed(0)
        return ScoreRows(*(torch.randn(1, heads, NUM_ROWS // heads, NUM_KEYS) for _ in range(2)))

    def run(self, normalise: WeightFunction, backward: bool, *learned: Tensor) -> TimedCall:
        """Return a call that gives the weights, or the gradients of the scores and of `learned`."""
        if not backward:
            return lambda: normalise(self.s)
        leaves = [self.s.clone().requires_grad_(), *learned]
        return lambda: torch.autograd.grad(normalise(leaves[0]), leaves, self.grad)

    def required_work(self, backward: bool) -> RequiredWork:
        """Return the bytes of the scores; the backward pass also reads weights
        and their gradients.
        """
        return RequiredWork(bytes_read=self.s.nbytes * (3 if backward else 1))


def _fixed_alpha_case(
    name: str, ours: WeightFunction, ratio: float, backward: bool
) -> BenchmarkCase:
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
    targets = (SpeedTarget(ENTMAX15_PACKAGE, ratio),)
    required = rows.required_work(backward)
    return BenchmarkCase(
        _case_title(name, backward),
        rows.run(ours, backward),
        peers,
        targets,
        required,
        reported_peers=(SOFTMAX_BASELINE,),
    )


def _learned_alpha_case(backward: bool) -> BenchmarkCase:
    """Return the case of a learned alpha per head, from 1.05 to 1.95 over 16 heads, with its
    gradient.
    """
    fixed = design(preset="entmax", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS)
    part = replace(fixed.normaliser, kind="learned")
    rows = ScoreRows.with_heads(NUM_HEADS)
    layer = Attention(replace(fixed, normaliser=part))
    p = layer.weights["normaliser"]
    allowed = torch.ones(1, 1, 1, NUM_KEYS, dtype=torch.bool)
    with torch.no_grad():
        p["a"].copy_(torch.logit(torch.linspace(0.05, 0.95, NUM_HEADS)))

    def alpha() -> Tensor:
        return (1 + p["a"].sigmoid())[:, None, None]

    learned = (p["a"],)
    peers: dict[str, TimedCall | MissingPeer] = {
        ENTMAX_BISECT_PACKAGE: make_peer(
            "entmax",
            lambda library: rows.run(
                lambda s: library.entmax_bisect(s, alpha()), backward, *learned
            ),
        ),
        "plain tensor operations": rows.run(
            lambda s: part.normalise(s, allowed, p), backward, *learned
        ),
        SOFTMAX_BASELINE: rows.run(lambda s: s.softmax(-1), backward),
    }
    ours = rows.run(lambda s: part.fused_normalise(s, allowed, p), backward, *learned)
    name = "alpha learned by 16 heads, by the kernel"
    targets = (SpeedTarget(ENTMAX_BISECT_PACKAGE, 20.0),)
    required = rows.required_work(backward)
    return BenchmarkCase(
        _case_title(name, backward),
        ours,
        peers,
        targets,
        required,
        reported_peers=(SOFTMAX_BASELINE,),
    )


def _entmax_core_case(backward: bool) -> BenchmarkCase:
    """Return the case of a core with entmax; peers compute all weights and multiply them with all
    values.
    """
    core = MixedHeadCore(
        design(preset="entmax", model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS, pattern="causal()"),
        NUM_CORE_TOKENS,
    )
    future = torch.ones(NUM_CORE_TOKENS, NUM_CORE_TOKENS, dtype=torch.bool).triu(1)

    def attend(normalise: WeightFunction) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in core.qkv)
        return (
            normalise((q @ k.mT * HEAD_DIM**-0.5).masked_fill(future, -torch.inf)) @ v
        ).transpose(1, 2)

    def flash() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in core.qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def run(compute: Callable[[], Tensor]) -> TimedCall:
        return (
            (lambda: torch.autograd.grad(compute(), core.qkv, core.grad))
            if backward
            else torch.no_grad()(compute)
        )

    peers: dict[str, TimedCall | MissingPeer] = {
        ENTMAX15_PACKAGE: make_peer(
            "entmax", lambda library: run(lambda: attend(lambda s: library.entmax15(s, dim=-1)))
        ),
        SOFTMAX_SDPA: run(flash),
    }
    # Only the product of the scores: few keys have weight, so that few values are read.
    products = core.call.core.flops(NUM_CORE_TOKENS * (NUM_CORE_TOKENS + 1) // 2) // 2
    targets = (SpeedTarget(ENTMAX15_PACKAGE, 2.0),)
    required = RequiredWork(flops=(4 if backward else 1) * products)
    name = f"core, alpha 1.5, {NUM_CORE_TOKENS:,} tokens"
    notes = (
        {"memory": f"saves {core.saved_bytes() / 1e6:.1f} MB for the backward pass"}
        if backward
        else {}
    )
    return BenchmarkCase(
        _case_title(name, backward),
        run(core.run),
        peers,
        targets,
        required,
        reported_peers=(SOFTMAX_SDPA,),
        notes=notes,
    )


def _case_title(name: str, backward: bool) -> str:
    return f"{name}, {'forward and backward' if backward else 'forward'}"


KINDS = {
    "head_composition": CaseKind(
        "Cores that mix heads at each query-key pair: 16 causal heads", head_composition_cases
    ),
    "entmax": CaseKind(
        "Entmax: 4,096 rows of 1,024 scores, and 16 causal heads of 64", entmax_cases
    ),
}
