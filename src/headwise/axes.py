"""Cut, share and repeat heads along their named axes, knowing no layer by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import SpecError
from .grouping import Heads
from .layout import Layout
from .spec import SLOTS, AttentionSpec

Weights = Mapping[str, Tensor]


def take(keep: Sequence[int]) -> Callable[[Tensor, int], Tensor]:
    """Keep these, in this order."""
    return lambda t, axis: t.index_select(axis, torch.tensor(list(keep), dtype=torch.int64, device=t.device))


def merge(groups: Sequence[Sequence[int]]) -> Callable[[Tensor, int], Tensor]:
    """The mean of each group."""
    return lambda t, axis: torch.stack([take(group)(t, axis).mean(axis) for group in groups], axis)


def repeat(reads: Sequence[int]) -> Callable[[Tensor, int], Tensor]:
    """One copy for every reader, of what it reads."""
    return take(reads)


def changed(
    spec: AttentionSpec, weights: Weights, moves: Mapping[str, Callable[[Tensor, int], Tensor]]
) -> dict[str, Tensor]:
    """Every weight of a spec, changed along the axes that `moves` names."""
    return {
        f"{name}.{key}": _moved(weights[f"{name}.{key}"], param.layout, spec.sizes_of(part), moves)
        for name, part in spec.parts()
        for key, param in part.params(spec).items()
    }


def _moved(
    tensor: Tensor, layout: Layout, sizes: dict[str, int], moves: Mapping[str, Callable[[Tensor, int], Tensor]]
) -> Tensor:
    opened = tensor.reshape(layout.opened(sizes))
    for where, axis in enumerate(layout.axes):
        if axis in moves:
            opened = moves[axis](opened, where)
            sizes = {**sizes, axis: opened.shape[where]}
    return opened.reshape(layout.shape(sizes)).clone()


def cut(spec: AttentionSpec, weights: Weights, keep: Iterable[int]) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """The layer with only these output heads, which equals silencing all others, exactly.

    Kept besides are the score heads that a kept head needs and the key and value heads that somebody still
    reads; when all talk to all, that is every one of them and nothing but the output side gets smaller.
    """
    kept = Kept.of(spec, keep)
    return kept.spec, changed(spec, weights, {axis: take(heads) for axis, heads in kept.by_axis.items()})


@dataclass(frozen=True)
class Kept:
    """What a cut keeps of a layer: the spec that is left, and which heads of each axis it holds, in order.

    >>> import headwise as hw
    >>> Kept.of(hw.design(model=8, heads=8, kv=2), [2, 3]).by_axis
    {'out': (2, 3), 'q': (2, 3), 'kv': (0,)}
    """

    spec: AttentionSpec
    by_axis: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(spec: AttentionSpec, keep: Iterable[int]) -> Kept:
        """What `cut` keeps with these output heads."""
        outs = tuple(sorted(set(keep)))
        if not outs or outs[0] < 0 or outs[-1] >= len(spec.speaks):
            there = len(spec.speaks)
            raise SpecError(f"heads {list(outs)} cannot be kept of {there}; name at least one of 0..{there - 1}")
        heads = spec.heads
        q = tuple(sorted(frozenset[int]().union(*(spec.sources(out) for out in outs))))
        rows = q if heads.rows == heads.q else tuple(range(heads.rows))  # a mixing's own rows stay as they are
        read_k = {heads.reads[h] for h in q}
        read_v = {heads.value_of[row] for row in rows}
        kv, v = tuple(sorted(read_k if heads.values else read_k | read_v)), tuple(sorted(read_v))
        smaller = Heads(
            q=len(q),
            kv=len(kv),
            dim=heads.dim,
            vdim=heads.vdim,
            reads=tuple(kv.index(heads.reads[h]) for h in q),
            values=tuple(v.index(heads.values[row]) for row in rows) if heads.values else (),
            speaks=tuple(rows.index(spec.speaks[out]) for out in outs),
        )
        by_axis = {"out": outs, "q": q, "kv": kv} | ({"v": v} if heads.values else {})
        return Kept(_with(spec, smaller), by_axis)


def share(
    spec: AttentionSpec, weights: Weights, groups: Sequence[Sequence[int]]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """The layer whose key-value heads are the means of these groups; equal heads lose nothing."""
    heads = spec.heads
    if heads.values:
        raise SpecError(f"keys and values are grouped apart here ({heads}); share them by hand")
    if sorted(head for group in groups for head in group) != list(range(heads.kv)):
        raise SpecError(f"groups {groups} must hold each of {heads.kv} key-value heads once")
    _check_even(spec, [len(group) for group in groups])
    owner = {head: n for n, group in enumerate(groups) for head in group}
    fewer = replace(heads, kv=len(groups), reads=tuple(owner[r] for r in heads.reads))
    return _with(spec, fewer), changed(spec, weights, {"kv": merge(groups)})


def split(spec: AttentionSpec, weights: Weights) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """The layer in which every query head has a copy of the key-value head it read: the same function."""
    heads = spec.heads
    if heads.values:
        raise SpecError(f"keys and values are grouped apart here ({heads}); give every head its own by hand")
    _check_even(spec, [heads.reads.count(head) for head in range(heads.kv)])
    own = replace(heads, kv=heads.q, reads=tuple(range(heads.q)))
    return _with(spec, own), changed(spec, weights, {"kv": repeat(heads.reads)})


def _check_even(spec: AttentionSpec, sizes: Sequence[int]) -> None:
    """A mean over all key heads stays what it was only if each is repeated, or shared, equally often."""
    joint = [name for name, part in spec.parts() if part.joins_keys()]
    if joint and len(set(sizes)) > 1:
        raise SpecError(
            f"{joint[0]} takes all key heads as one, so groups of {list(sizes)} would change it; use equal ones"
        )


def _with(spec: AttentionSpec, heads: Heads) -> AttentionSpec:
    """The same parts, with sizes that followed from the number of heads written out, around other heads."""
    slots = {slot: getattr(spec, slot).settled(spec) for slot in SLOTS if slot != "pattern"}
    heads = replace(heads, speaks=() if heads.speaks == spec.uncut(heads.rows) else heads.speaks)
    return replace(spec, heads=heads, **slots, modifiers=tuple(m.settled(spec) for m in spec.modifiers))
