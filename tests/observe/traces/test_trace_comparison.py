"""Comparisons of two traces: alignment of tokens, divergences as scipy computes them, and which
sites correspond.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

import headwise as hw
from headwise.observe.traces import Trace, compare_traces, trace_from_weights
from headwise.observe.traces.trace_comparison import align_tokens

Array = np.ndarray[Any, Any]


def random_weights(seed: int, heads: int, queries: int, keys: int) -> Array:
    """Rows of softmax over random scores, [1, heads, queries, keys]."""
    scores = np.random.default_rng(seed).normal(size=(1, heads, queries, keys)) * 2
    weights = np.exp(scores)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def make_trace(words: list[str], seed: int, heads: int = 3) -> Trace:
    count = len(words)
    return trace_from_weights(
        [random_weights(seed + layer, heads, count, count) for layer in range(2)], words
    )


def union_divergence(one: Array, other: Array, pairs: list[tuple[int, int]]) -> float:
    """Jensen-Shannon divergence over the union of the keys, where aligned keys are one outcome, by
    scipy.
    """
    of_second = {other_key: key for key, other_key in pairs}
    outcomes = len(one) + len(other) - len(pairs)
    p, q = np.zeros(outcomes), np.zeros(outcomes)
    p[: len(one)] = one
    extra = len(one)
    for key, weight in enumerate(other):
        if key in of_second:
            q[of_second[key]] = weight
        else:
            q[extra] = weight
            extra += 1
    return float(jensenshannon(p, q)) ** 2


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("the cat sat", "the cat sat", [(0, 0), (1, 1), (2, 2)]),
        ("the cat sat", "the dog sat", [(0, 0), (1, 1), (2, 2)]),
        ("the cat sat", "the black cat sat", [(0, 0), (1, 2), (2, 3)]),
        ("the cat sat down", "the cat sat", [(0, 0), (1, 1), (2, 2)]),
        ("a a a", "a a", [(0, 0), (1, 1)]),
        ("one two", "three four five", []),
        ("", "a", []),
    ],
)
def test_tokens_are_aligned_in_order(first: str, second: str, pairs: list[tuple[int, int]]) -> None:
    one, other = align_tokens(first.split(), second.split())
    assert list(zip(one.tolist(), other.tolist(), strict=True)) == pairs


def test_a_trace_equals_itself() -> None:
    trace = make_trace(["a", "b", "c", "d"], seed=0)
    comparison = compare_traces(trace, trace)
    assert len(comparison.heads) == 6
    for head in comparison.heads:
        assert head.largest == head.mean_difference == head.entropy_change == 0
        assert head.divergence == pytest.approx(0, abs=1e-12)


def test_divergences_equal_scipys_over_the_union_of_the_keys() -> None:
    words, others = (
        ["the", "cat", "sat", "on", "the", "mat"],
        ["the", "black", "cat", "slept", "soundly", "on", "a", "mat", "today"],
    )
    first, second = make_trace(words, seed=1), make_trace(others, seed=5)
    pairs = list(zip(*(side.tolist() for side in align_tokens(words, others)), strict=True))
    assert 3 <= len(pairs) < len(words)
    comparison = hw.compare_traces(first, second)
    for found in comparison.heads:
        one, other = (
            trace.head_weights(found.site, found.head).astype(np.float64)
            for trace in (first, second)
        )
        expected = np.mean(
            [union_divergence(one[query], other[partner], pairs) for query, partner in pairs]
        )
        assert found.divergence == pytest.approx(expected, abs=1e-7)
        cells = {
            (query, key): one[query, key] - other[partner, other_key]
            for query, partner in pairs
            for key, other_key in pairs
        }
        assert found.largest == pytest.approx(max(map(abs, cells.values())), abs=1e-9)
        assert abs(cells[found.query, found.key]) == pytest.approx(found.largest, abs=1e-9)
        assert found.mean_difference == pytest.approx(
            np.mean([abs(cell) for cell in cells.values()]), abs=1e-9
        )
        entropies = [
            sum(-weight * math.log(weight) for weight in rows[number])
            for rows, numbers in (
                (one, [query for query, _ in pairs]),
                (other, [partner for _, partner in pairs]),
            )
            for number in numbers
        ]
        half = len(pairs)
        expected_change = (sum(entropies[half:]) - sum(entropies[:half])) / half
        assert found.entropy_change == pytest.approx(expected_change, abs=1e-6)


def test_disjoint_weights_diverge_by_ln_2_and_long_texts_are_compared_in_blocks() -> None:
    count = 700
    same, before = np.eye(count, dtype=np.float32), np.roll(np.eye(count, dtype=np.float32), -1, 1)
    weights = np.stack([same, same])[None], np.stack([before, same])[None]
    words = [str(number) for number in range(count)]
    comparison = compare_traces(*(trace_from_weights([layer], words) for layer in weights))
    assert comparison.heads[0].divergence == pytest.approx(math.log(2), abs=1e-9)
    assert comparison.heads[1].divergence == 0
    assert [head.head for head in comparison.ranked] == [0, 1]
    one, other = comparison.weights(comparison.heads[0].site, 0, slice(600, 602))
    assert one.shape == (2, count)
    assert one[0, 600] == 1
    assert other[0, 600] == 0
    assert other[0, 599] == 1


def test_weight_on_no_token_is_an_outcome_of_its_own() -> None:
    half, full = np.full((1, 1, 1, 1), 0.5, np.float32), np.ones((1, 1, 1, 1), np.float32)
    comparison = compare_traces(
        trace_from_weights([half], ["a"]), trace_from_weights([full], ["a"])
    )
    assert comparison.heads[0].divergence == pytest.approx(
        float(jensenshannon([0.5, 0.5], [1, 0])) ** 2, abs=1e-9
    )


def test_negative_weights_have_no_divergence_but_a_largest_difference() -> None:
    signed = np.array([[[[1.5, -0.5], [1.0, 0.0]]]], np.float32)
    plain = np.array([[[[0.5, 0.5], [1.0, 0.0]]]], np.float32)
    comparison = compare_traces(trace_from_weights([signed]), trace_from_weights([plain]))
    assert math.isnan(comparison.heads[0].divergence)
    assert comparison.heads[0].largest == 1
    assert comparison.data["heads"][0]["divergence"] is None


def test_sites_with_other_heads_and_streams_without_common_tokens_are_left_out_with_the_reason() -> (
    None
):
    first = make_trace(["a", "b"], seed=0)
    fewer = make_trace(["a", "b"], seed=0, heads=2)
    assert set(compare_traces(first, fewer).left_out.values()) == {"3 heads against 2"}
    other = make_trace(["c", "d", "e"], seed=0)
    comparison = compare_traces(first, other)
    assert not comparison.heads
    assert "no token" in next(iter(comparison.left_out.values()))
    with pytest.raises(ValueError, match="was not compared"):
        comparison.weights(first.layers[0].name, 0)
    with pytest.raises(ValueError, match="cannot compare row 3"):
        compare_traces(first, other, row=3)


def test_heads_of_a_pruned_model_are_compared_with_those_that_they_were() -> None:
    words = ["a", "b", "c"]
    weights = random_weights(3, 4, 3, 3)
    site = "model.0.attention"
    full, pruned = (
        trace_from_weights([weights], words),
        trace_from_weights([weights[:, [1, 3]]], words),
    )
    comparison = compare_traces(full, pruned, kept_heads={site: [1, 3]})
    assert [(head.head, head.largest) for head in comparison.heads] == [(1, 0.0), (3, 0.0)]
    one, other = comparison.weights(site, 3)
    np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"head 0 of .* was removed"):
        comparison.weights(site, 0)
    assert compare_traces(full, pruned).left_out == {site: "4 heads against 2"}


def test_the_last_generated_token_is_no_query() -> None:
    config = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 11}
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    traces = [hw.trace(net, torch.tensor([[3, 1, 4]]), max_new_tokens=count) for count in (4, 2)]
    comparison = compare_traces(*traces)
    assert len(comparison.alignments["text"].first) == 5
    one, other = comparison.weights("decoder.1.attention", 2)
    assert one.shape == other.shape == (4, 4)
    np.testing.assert_allclose(one, other, atol=1e-6)
    assert max(head.largest for head in comparison.heads) < 1e-6


def test_small_differences_are_legible() -> None:
    one = np.full((1, 1, 2, 2), 0.5)
    for shift in (0.0001, 0.1):
        other = one + np.array([shift, -shift])
        compared = compare_traces(
            trace_from_weights([one], ["a", "b"]), trace_from_weights([other], ["a", "b"])
        )
        line = next(
            line
            for line in str(compared).splitlines()
            if line.startswith(("L0H0", "attention", "decoder"))
        )
        head = compared.heads[0]
        expected = (head.divergence, shift, head.entropy_change)
        for text, value in zip(line.split()[-3:], expected, strict=True):
            assert float(text) == pytest.approx(value, rel=0.05)
