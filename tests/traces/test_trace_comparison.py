"""Two traces compared head by head, against scipy and plain loops."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.special
import scipy.stats

import headwise as hw
from headwise.traces import (
    AttentionCallRecord,
    AttentionRecord,
    PackedMask,
    TokenRow,
    Trace,
    compare_traces,
    trace_from_weights,
)
from headwise.traces.trace_comparison import align_tokens

RNG = np.random.default_rng(3)


def causal_weights(tokens: int, *, layers: int = 2, heads: int = 3) -> list[np.ndarray]:
    scores = RNG.normal(size=(layers, 1, heads, tokens, tokens)) * 2
    scores[..., np.arange(tokens) > np.arange(tokens)[:, None]] = -np.inf
    return list(scipy.special.softmax(scores, -1).astype(np.float32))


def names(count: int) -> list[str]:
    return [f"w{n}" for n in range(count)]


def test_two_checkpoints_over_equal_tokens_against_scipy():
    before, after = causal_weights(7), causal_weights(7)
    compared = hw.compare_traces(trace_from_weights(before, names(7)), trace_from_weights(after, names(7)))
    assert [(head.site, head.head) for head in compared.heads] == [
        (f"model.{layer}.attention", head) for layer in range(2) for head in range(3)
    ]
    for layer in range(2):
        for number in range(3):
            p, q = (np.float64(weights[layer][0, number]) for weights in (before, after))
            head = compared.get_head(layer, number)
            pairs = [abs(q[t, s] - p[t, s]) for t in range(7) for s in range(t + 1)]
            assert head.max_difference == pytest.approx(max(pairs), abs=1e-12)
            assert head.mean_difference == pytest.approx(sum(pairs) / 28, abs=1e-12)
            distances = [scipy.spatial.distance.jensenshannon(p[t], q[t], base=2) for t in range(1, 7)]
            np.testing.assert_allclose(head.js_distance_T[1:], distances, atol=1e-6)
            assert head.js_distance_T[0] == 0  # one allowed key
            assert head.js_distance == pytest.approx(sum(distances) / 7, abs=1e-6)
            changes = [scipy.stats.entropy(q[t]) - scipy.stats.entropy(p[t]) for t in range(7)]
            np.testing.assert_allclose(head.entropy_change_T, changes, atol=1e-6)
            assert head.entropy_change == pytest.approx(np.mean(changes), abs=1e-6)
            np.testing.assert_allclose(compared.weight_difference(layer, number), q - p, atol=1e-7)
    assert compared.by_distance[0].js_distance == max(head.js_distance for head in compared.heads)


def test_a_trace_equals_itself():
    trace = trace_from_weights(causal_weights(9), names(9))
    compared = compare_traces(trace, trace)
    for head in compared.heads:
        assert (head.max_difference, head.js_distance, head.entropy_change) == (0, 0, 0)
        assert all(first == second for first, second in head.measures.values())


def test_measures_of_both_traces_by_hand():
    before, after = causal_weights(5, layers=1), causal_weights(8, layers=1)
    compared = compare_traces(trace_from_weights(before, names(5)), trace_from_weights(after, list("abcdefgh")))
    for number, head in enumerate(compared.heads):
        for side, weights in enumerate((before, after)):
            w = np.float64(weights[0][0, number])
            n = len(w)
            entropy = [scipy.stats.entropy(w[t]) for t in range(n)]
            expected = {
                "entropy": np.mean(entropy),
                "breadth": np.mean([math.exp(entropy[t]) / (t + 1) for t in range(1, n)]),
                "confidence": np.mean([max(w[t]) for t in range(n)]),
                "distance": np.mean([sum(w[t, s] * abs(t - s) for s in range(n)) for t in range(n)]),
                "first": np.mean(w[:, 0]),
            }
            assert set(head.measures) == set(expected)
            for name, value in expected.items():
                assert head.measures[name][side] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a b c", "a b c", [(0, 0), (1, 1), (2, 2)]),
        ("a X c", "a Y c", [(0, 0), (1, 1), (2, 2)]),  # a replaced token
        ("a b c", "a n b c", [(0, 0), (1, 2), (2, 3)]),  # an inserted token
        ("a X Y c", "a Z c", [(0, 0), (3, 2)]),  # runs of unequal length correspond to nothing
        ("a b", "c d e", []),
    ],
)
def test_tokens_are_aligned(first: str, second: str, pairs: list[tuple[int, int]]):
    found = align_tokens(first.split(), second.split())
    assert list(zip(found.first.tolist(), found.second.tolist(), strict=True)) == pairs
    assert found.equal.tolist() == [first.split()[i] == second.split()[j] for i, j in pairs]


def test_positions_align_where_asked():
    assert align_tokens(["a", "b", "c"], ["b", "c"], "positions").second.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"unknown align='position'.*positions"):
        align_tokens(["a"], ["a"], "position")


def test_keys_of_one_trace_alone_are_other_keys():
    """The rows are distributions over the union of the keys, compared by scipy."""
    before, after = causal_weights(4, layers=1), causal_weights(5, layers=1)
    compared = compare_traces(
        trace_from_weights(before, ["a", "b", "c", "d"]), trace_from_weights(after, ["a", "n", "b", "c", "d"])
    )
    to_union = [0, 2, 3, 4]
    for number, head in enumerate(compared.heads):
        p, q = (np.float64(weights[0][0, number]) for weights in (before, after))
        union = np.zeros((4, 5))
        union[:, to_union] = p
        expected = [
            scipy.spatial.distance.jensenshannon(union[t], q[to_union[t]], base=2) if t else 0 for t in range(4)
        ]
        np.testing.assert_allclose(head.js_distance_T, expected, atol=1e-6)
        difference = q[np.ix_(to_union, to_union)] - p
        assert head.max_difference == pytest.approx(np.abs(difference).max(), abs=1e-7)
        np.testing.assert_allclose(compared.weight_difference(0, number), difference, atol=1e-7)


def test_weight_on_a_sink_is_weight_on_no_key():
    p, q = np.array([[0.5, 0.3]]), np.array([[0.1, 0.1]])
    traces = [trace_from_weights([np.repeat(row, 2, 0)[None, None]], ["a", "b"]) for row in (p, q)]
    head = compare_traces(*traces).heads[0]
    expected = scipy.spatial.distance.jensenshannon([0.5, 0.3, 0.2], [0.1, 0.1, 0.8], base=2)
    np.testing.assert_allclose(head.js_distance_T, expected, atol=1e-6)


def test_rows_that_are_no_distribution_have_no_distance():
    w = np.array([[[[1.0, 0.0], [1.4, -0.4]]]])
    head = compare_traces(trace_from_weights(w, ["a", "b"]), trace_from_weights(abs(w), ["a", "b"])).heads[0]
    assert np.isnan(head.js_distance_T).tolist() == [False, True]
    assert head.js_distance == 0
    assert head.max_difference == pytest.approx(0.8)
    assert head.data["js_distances"] == [0.0, None]


def record(q: np.ndarray, k: np.ndarray, ids: tuple[int, ...]) -> Trace:
    """One causal layer with two heads and one key-value head, over a text that may start with padding."""
    tokens = q.shape[1]
    call = AttentionCallRecord((0, tokens), (0, tokens), scale=0.5, causal=True, grids=(0,))
    layer = AttentionRecord(
        "decoder.0.attention", "decoder", 0, "attention", "h.0", 2, (0, 0), "text", "text", (call,), {"q": q, "k": k}
    )
    mask = PackedMask.pack(np.array([[[[token >= 0 for token in ids]]]]))
    row = TokenRow(ids, tuple(f"w{token}" if token >= 0 else "" for token in ids))
    return Trace({"name": "small"}, {"text": (row,)}, (layer,), (mask,))


def test_padding_corresponds_to_nothing_and_long_texts_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch):
    q, k = (RNG.normal(size=(1, 9, heads, 4)).astype(np.float32) for heads in (2, 1))
    padded = record(q, k, (-1, -1, 3, 4, 5, 6, 7, 8, 9))
    plain = record(q[:, 2:], k[:, 2:], (3, 4, 5, 6, 7, 8, 9))
    compared = compare_traces(padded, plain)
    assert compared.alignments["text"].first.tolist() == list(range(2, 9))
    for head in compared.heads:
        assert head.max_difference < 1e-6
        assert head.js_distance < 1e-3
        for name, (first, second) in head.measures.items():
            assert first == pytest.approx(second, abs=1e-6), name
    other = record(q[:, 2:] * 3, k[:, 2:], (3, 4, 5, 6, 7, 8, 9))
    whole = compare_traces(padded, other).data
    monkeypatch.setattr("headwise.traces.attention_trace.QUERY_BLOCK", 2)
    blocks = compare_traces(padded, other).data
    for first, second in zip(whole["heads"], blocks["heads"], strict=True):
        for name in ("max_difference", "mean_difference", "js_distance", "entropy_change"):
            assert first[name] == pytest.approx(second[name], rel=1e-6)
        for name, values in first["measures"].items():
            assert values == pytest.approx(second["measures"][name], rel=1e-6), name
    assert compare_traces(padded, padded).alignments["text"].first.tolist() == list(range(2, 9))


def test_two_rows_of_one_trace():
    weights = np.concatenate([causal_weights(6, layers=1)[0] for _ in range(2)])
    trace = trace_from_weights([weights], [names(6), names(6)])
    compared = compare_traces(trace, trace, rows=(0, 1))
    np.testing.assert_allclose(compared.weight_difference(0, 1), weights[1, 1] - weights[0, 1], atol=1e-7)
    with pytest.raises(ValueError, match="the second trace has no row 2; it has 2 rows"):
        compare_traces(trace, trace, rows=(0, 2))


def test_sites_that_do_not_match_are_skipped_with_a_reason():
    three, two = causal_weights(4, layers=2), causal_weights(4, layers=3)
    two[1] = two[1][:, :2]
    compared = compare_traces(trace_from_weights(three, names(4)), trace_from_weights(two, names(4)))
    assert {head.site for head in compared.heads} == {"model.0.attention"}
    assert compared.skipped == {
        "model.1.attention": "it has 3 heads in the first trace and 2 in the second",
        "model.2.attention": "the first trace has no such site",
    }
    assert "model.1.attention: not compared, it has 3 heads" in str(compared)
    with pytest.raises(ValueError, match=r"head 0 of model\.1\.attention was not compared: it has 3 heads"):
        compared.get_head(1, 0)
    with pytest.raises(ValueError, match="cannot compare the traces: they have no site in common"):
        compare_traces(trace_from_weights(three, names(4)), trace_from_weights(two, names(4)), sites=[1])


def test_cross_attention_aligns_both_streams():
    cross = [scipy.special.softmax(RNG.normal(size=(1, 2, 3, keys)), -1) for keys in (4, 5)]
    words = [["q", "r", "s"], ["a", "b", "c", "d"], ["a", "b", "x", "c", "d"]]
    traces = [
        trace_from_weights(tokens=words[0], cross_attention=[w], source=words[n + 1]) for n, w in enumerate(cross)
    ]
    compared = compare_traces(*traces)
    assert compared.alignments["source"].second.tolist() == [0, 1, 3, 4]
    assert "distance" not in compared.heads[0].measures
    np.testing.assert_allclose(
        compared.weight_difference(0, 1), cross[1][0, 1][:, [0, 1, 3, 4]] - cross[0][0, 1], atol=1e-7
    )


def test_the_table_and_the_plain_values():
    traces = [trace_from_weights(causal_weights(6), names(6)) for _ in range(2)]
    compared = compare_traces(*traces)
    lines = str(compared).splitlines()
    assert lines[0] == "text: 6 aligned tokens of 6 and 6, 6 equal"
    top = compared.by_distance[0]
    assert lines[2].split() == [
        f"{top.site}:{top.head}", f"{top.js_distance:.4f}", f"{top.max_difference:.4f}", f"{top.mean_difference:.5f}",
        f"{top.entropy_change:+.4f}",
    ]  # fmt: skip
    again = json.loads(json.dumps(compared.data, allow_nan=False))
    assert again["heads"][0]["measures"]["entropy"] == list(compared.heads[0].measures["entropy"])
    assert again["streams"]["text"]["second"] == [0, 1, 2, 3, 4, 5]


def test_a_comparison_needs_no_torch(tmp_path: Path):
    for name in "ab":
        trace_from_weights(causal_weights(4), names(4)).save(tmp_path / f"{name}.trace")
    code = (
        "import sys, headwise as hw; a, b = (hw.load_trace(f'{sys.argv[1]}/{n}.trace') for n in 'ab'); "
        "print(len(hw.compare_traces(a, b).heads), 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["6", "False"]
