"""Pairs and keys of layers whose heads may have different patterns: sums over heads, and the keys
of each KV head.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from ..attention.interfaces import Mix
from ..attention.interfaces.core_types import CallSize, Phase
from ..attention.masking.patterns import Pattern, PerHead, head_pattern
from ..attention.spec.attention_spec import AttentionSpec


def patterns_of_kv_heads(spec: AttentionSpec) -> tuple[Pattern, ...]:
    """For each key-value head, the union of the patterns of its query heads; one pattern if all
    heads read alike.

    >>> import headwise as hw
    >>> pattern = "perhead((causal(), window(4), window(8)), (0, 1, 1, 2))"
    >>> patterns_of_kv_heads(hw.design(model=8, heads=4, kv=2, pattern=pattern))
    (Causal() | Window(keys=4), Window(keys=4) | Window(keys=8))
    """
    heads = spec.heads
    caches_heads = spec.project.caches_keys_and_values and not heads.value_heads
    if not isinstance(spec.pattern, PerHead) or spec.parts_of(Mix) or not caches_heads:
        return (spec.pattern,)
    by_kv: list[list[Pattern]] = [[] for _ in range(heads.kv)]
    for head in spec.core_score_heads:
        by_kv[heads.kv_head_of_query[head]].append(head_pattern(spec.pattern, head))
    return tuple(reduce(or_, dict.fromkeys(patterns)) for patterns in by_kv)


def pairs_over_heads(spec: AttentionSpec, work: CallSize) -> tuple[int, int]:
    """The (query, key) pairs of one row of the batch, summed over score heads and over rows of
    weights.

    If heads have different patterns, a mix needs the pairs that some head allows.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, pattern="perhead((causal(), window(1)), (0, 1))")
    >>> pairs_over_heads(spec, hw.costs.self_attention_work(spec, batch=1, queries=4))
    (14, 14)
    """
    rows = spec.score_head_of_row
    heads = spec.core_score_heads
    if not work.head_pairs:
        return work.pairs * len(heads), work.pairs * len(rows)
    mixed = {mix.phase for _, mix in spec.parts_of(Mix)}
    own = heads if mixed else [head for head in heads if head in rows]
    scores = (
        work.pairs * len(heads)
        if Phase.SCORES in mixed
        else sum(work.head_pairs[head] for head in own)
    )
    values = (
        work.pairs * len(rows)
        if Phase.WEIGHTS in mixed
        else sum(work.head_pairs[head] for head in rows)
    )
    return scores, values
