"""Select, average and repeat heads of a layer along the named axes of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ..util.errors import SpecError
from .interfaces.core_types import AxisLayout, Phase
from .masking.patterns import Pattern, select_heads as select_pattern_heads
from .spec.attention_spec import SLOTS, AttentionSpec
from .spec.heads import Heads

WeightTensors = Mapping[str, Tensor]


def select_heads(keep: Sequence[int]) -> Callable[[Tensor, int], Tensor]:
    """Keeps these heads, in this order."""
    return lambda t, axis: t.index_select(
        axis, torch.tensor(list(keep), dtype=torch.int64, device=t.device)
    )


def average_groups(groups: Sequence[Sequence[int]]) -> Callable[[Tensor, int], Tensor]:
    """Replaces each group of heads by its mean."""
    return lambda t, axis: torch.stack(
        [select_heads(group)(t, axis).mean(axis) for group in groups], axis
    )


def transform_axes(
    spec: AttentionSpec,
    weights: WeightTensors,
    moves: Mapping[str, Callable[[Tensor, int], Tensor]],
) -> dict[str, Tensor]:
    """All weights of a spec, transformed along the axes in `moves`."""
    return {
        f"{name}.{key}": _transform_tensor(
            weights[f"{name}.{key}"], param.layout, spec.sizes_of(part), moves
        )
        for name, part in spec.parts()
        for key, param in part.params(spec).items()
    }


def _transform_tensor(
    tensor: Tensor,
    layout: AxisLayout,
    sizes: dict[str, int],
    moves: Mapping[str, Callable[[Tensor, int], Tensor]],
) -> Tensor:
    opened = tensor.reshape(layout.unmerged_shape(sizes))
    for where, axis in enumerate(layout.axes):
        if axis in moves:
            opened = moves[axis](opened, where)
            sizes = {**sizes, axis: opened.shape[where]}
    return opened.reshape(layout.shape(sizes)).clone()


def keep_heads(
    spec: AttentionSpec, weights: WeightTensors, keep: Iterable[int]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """The layer with only these output heads: exactly the layer with all others ablated.

    It also keeps the score heads that a kept head needs, and the key and value heads that these
    use. Where all heads are mixed, that is all of them, and only the output projection gets
    smaller. A gate that needs the queries of removed heads keeps their query projections, but not
    their keys and values.
    """
    indices = KeptHeads.from_spec(spec, keep)
    return indices.spec, transform_axes(
        spec, weights, {axis: select_heads(heads) for axis, heads in indices.by_axis.items()}
    )


@dataclass(frozen=True)
class KeptHeads:
    """Result of pruning a layer: the smaller spec, and the kept heads of each axis, in order.

    >>> import headwise as hw
    >>> KeptHeads.from_spec(hw.design(model=8, heads=8, kv=2), [2, 3]).by_axis
    {'out': (2, 3), 'q': (2, 3), 'kv': (0,)}
    """

    spec: AttentionSpec
    by_axis: Mapping[str, tuple[int, ...]]

    @staticmethod
    def from_spec(spec: AttentionSpec, keep: Iterable[int]) -> KeptHeads:
        """The spec and heads that `keep_heads` keeps for these output heads."""
        outs = tuple(sorted(set(keep)))
        if not outs or outs[0] < 0 or outs[-1] >= len(spec.score_head_of_output):
            num_heads = len(spec.score_head_of_output)
            raise SpecError(
                f"heads {list(outs)} cannot be kept of {num_heads}; name at least one of "
                f"0..{num_heads - 1}"
            )
        heads = spec.heads
        q = tuple(sorted(frozenset[int]().union(*(spec.required_score_heads(out) for out in outs))))
        # rows that a mix makes stay as they are
        rows = q if heads.rows == heads.q else tuple(range(heads.rows))
        compared = frozenset[int]().union(*(spec.compared_score_heads(out) for out in outs))
        read_k = {heads.kv_head_of_query[h] for h in compared}
        read_v = {
            heads.value_head_of_row[row] for row in (compared if heads.rows == heads.q else rows)
        }
        kv = tuple(sorted(read_k if heads.value_heads else read_k | read_v))
        v = tuple(sorted(read_v))
        smaller = Heads(
            q=len(q),
            kv=len(kv),
            dim=heads.dim,
            vdim=heads.vdim,
            kv_head_of_query=_index_of_each([heads.kv_head_of_query[h] for h in q], kv),
            value_heads=_index_of_each([heads.value_heads[row] for row in rows], v)
            if heads.value_heads
            else (),
            score_head_of_output=tuple(rows.index(spec.score_head_of_output[out]) for out in outs),
        )
        by_axis = {"out": outs, "q": q, "kv": kv} | ({"v": v} if heads.value_heads else {})
        # Heads that a mix of scores makes all stay, as the rows do.
        one_mask_per_head = spec.num_heads_after(Phase.SCORES) == heads.q
        pattern = select_pattern_heads(spec.pattern, q) if one_mask_per_head else spec.pattern
        return KeptHeads(_with(spec, smaller, pattern), by_axis)


def _index_of_each(heads: Sequence[int], kept_heads: Sequence[int]) -> tuple[int, ...]:
    """The index of each head among the kept ones; 0 for a head without computed scores."""
    return tuple(kept_heads.index(head) if head in kept_heads else 0 for head in heads)


def share_kv_heads(
    spec: AttentionSpec, weights: WeightTensors, groups: Sequence[Sequence[int]]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Average the key-value heads within each group; exact if the heads of a group are equal."""
    heads = spec.heads
    if heads.value_heads:
        raise SpecError(
            f"cannot share heads whose keys and values have different groups ({heads}); leave out "
            "value_heads"
        )
    if sorted(chain.from_iterable(groups)) != list(range(heads.kv)):
        raise SpecError(
            f"cannot share heads in groups {groups}; name each of {heads.kv} key-value heads once"
        )
    _check_even(spec, [len(group) for group in groups])
    owner: dict[int, int] = {}
    for n, group in enumerate(groups):
        owner |= dict.fromkeys(group, n)
    fewer = replace(
        heads, kv=len(groups), kv_head_of_query=tuple(owner[r] for r in heads.kv_head_of_query)
    )
    return _with(spec, fewer, spec.pattern), transform_axes(
        spec, weights, {"kv": average_groups(groups)}
    )


