"""Specs of the contract tests, and layers and inputs for them.

No two axes are equal: batch 3, tokens 7, source tokens 11, source width 13, model 10, heads 6, dim 4.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

import headwise as hw
from headwise.backends import BACKENDS, CallSignature
from headwise.interfaces import Modifier, Part
from headwise.interfaces.core_types import Phase
from headwise.spec.attention_spec import AttentionSpec

BATCH, TOKENS, SOURCE, WIDTH = 3, 7, 11, 13
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def base(**sizes) -> AttentionSpec:
    """A small spec; sizes that are not given differ from each other."""
    return hw.design(**({"model": 10, "heads": 6, "dim": 4} | sizes))


def examples() -> dict[str, AttentionSpec]:
    """Every example of every part, by name and number."""
    parts = {name: cls for name, cls in hw.parts.REGISTRY.items() if issubclass(cls, Part)}
    return {f"{name}{n}": spec for name in sorted(parts) for n, spec in enumerate(parts[name].examples(base))}


def pairs() -> dict[str, AttentionSpec]:
    """Two modifiers of one phase in both orders, for all modifiers that can be combined."""
    modifiers = [
        hw.Rotary(base=30.0),
        hw.QKNorm(),
        hw.Knocking(sides="qkv"),
        hw.Alibi(),
        hw.T5Bias(buckets=8, reach=9),
        hw.Shaw(reach=2),
        hw.Softcap(limit=1.5),
        hw.TalkingHeads(),
        hw.Dynamic(rank=1),
        hw.HeadNorm(),
        hw.DifferentialV2(),
        hw.HeadGate(),
        hw.OutputGate(),
        hw.Routed(always=2, active=2),
    ]
    ordered_pairs = [
        (a, b) for a, b in permutations(modifiers, 2) if a.phase is b.phase and a.phase is not Phase.WEIGHTS
    ]
    return {
        f"{_name(a)}-{_name(b)}": base(kv=2, vdim=5, pattern="causal()", modifiers=(a, b)) for a, b in ordered_pairs
    }


def _name(modifier: Modifier) -> str:
    return type(modifier).__name__ + getattr(modifier, "on", "")[:1]


EXAMPLES = examples()
PAIRS = pairs()
EVERY = EXAMPLES | PAIRS


def as_causal(spec: AttentionSpec) -> AttentionSpec:
    """The spec in a form that can be decoded: self-attention, causal where its own pattern reads future tokens."""
    pattern = spec.pattern if spec.pattern.tokens_before_decode == 0 else hw.Causal()
    return replace(spec, pattern=pattern, source=None)


def as_cross_attention(spec: AttentionSpec) -> AttentionSpec:
    """The spec as cross-attention over a source of another width."""
    return replace(spec, pattern=hw.Full(), source=WIDTH)


def layer(spec: AttentionSpec, dtype: torch.dtype = torch.float64, backend: str | None = None) -> hw.Attention:
    """A layer with random weights, so that no parameter stays at its initial zero or one."""
    layer_ = hw.Attention(spec, backend=backend).to(dtype).eval()
    with torch.no_grad():
        for parameter in layer_.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return layer_


def tensors(spec: AttentionSpec, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor | None]:
    """Input x, and a source if the spec is a cross-attention."""
    x = torch.randn(BATCH, TOKENS, spec.model, dtype=torch.float64).to(dtype)
    return x, None if spec.source is None else torch.randn(BATCH, SOURCE, spec.source, dtype=torch.float64).to(dtype)


def sequence_infos(x: Tensor) -> dict[str, hw.SequenceInfo]:
    """Full, right-padded, left-padded and packed batches of seven tokens."""
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 1, 1, 1, 1]])
    return {
        "whole": hw.SequenceInfo.from_batch(x),
        "right": hw.SequenceInfo.from_batch(x, lengths=[7, 3, 0]),
        "left": hw.SequenceInfo.from_batch(x, lengths=[5, 7, 2], pad="left"),
        "packed": hw.SequenceInfo.from_batch(x, segments=packed),
    }


def supporting_backends(
    spec: AttentionSpec, *, dtype: torch.dtype = torch.float64, single_query: bool = False, **more
) -> list[str]:
    """Backends that run this spec on the CPU; `more` are further fields of the `CallSignature`."""
    more = {"needs_grad": torch.is_grad_enabled()} | more
    call = CallSignature(
        spec, spec.projection_form(single_query).core(spec), "cpu", dtype, single_query=single_query, **more
    )
    return [name for name, backend in BACKENDS.items() if name != "flex" and not backend.unsupported_reasons(call)]


def check_close(ours: Tensor, theirs: Tensor, **tolerance: float) -> None:
    """Assert equality within float64 rounding, or within the given tolerance."""
    torch.testing.assert_close(ours, theirs, **(EXACT | tolerance), check_dtype=False)


def change_spec(spec: AttentionSpec, **changes) -> AttentionSpec:
    """The spec with some fields replaced."""
    return replace(spec, **changes)
