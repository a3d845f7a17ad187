"""Small specs with a part, random layers and inputs for them, and what is measured of a layer.

No two axes are equal: batch 3, tokens 7, source tokens 11, source width 13, model 10, heads 6, dim
4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from ...attention.attention import Attention
from ...attention.backends import BACKENDS, CallSignature, split_by_pattern, unsupported_reasons
from ...attention.cache import KVCache
from ...attention.interfaces import Modifier, Part
from ...attention.interfaces.core_types import CallSize
from ...attention.masking.patterns import Causal, Full
from ...attention.masking.sequence_info import SequenceInfo
from ...attention.presets import design
from ...attention.spec.attention_spec import SLOTS, AttentionSpec
from ...util.errors import SpecError

BATCH = 3
TOKENS = 7
SOURCE = 11
WIDTH = 13
CAPACITY = 9  # slots of a cache that all tokens fit in
# Layers around a part that is checked.
SURROUNDINGS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal, 2 key-value heads": {"pattern": "causal()", "kv": 2},
    "window of 3 keys, values of width 5": {"pattern": "window(3)", "vdim": 5},
}
CROSS_ATTENTION = "cross-attention"
COMPILED_BACKENDS = ("flex",)  # compile every call, which takes minutes


def make_base_spec(**sizes: Any) -> AttentionSpec:
    """A small spec; sizes that are not given differ from each other."""
    options: dict[str, Any] = {"model": 10, "heads": 6, "dim": 4} | sizes
    return design(**options)


def list_cases(part: Part) -> tuple[dict[str, AttentionSpec], dict[str, str]]:
    """Specs that contain this part or are examples of its class, by name; and the reasons why
    others are impossible.
    """
    slot = _slot_of(part)
    specs: dict[str, AttentionSpec] = {}
    reasons: dict[str, str] = {}
    for name, options in SURROUNDINGS.items():
        try:
            specs[name] = make_base_spec(**options, **slot)
        except SpecError as reason:
            reasons[name] = str(reason)
    if specs:
        try:
            specs[CROSS_ATTENTION] = as_cross_attention(next(iter(specs.values())))
        except SpecError as reason:
            reasons[CROSS_ATTENTION] = str(reason)
    for n, spec in enumerate(type(part).examples(make_base_spec)):
        if spec not in specs.values():
            specs[f"example {n}"] = spec
    return specs, reasons


def _slot_of(part: Part) -> dict[str, Any]:
    """The argument of `design` that puts this part into a spec."""
    if isinstance(part, Modifier):
        return {"modifiers": (part,)}
    slots = [name for name, kind in SLOTS.items() if isinstance(part, kind)]
    if not slots:
        raise SpecError(
            f"{part!r} fills no slot of a spec; derive its class from one of headwise.attention.interfaces"
        )
    return {slots[0]: part}


def as_causal(spec: AttentionSpec) -> AttentionSpec:
    """The spec in a form that can be decoded: self-attention, causal where its own pattern reads
    future tokens.
    """
    pattern = spec.pattern if spec.pattern.tokens_before_decode == 0 else Causal()
    return replace(spec, pattern=pattern, source=None)


def as_cross_attention(spec: AttentionSpec) -> AttentionSpec:
    """The spec as cross-attention over a source of another width."""
    return replace(spec, pattern=Full(), source=WIDTH)


def make_layer(
    spec: AttentionSpec, dtype: torch.dtype = torch.float64, backend: str | None = None
) -> Attention:
    """A layer with random weights, so that no parameter stays at its initial zero or one."""
    layer = Attention(spec, backend=backend).to(dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return layer


def make_inputs(
    spec: AttentionSpec, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor | None]:
    """Random input x, and a source if the spec is a cross-attention."""
    x = torch.randn(BATCH, TOKENS, spec.model, dtype=torch.float64).to(dtype)
    return x, None if spec.source is None else torch.randn(
        BATCH, SOURCE, spec.source, dtype=torch.float64
    ).to(dtype)


def sequence_infos(x: Tensor) -> dict[str, SequenceInfo]:
    """Full, right-padded, left-padded and packed batches of seven tokens."""
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 1, 1, 1, 1]])
    return {
        "whole": SequenceInfo.from_batch(x),
        "right": SequenceInfo.from_batch(x, lengths=[7, 3, 0]),
        "left": SequenceInfo.from_batch(x, lengths=[5, 7, 2], pad="left"),
        "packed": SequenceInfo.from_batch(x, segments=packed),
    }


def supporting_backends(
    spec: AttentionSpec,
    *,
    dtype: torch.dtype = torch.float64,
    single_query: bool = False,
    **more: Any,
) -> list[str]:
    """Backends that run this spec on the CPU; `more` are further fields of the `CallSignature`."""
    more = {"needs_grad": torch.is_grad_enabled()} | more
    core = spec.core_of(spec.projection_form(single_query))
    call = CallSignature(spec, core, "cpu", dtype, single_query=single_query, **more)
    names = [name for name in BACKENDS if name not in COMPILED_BACKENDS]
    return [
        name
        for name in names
        if not any(unsupported_reasons(name, part) for part in split_by_pattern(call, name))
    ]


def core_flops(spec: AttentionSpec, backend: str, work: CallSize) -> int:
    """FLOPs that a backend executes in the core of a call on the CPU, in one call for each pattern
    of the heads.
    """
    parts = split_by_pattern(CallSignature(spec, spec.core), backend)
    return sum(BACKENDS[backend].executed_flops(part, work) for part in parts)


# --- FLOPs, decoding and gradients ----------------------------------------------------------------


def _flash_flops_on_cpu(
    q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """FLOPs of flash attention on the CPU, for which FlopCounterMode has no
    entry and counts zero.
    """
    return sdpa_flop(q, k, v)


FLOP_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops_on_cpu}


def count_torch_flops(layer: Attention, x: Tensor, **call: Any) -> int:
    """FLOPs of a call as counted by torch's FlopCounterMode."""
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter, torch.no_grad():
        layer(x, **call)
    return counter.get_total_flops()


def decode_in_chunks(
    layer: Attention, x: Tensor, chunks: Iterable[int], cache: KVCache, **call: Any
) -> Tensor:
    """Output of a layer whose input arrives in chunks through a cache."""
    outputs = list[Tensor]()
    start = 0
    for count in chunks:
        outputs.append(layer(x[:, start : start + count], cache=cache, **call))
        start += count
    return torch.cat(outputs, 1)


def layer_gradients(layer: Attention, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Gradients of x and every parameter under a loss that weights every output differently."""
    loss = (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()
    named = dict(layer.named_parameters()) | {"x": x}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(named[name]) if gradient is None else gradient
        for name, gradient in zip(named, gradients, strict=True)
    }