def split_kv_heads(
    spec: AttentionSpec, weights: WeightTensors
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Give every query head a copy of its key-value head; the layer computes the same function."""
    heads = spec.heads
    if heads.value_heads:
        raise SpecError(
            f"cannot split heads whose keys and values have different groups ({heads}); leave out "
            "value_heads"
        )
    _check_even(spec, [heads.kv_head_of_query.count(head) for head in range(heads.kv)])
    own = replace(heads, kv=heads.q, kv_head_of_query=tuple(range(heads.q)))
    return _with(spec, own, spec.pattern), transform_axes(
        spec, weights, {"kv": select_heads(heads.kv_head_of_query)}
    )


def _check_even(spec: AttentionSpec, sizes: Sequence[int]) -> None:
    """Raise SpecError for unequal groups if a part treats all key heads as one vector.

    The mean of that vector would change.
    """
    concatenating = [name for name, part in spec.parts() if part.concatenates_key_heads()]
    if concatenating and len(set(sizes)) > 1:
        raise SpecError(
            f"{concatenating[0]} normalises all key heads as one vector, so groups of "
            f"{list(sizes)} heads would change "
            "its result; use groups of equal size"
        )


def _with(spec: AttentionSpec, heads: Heads, pattern: Pattern) -> AttentionSpec:
    """The spec with other heads and their pattern; sizes of parts that followed from the number of
    heads stay.
    """
    slots = {
        slot: getattr(spec, slot).with_fixed_sizes(spec) for slot in SLOTS if slot != "pattern"
    }
    if heads.score_head_of_output == spec.default_score_heads(heads.rows):
        heads = replace(heads, score_head_of_output=())
    return replace(
        spec,
        heads=heads,
        pattern=pattern,
        **slots,
        modifiers=tuple(m.with_fixed_sizes(spec) for m in spec.modifiers),
    )
