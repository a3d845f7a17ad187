"""The heads of a layer in another order, which is the same layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..axes import transform_axes, select_heads
from ..errors import SpecError
from ..spec import AttentionSpec


def make_groups_contiguous(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """The same layer with the heads that share a key-value head side by side, as other libraries want them.

    Where all are read equally often, `heads.even` holds after it.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, kv=2)
    >>> mixed = replace(spec, heads=replace(spec.heads, reads=(1, 0, 0, 1)))
    >>> ordered, _ = make_groups_contiguous(mixed, hw.Attention(mixed).state_dict())
    >>> ordered == spec
    True
    """
    return permute_heads(spec, weights, sorted(range(spec.heads.q), key=lambda head: spec.heads.reads[head]))


def permute_heads(
    spec: AttentionSpec, weights: Mapping[str, Tensor], order: Sequence[int]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """The same layer with its score heads in this order; output heads follow, and key-value heads as they are read.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, kv=2)
    >>> permute_heads(spec, hw.Attention(spec).state_dict(), (2, 0, 3, 1))[0].heads.reads
    (0, 1, 0, 1)
    """
    heads = spec.heads
    if sorted(order) != list(range(heads.q)):
        raise SpecError(f"order={list(order)} must name each of {heads.q} score heads once")
    place = {head: n for n, head in enumerate(order)}
    kv = list(dict.fromkeys(heads.reads[head] for head in order))
    if heads.values:
        raise SpecError(f"keys and values are grouped apart here ({heads}); leave the heads in their order")
    each = len(spec.score_head_of_row) // len(spec.score_head_of_output)
    if alone := [out for out in range(len(spec.score_head_of_output)) if len(spec.required_score_heads(out)) > each]:
        needed = sorted(spec.required_score_heads(alone[0]))
        raise SpecError(f"head {alone[0]} needs heads {needed} where they stand; leave the heads in their order")
    outs = sorted(range(len(spec.score_head_of_output)), key=lambda out: place[spec.score_head_of_output[out]])
    reads = tuple(kv.index(heads.reads[head]) for head in order)
    speaks = tuple(place[spec.score_head_of_output[out]] for out in outs)
    moved = replace(spec, heads=replace(heads, reads=reads, speaks=() if speaks == spec.default_score_heads(heads.q) else speaks))
    voiced = [place[voice] for out in outs for voice in spec.score_head_of_row[out * each : (out + 1) * each]]
    if voiced != list(moved.score_head_of_row):
        raise SpecError(f"order={list(order)} parts heads that speak as one; keep them side by side")
    return moved, transform_axes(spec, weights, {"q": select_heads(order), "kv": select_heads(kv), "out": select_heads(outs)})
