"""Groups of similar key-value heads, from statistics of their keys and values over data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.attention_call import PlannedCall
from ..attention.cache import KVEntry
from ..attention.head_axis_ops import select_heads, transform_axes
from ..attention.masking.patterns import select_heads as select_pattern_heads
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.spec.attention_spec import AttentionSpec
from ..kernels.devices import to_float64
from ..models import Transformer
from ..observe.inspect.attention_sites import find_attention
from ..observe.inspect.hooks import AttentionHook, get_hooks, install_hooks, patch_method
from ..util.errors import SpecError, suggest
from .head_alignment import CrossProducts, compute_kv_features

# --- Statistics of keys and values ----------------------------------------------------------------


def collect_kv_statistics(
    model: nn.Module, batches: Iterable[Any], sites: Iterable[str] | None = None
) -> dict[str, dict[str, CrossProducts]]:
    """Collect cross products of keys ("k") and values ("v") of each headwise attention, or of
    `sites`, over batches.

    A batch is a tensor or a mapping of keyword arguments of the model; padding tokens do not count.
    Only sums are stored: (heads x head dimension)^2 numbers per site and side.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> statistics = collect_kv_statistics(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])])
    >>> [
    ...     (site, side, sums.num_tokens)
    ...     for site, sides in statistics.items()
    ...     for side, sums in sides.items()
    ... ]
    [('decoder.0.attention', 'k', 5), ('decoder.0.attention', 'v', 5)]
    """
    attentions = {
        site_module.site.name: site_module.module
        for site_module in find_attention(model)
        if isinstance(site_module.module, Attention)
    }
    for site in sites or ():
        if site not in attentions:
            raise SpecError(
                f"the model has no headwise attention {site!r}; {suggest(site, attentions)}"
            )
    if any(module.training for module in model.modules()):
        raise ValueError(
            f"cannot collect statistics: {type(model).__name__} is in train mode, where dropout "
            "changes outputs. "
            "Call .eval()"
        )
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches must be an iterable of batches, got {type(batches).__name__}; pass a single "
            "one as [batch]"
        )
    collectors = {
        site: KVStatisticsCollector(attentions[site])
        for site in (attentions if sites is None else sites)
    }
    hooks = {collector.attention: (collector,) for collector in collectors.values()}
    with torch.no_grad(), install_hooks({**hooks}, patches=METHOD_PATCHES):
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    empty = [site for site, collector in collectors.items() if not collector.statistics]
    stacks = model.stacks if isinstance(model, Transformer) else {}
    reading = [
        site
        for site in empty
        for name, depth, _ in [site.split(".")]
        if name in stacks and stacks[name].blocks[int(depth)].kv_owner
    ]
    if reading:
        raise SpecError(
            f"{reading[0]} attends to the keys and values of an earlier layer, so it has none to "
            "align or compare; convert without align=, by neighbouring heads"
        )
    if empty:
        raise ValueError(f"no tokens reached {empty[0]}; give at least one batch that does")
    return {site: collector.statistics for site, collector in collectors.items()}


class KVStatisticsCollector(AttentionHook):
    """Sums cross products of the keys and values that one attention computes."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.statistics: dict[str, CrossProducts] = {}

    def add(self, z_BSE: Tensor, sequence: SequenceInfo | None) -> None:
        """Add one input [batch, tokens, model], without its padding."""
        for side, features in compute_kv_features(self.attention, z_BSE).items():
            real_features = (
                features
                if sequence is None
                else features[sequence.is_real.expand(features.shape[:2])]
            )
            products = CrossProducts.from_features(real_features)
            self.statistics[side] = (
                self.statistics[side] + products if side in self.statistics else products
            )


def _notify_collectors(attention: Attention, z_BSE: Tensor, sequence: SequenceInfo | None) -> None:
    for hook in get_hooks(attention):
        if isinstance(hook, KVStatisticsCollector):
            hook.add(z_BSE, sequence)


def _wrap_project_kv(original: Callable[..., Any]) -> Callable[..., Any]:
    def project_source(self: Attention, z: Tensor, *, sequence: SequenceInfo | None = None) -> Any:
        _notify_collectors(self, z, sequence)
        return original(self, z, sequence=sequence)

    return project_source


def _wrap_attention_kv(original: Callable[..., Any]) -> Callable[..., Any]:
    def extend_kv(self: Attention, kv_entry: KVEntry, call: PlannedCall) -> Any:
        _notify_collectors(self, call.x, call.sequence)
        return original(self, kv_entry, call)

    return extend_kv


METHOD_PATCHES = (
    patch_method(Attention, "project_source", _wrap_project_kv),
    patch_method(Attention, "extend_kv", _wrap_attention_kv),
)

# --- Groups ---------------------------------------------------------------------------------------

HeadGroups = tuple[tuple[int, ...], ...]


def group_similar_heads(
    similarity: Tensor, num_groups: int, *, seed: int = 0, restarts: int = 200
) -> HeadGroups:
    """Return equal groups that maximise the similarity summed over all pairs within groups
    (2412.20677).

    Heads are swapped greedily, starting from groups of neighbours and from `restarts` random
    groupings. The paper calls this annealing, but its code takes no downhill step either.

    >>> similarity = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
    >>> group_similar_heads(similarity, 2)
    ((0, 2), (1, 3))
    """
    score = to_float64(similarity.detach())
    if score.dim() != 2 or score.shape[0] != score.shape[1] or not score.isfinite().all():
        raise ValueError(
            f"similarity must be a finite tensor [heads, heads], got shape {list(score.shape)}"
        )
    score = (score + score.T) / 2
    starts = [group_adjacent_heads(len(score), num_groups)]
    size = len(score) // num_groups
    generator = torch.Generator().manual_seed(seed)
    for _ in range(restarts):
        order = torch.randperm(len(score), generator=generator).tolist()
        starts.append(tuple(tuple(order[n : n + size]) for n in range(0, len(order), size)))
    return max(
        (_improve_by_swaps(score, groups) for groups in starts),
        key=lambda groups: sum_similarity_within(score, groups),
    )


