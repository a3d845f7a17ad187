"""Specs of the contract tests: every example of every part, and pairs of modifiers; and layers of
`part_checks`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.backends import BACKENDS, CallSignature, split_by_pattern
from headwise.attention.interfaces import Modifier, Part
from headwise.attention.interfaces.core_types import CallSize, Phase
from headwise.attention.spec.attention_spec import AttentionSpec
from headwise.costs.part_checks import (
    BATCH,
    SOURCE,
    TOKENS,
    WIDTH,
    as_causal,
    as_cross_attention,
    make_base_spec as base,
    make_inputs as tensors,
    make_layer as layer,
    sequence_infos,
    supporting_backends,
)

__all__ = [
    "BATCH",
    "SOURCE",
    "TOKENS",
    "WIDTH",
    "as_causal",
    "as_cross_attention",
    "base",
    "layer",
    "sequence_infos",
]
__all__ += ["core_flops", "supporting_backends", "tensors"]
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def core_flops(spec: AttentionSpec, backend: str, work: CallSize) -> int:
    """FLOPs that a backend executes in the core, in one call for each pattern of the heads."""
    parts = split_by_pattern(CallSignature(spec, spec.core), backend)
    return sum(BACKENDS[backend].executed_flops(part, work) for part in parts)


def examples() -> dict[str, AttentionSpec]:
    """Every example of every part, by name and number."""
    parts = {name: cls for name, cls in hw.parts.REGISTRY.items() if issubclass(cls, Part)}
    return {
        f"{name}{n}": spec
        for name in sorted(parts)
        for n, spec in enumerate(parts[name].examples(base))
    }


def pairs() -> dict[str, AttentionSpec]:
    """Two modifiers of one phase in both orders, for all modifiers that can be combined."""
    modifiers = [
        hw.parts.Rotary(base=30.0),
        hw.parts.QKNorm(),
        hw.parts.KnockingHeads(sides="qkv"),
        hw.parts.Alibi(),
        hw.parts.T5Bias(buckets=8, reach=9),
        hw.parts.Shaw(reach=2),
        hw.parts.Softcap(limit=1.5),
        hw.parts.TalkingHeads(),
        hw.parts.DynamicComposition(rank=1),
        hw.parts.HeadNorm(),
        hw.parts.DifferentialV2(),
        hw.parts.HeadGate(),
        hw.parts.OutputGate(),
        hw.parts.MixtureOfHeads(always=2, active=2),
    ]
    ordered_pairs = [
        (a, b)
        for a, b in permutations(modifiers, 2)
        if a.phase is b.phase and a.phase is not Phase.WEIGHTS
    ]
    return {
        f"{_name(a)}-{_name(b)}": base(kv=2, vdim=5, pattern="causal()", modifiers=(a, b))
        for a, b in ordered_pairs
    }


def _name(modifier: Modifier) -> str:
    return type(modifier).__name__ + getattr(modifier, "on", "")[:1]


def patterns_per_head() -> dict[str, AttentionSpec]:
    """Heads with different patterns: in and out of order, within a group of query heads, cached,
    and mixed.
    """
    dilated = hw.patterns.PerHead(
        (hw.patterns.Window(3, after=1), hw.patterns.Dilated(3, rate=2, after=1)),
        (0, 0, 1, 1, 0, 1),
    )
    streaming = hw.patterns.PerHead(
        (hw.patterns.Causal(), hw.patterns.Window(2) | hw.patterns.First(1)), (0, 1, 0, 1, 1, 1)
    )
    windows = hw.patterns.PerHead(
        (hw.patterns.Window(2), hw.patterns.Window(4)), (0, 0, 0, 1, 1, 1)
    )
    birds = hw.patterns.PerHead.from_heads(
        hw.patterns.BigBird(7, block=2, globals=1, random=1, seed=head) for head in range(6)
    )
    mixes = (hw.parts.TalkingHeads(), hw.parts.TalkingHeads(on="weights", bias=True))
    specs = (
        base(pattern=dilated, bias="qkvo"),
        base(pattern=streaming, kv=2, modifiers=(hw.parts.Rotary(base=30.0),)),
        base(pattern=windows, kv=3, vdim=5),
        base(pattern=birds),
        base(
            pattern=hw.patterns.PerHead(
                (hw.patterns.Full(), hw.patterns.Window(5, after=2)), (0, 1, 1, 0, 1, 1)
            ),
            source=WIDTH,
        ),
        base(pattern=streaming, kv=6, modifiers=(hw.parts.Alibi(),)),
        base(pattern=streaming, kv=3, modifiers=mixes),
    )
    return {f"PerHead{n}": spec for n, spec in enumerate(specs)}


EXAMPLES = examples() | patterns_per_head()
ONE_SEQUENCE = [name for name, spec in EXAMPLES.items() if spec.source is None]
WITHOUT_STATE = [name for name, spec in EXAMPLES.items() if not spec.recurrent_part]
PAIRS = pairs()
EVERY = EXAMPLES | PAIRS
ORDERS = defaultdict[frozenset[str], list[str]](list)  # of each pair
for pair in PAIRS:
    ORDERS[frozenset(pair.split("-"))].append(pair)
DRAW = random.Random(0)
QUICK_PAIRS = {DRAW.choice(orders) for orders in ORDERS.values()}  # `make slow` takes all
QUICK = EXAMPLES | {name: PAIRS[name] for name in PAIRS if name in QUICK_PAIRS}
EVERY_CASE = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EVERY]


def check_close(ours: Tensor, theirs: Tensor, **tolerance: float) -> None:
    """Assert equality within float64 rounding, or within the given tolerance."""
    torch.testing.assert_close(ours, theirs, **(EXACT | tolerance), check_dtype=False)


def with_ring_cache(spec: AttentionSpec) -> AttentionSpec:
    """The spec with the first and the latest keys, which a ring caches; skips a test of a spec that
    cannot have this pattern.
    """
    try:
        return replace(as_causal(spec), pattern=hw.patterns.Window(3) | hw.patterns.First(2))
    except hw.SpecError as reason:
        pytest.skip(f"not defined for a window: {reason}")


def load_layer(
    spec: AttentionSpec, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64
) -> hw.Attention:
    """A layer with these weights, in evaluation mode."""
    layer = hw.Attention(spec).to(dtype).eval()
    layer.load_state_dict(weights, strict=True)
    return layer


def change_spec(spec: AttentionSpec, **changes) -> AttentionSpec:
    """The spec with some fields replaced."""
    return replace(spec, **changes)
