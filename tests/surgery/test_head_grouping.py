"""Grouping of similar heads: optimal for few heads, and exact reordering."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import headwise as hw
from headwise.attention import head_axis_ops
from headwise.surgery import head_grouping
from headwise.surgery.head_grouping import permute_heads
from support import layer_cases as cases
from support.layer_cases import EVERY, EVERY_CASE, base, check_close


def brute(score: np.ndarray, into: int) -> float:
    """The largest sum inside equal groups, over every order of the heads."""
    size = len(score) // into
    ends = range(0, len(score), size)
    return max(
        sum(
            score[a, b]
            for n in ends
            for a in order[n : n + size]
            for b in order[n : n + size]
            if a < b
        )
        for order in permutations(range(len(score)))
    )


def random_scores(heads: int, seed: int) -> np.ndarray:
    score = np.random.default_rng(seed).normal(size=(heads, heads))
    return (score + score.T) / 2


@settings(deadline=None, max_examples=8)
@given(st.sampled_from([(4, 2), (6, 1), (6, 2), (6, 3), (6, 6)]), st.integers(0, 999))
def test_few_heads_are_grouped_as_well_as_can_be(sizes, seed):
    heads, into = sizes
    score = random_scores(heads, seed)
    found = head_grouping.group_similar_heads(torch.tensor(score), into)
    assert sorted(head for group in found for head in group) == list(range(heads))
    assert {len(group) for group in found} == {heads // into}
    assert head_grouping.sum_similarity_within(torch.tensor(score), found) == pytest.approx(
        brute(score, into), abs=1e-12
    )


def test_many_heads_are_grouped_alike_every_time_and_never_worse_than_neighbours():
    score = torch.tensor(random_scores(24, 5))
    once, again = (
        head_grouping.group_similar_heads(score, 6, seed=2, restarts=20) for _ in range(2)
    )
    assert once == again
    assert head_grouping.sum_similarity_within(score, once) > head_grouping.sum_similarity_within(
        score, head_grouping.group_adjacent_heads(24, 6)
    )
    alone = head_grouping.group_similar_heads(score, 6, seed=2, restarts=0)
    assert (
        head_grouping.sum_similarity_within(score, head_grouping.group_adjacent_heads(24, 6))
        < head_grouping.sum_similarity_within(score, alone)
        <= head_grouping.sum_similarity_within(score, once)
    )


def test_groups_that_do_not_come_out_are_refused():
    for into in (4, 0, -1, 7, 2.0):
        with pytest.raises(
            hw.SpecError,
            match=(
                r"cannot split 6 key-value heads into .* equal groups\. Use one of \[1, 2, 3, "
                r"6\]"
            ),
        ):
            head_grouping.group_similar_heads(torch.zeros(6, 6), into)
    for score in (torch.full((4, 4), torch.nan), torch.zeros(3, 4), torch.zeros(4)):
        with pytest.raises(ValueError, match="similarity must be a finite tensor"):
            head_grouping.group_similar_heads(score, 2)


def layer_from_weights(spec, weights) -> hw.Attention:
    layer = hw.Attention(spec).double().eval()
    layer.load_state_dict(weights, strict=True)
    return layer


@pytest.mark.parametrize("name", EVERY_CASE)
def test_another_order_is_refused_or_the_same_layer(name):
    spec = EVERY[name]
    group = len(spec.score_head_of_row) // len(spec.score_head_of_output)
    if not spec.heads.value_heads and spec.project.supports_grouping and group == 1:
        shuffled = replace(
            spec.heads,
            kv_head_of_query=tuple(
                np.random.default_rng(7).permutation(spec.heads.kv_head_of_query).tolist()
            ),
        )
        spec = cases.change_spec(spec, heads=shuffled) if spec.project.uses_head_dims else spec
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    order = np.random.default_rng(1).permutation(spec.heads.q).tolist()
    mixes = not any(one.concatenates_key_heads() for one in spec.modifiers) and any(
        len(spec.required_score_heads(out))
        > len(spec.score_head_of_row) // len(spec.score_head_of_output)
        for out in range(len(spec.score_head_of_output))
    )
    if mixes or spec.heads.value_heads:
        with pytest.raises(hw.SpecError, match=r"at fixed positions|grouped separately"):
            permute_heads(spec, layer.state_dict(), order)
        return
    if group > 1:
        with pytest.raises(hw.SpecError, match="separates score heads"):
            permute_heads(spec, layer.state_dict(), order)
        groups = np.random.default_rng(1).permutation(spec.heads.q // group)
        order = [group * first + n for first in groups.tolist() for n in range(group)]
    for make in (
        lambda: permute_heads(spec, layer.state_dict(), order),
        lambda: permute_heads(spec, layer.state_dict()),
    ):
        check_close(layer_from_weights(*make())(x, source=z), layer(x, source=z))


def test_contiguous_groups_make_sharing_regular():
    for options in (
        {"modifiers": (hw.parts.Alibi(), hw.parts.HeadGate())},
        {"heads": 3, "modifiers": (hw.parts.DifferentialV2(),)},
    ):
        spec = base(**({"heads": 6, "bias": "qkvo"} | options))
        spec, weights = head_axis_ops.share_kv_heads(
            spec,
            cases.layer(spec).state_dict(),
            [(0, 2), (1,)] if spec.heads.kv == 3 else [(0, 4, 2), (5, 1, 3)],
        )
        x, _ = cases.tensors(spec)
        even, moved = permute_heads(spec, weights)
        assert not spec.heads.is_evenly_grouped
        assert even.heads.is_evenly_grouped == (
            spec.heads.q == 6
            and spec.heads.kv == 2
            and len(set(map(spec.heads.kv_head_of_query.count, (0, 1)))) == 1
        )
        assert list(even.heads.kv_head_of_query) == sorted(spec.heads.kv_head_of_query)
        check_close(layer_from_weights(even, moved)(x), layer_from_weights(spec, weights)(x))


def test_an_order_must_name_every_head_and_keep_pairs():
    spec = base(heads=4, modifiers=(hw.parts.DifferentialV2(),))
    weights = cases.layer(spec).state_dict()
    with pytest.raises(hw.SpecError, match="must list each of 8 score heads once"):
        permute_heads(spec, weights, [0, 1, 2])
    with pytest.raises(hw.SpecError):
        permute_heads(spec, weights, [0, 2, 1, 3, 4, 5, 6, 7])
    x, _ = cases.tensors(spec)
    check_close(
        layer_from_weights(*permute_heads(spec, weights, [4, 5, 0, 1, 6, 7, 2, 3]))(x),
        layer_from_weights(spec, weights)(x),
    )