def group_adjacent_heads(num_heads: int, num_groups: int) -> HeadGroups:
    """Return equal groups of neighbouring heads, as mean pooling uses them (2305.13245).

    >>> group_adjacent_heads(6, 2)
    ((0, 1, 2), (3, 4, 5))
    """
    if type(num_groups) is not int or num_groups < 1 or num_heads % num_groups:
        sizes = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise SpecError(
            f"cannot split {num_heads} key-value heads into {num_groups!r} equal groups. Use one "
            f"of {sizes}"
        )
    size = num_heads // num_groups
    return tuple(tuple(range(n, n + size)) for n in range(0, num_heads, size))


def sum_similarity_within(similarity: Tensor, groups: HeadGroups) -> float:
    """Return the similarity summed over all pairs within groups."""
    pairs = chain.from_iterable(combinations(sorted(group), 2) for group in groups)
    return math.fsum(similarity[pair].item() for pair in pairs)


def _improve_by_swaps(score: Tensor, groups: HeadGroups) -> HeadGroups:
    """Swap the two heads with the largest gain until no swap gains."""
    heads = len(score)
    off_diagonal = score.clone().fill_diagonal_(0)
    group_of_head = torch.empty(heads, dtype=torch.int64)
    for number, group in enumerate(groups):
        group_of_head[list(group)] = number
    while True:
        membership = torch.nn.functional.one_hot(group_of_head, len(groups)).double()
        # sum_to_group[head, other]: similarity of head, summed over the group of other
        sum_to_group = (off_diagonal @ membership)[:, group_of_head]
        sum_to_own = sum_to_group.diagonal()
        gain = sum_to_group + sum_to_group.T - sum_to_own[:, None] - sum_to_own - 2 * off_diagonal
        gain[group_of_head[:, None] == group_of_head] = 0
        best = int(gain.argmax())
        a, b = divmod(best, heads)
        if gain[a, b] <= 1e-12 * score.abs().max():
            groups_now = [
                tuple((group_of_head == number).nonzero().flatten().tolist())
                for number in range(len(groups))
            ]
            return tuple(sorted(groups_now))
        group_of_head[[a, b]] = group_of_head[[b, a]]


# --- Reordering of heads, which does not change the function --------------------------------------


def permute_heads(
    spec: AttentionSpec, weights: Mapping[str, Tensor], order: Sequence[int] = ()
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Reorder the score heads of a layer; output heads follow, key-value heads are sorted by first
    use.

    By default, query heads that share a key-value head become neighbours, as other libraries
    expect. If all groups have the same size, `heads.is_evenly_grouped` is true afterwards.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, kv=2)
    >>> mixed, weights = permute_heads(spec, hw.Attention(spec).state_dict(), (2, 0, 3, 1))
    >>> mixed.heads.kv_head_of_query, permute_heads(mixed, weights)[0] == spec
    ((0, 1, 0, 1), True)
    """
    heads = spec.heads
    rows = spec.score_head_of_row
    rows_per_output = len(rows) // len(spec.score_head_of_output)
    # Score heads of one output head stay together, in their order.
    first_row = {head: rows[n - n % rows_per_output] for n, head in enumerate(rows)}
    order = order or sorted(
        range(heads.q), key=lambda head: heads.kv_head_of_query[first_row.get(head, head)]
    )
    if sorted(order) != list(range(heads.q)):
        raise SpecError(f"order must list each of {heads.q} score heads once, got {list(order)}")
    new_index = {head: n for n, head in enumerate(order)}
    kv = list(dict.fromkeys(heads.kv_head_of_query[head] for head in order))
    if heads.value_heads:
        raise SpecError(f"cannot reorder heads: keys and values are grouped separately ({heads})")
    # A norm over all heads at once is the same in every order.
    parts = tuple(one for one in spec.modifiers if not one.concatenates_key_heads())
    ordered = replace(spec, modifiers=parts)
    mixed = [
        out
        for out in range(len(spec.score_head_of_output))
        if len(ordered.required_score_heads(out)) > rows_per_output
    ]
    if mixed:
        needed = sorted(ordered.required_score_heads(mixed[0]))
        raise SpecError(
            f"cannot reorder heads: output head {mixed[0]} uses score heads {needed} at fixed "
            "positions"
        )
    outputs = sorted(
        range(len(spec.score_head_of_output)),
        key=lambda out: new_index[spec.score_head_of_output[out]],
    )
    for n in range(0, len(rows), rows_per_output):
        first = new_index[rows[n]]
        moved = [new_index[head] for head in rows[n : n + rows_per_output]]
        if moved != list(range(first, first + rows_per_output)):
            raise SpecError(
                f"order={list(order)} separates score heads of one output head. Keep them adjacent"
            )
    kv_head_of_query = tuple(kv.index(heads.kv_head_of_query[head]) for head in order)
    score_heads = tuple(new_index[spec.score_head_of_output[out]] for out in outputs)
    new_spec = replace(
        spec,
        pattern=select_pattern_heads(spec.pattern, order),
        heads=replace(
            heads,
            kv_head_of_query=kv_head_of_query,
            score_head_of_output=()
            if score_heads == spec.default_score_heads(heads.q)
            else score_heads,
        ),
    )
    return new_spec, transform_axes(
        spec,
        weights,
        {"q": select_heads(order), "kv": select_heads(kv), "out": select_heads(outputs)},
    )
