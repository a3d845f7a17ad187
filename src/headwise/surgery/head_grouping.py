"""Heads in equal groups of those that are most alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import SpecError
from ..nn.head_axis_ops import select_heads, transform_axes
from ..spec.attention_spec import AttentionSpec

HeadGroups = tuple[tuple[int, ...], ...]

MAX_EXHAUSTIVE = 20_000  # ways to group that are all tried


def group_similar_heads(similarity: Tensor, num_groups: int, *, seed: int = 0, restarts: int = 200) -> HeadGroups:
    """Equal groups with the largest likeness summed over the pairs inside them (2412.20677).

    Where there are few ways, the best of all; where there are many, the best that swaps of two heads lead to from
    neighbours, and from as many drawn `starts`. The paper calls this annealing; its code too takes no step back.

    >>> near = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
    >>> group_similar_heads(near, 2)
    ((0, 2), (1, 3))
    """
    score = _check_similarity(similarity)
    neighbours = group_adjacent_heads(len(score), num_groups)
    if count_groupings(len(score), num_groups) <= MAX_EXHAUSTIVE:
        return max(
            _iter_groupings(tuple(range(len(score))), len(score) // num_groups),
            key=lambda way: sum_similarity_within(score, way),
        )
    return search_by_swaps(score, num_groups, seed=seed, restarts=restarts, initial_groups=neighbours)


def search_by_swaps(
    similarity: Tensor, num_groups: int, *, seed: int, restarts: int, initial_groups: HeadGroups | None = None
) -> HeadGroups:
    """The best groups that swaps lead to, each the best there is, from `first` and from drawn starts."""
    score = _check_similarity(similarity)
    drawn = torch.Generator().manual_seed(seed)
    begin = [group_adjacent_heads(len(score), num_groups) if initial_groups is None else initial_groups]
    orders = [torch.randperm(len(score), generator=drawn).tolist() for _ in range(restarts)]
    size = len(score) // num_groups
    begin += [tuple(tuple(order[n : n + size]) for n in range(0, len(order), size)) for order in orders]
    return max(
        (_improve_by_swaps(score, groups) for groups in begin), key=lambda groups: sum_similarity_within(score, groups)
    )


def group_adjacent_heads(num_heads: int, num_groups: int) -> HeadGroups:
    """Equal groups of neighbours, as mean-pooling takes them (2305.13245).

    >>> group_adjacent_heads(6, 2)
    ((0, 1, 2), (3, 4, 5))
    """
    if type(num_groups) is not int or num_groups < 1 or num_heads % num_groups:
        sizes = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise SpecError(f"{num_heads} key-value heads do not make {num_groups!r} equal groups; use one of {sizes}")
    size = num_heads // num_groups
    return tuple(tuple(range(n, n + size)) for n in range(0, num_heads, size))


def sum_similarity_within(similarity: Tensor, groups: HeadGroups) -> float:
    """The likeness summed over the pairs inside groups."""
    return math.fsum(similarity[a, b].item() for group in groups for a in group for b in group if a < b)


def count_groupings(num_heads: int, num_groups: int) -> int:
    """How many ways there are to make so many equal groups.

    >>> count_groupings(4, 2), count_groupings(8, 4)
    (3, 105)
    """
    return math.factorial(num_heads) // (
        math.factorial(num_heads // num_groups) ** num_groups * math.factorial(num_groups)
    )


def _check_similarity(likeness: Tensor) -> Tensor:
    score = likeness.detach().double()
    if score.dim() != 2 or score.shape[0] != score.shape[1] or not score.isfinite().all():
        raise ValueError(
            f"likeness of shape {list(score.shape)} is no number for each pair of heads; give [heads, heads]"
        )
    return (score + score.T) / 2


def _iter_groupings(heads: tuple[int, ...], size: int) -> Iterator[HeadGroups]:
    """All ways to group, each once: whoever comes first chooses fellows."""
    if not heads:
        yield ()
        return
    first, rest = heads[0], heads[1:]
    for fellows in torch.combinations(torch.tensor(rest, dtype=torch.int64), size - 1).tolist() if size > 1 else [[]]:
        others = tuple(head for head in rest if head not in fellows)
        for groups in _iter_groupings(others, size):
            yield ((first, *fellows), *groups)


def _improve_by_swaps(score: Tensor, groups: HeadGroups) -> HeadGroups:
    """The groups after swaps of two heads, the best first, until none gains."""
    heads = len(score)
    alone = score.clone().fill_diagonal_(0)
    place = torch.empty(heads, dtype=torch.int64)
    for number, group in enumerate(groups):
        place[list(group)] = number
    while True:
        member = torch.nn.functional.one_hot(place, len(groups)).double()
        to = (alone @ member)[:, place]  # [head, other]: how alike the head is to the group of the other
        own = to.diagonal()
        gain = to + to.T - own[:, None] - own - 2 * alone
        gain[place[:, None] == place] = 0
        most = int(gain.argmax())
        a, b = divmod(most, heads)
        if gain[a, b] <= 1e-12 * score.abs().max():
            return _canonical_order(place, len(groups))
        place[[a, b]] = place[[b, a]]


def _canonical_order(place: Tensor, into: int) -> HeadGroups:
    return tuple(sorted(tuple((place == number).nonzero().flatten().tolist()) for number in range(into)))


# --- The heads of a layer in another order, which is the same layer ------------------------------------


def make_groups_contiguous(
    spec: AttentionSpec, weights: Mapping[str, Tensor]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
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
    moved = replace(
        spec, heads=replace(heads, reads=reads, speaks=() if speaks == spec.default_score_heads(heads.q) else speaks)
    )
    voiced = [place[voice] for out in outs for voice in spec.score_head_of_row[out * each : (out + 1) * each]]
    if voiced != list(moved.score_head_of_row):
        raise SpecError(f"order={list(order)} parts heads that speak as one; keep them side by side")
    return moved, transform_axes(
        spec, weights, {"q": select_heads(order), "kv": select_heads(kv), "out": select_heads(outs)}
    )
