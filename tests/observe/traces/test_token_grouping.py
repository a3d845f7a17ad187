"""Traces with merged words and without special tokens: weights as sums over keys and means over
queries.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headwise.observe.traces import TokenGrouping, TokenRow, Trace, group_tokens, trace_from_weights
from headwise.observe.traces.attention_trace import find_groups

WORDS = ["[CLS]", "play", "##ing", "foot", "##ball", ".", "[SEP]"]


def make_trace(words: list[str], seed: int = 0) -> Trace:
    scores = np.random.default_rng(seed).normal(size=(1, 2, len(words), len(words)))
    weights = np.exp(scores)
    return trace_from_weights([weights / weights.sum(-1, keepdims=True)], words)


def membership(groups: list[list[int]], count: int) -> np.ndarray:
    matrix = np.zeros((len(groups), count))
    for number, places in enumerate(groups):
        matrix[number, places] = 1
    return matrix


@pytest.mark.parametrize(
    ("grouping", "groups"),
    [
        (TokenGrouping(words=True), [[0], [1, 2], [3, 4], [5], [6]]),
        (TokenGrouping(special=True), [[1], [2], [3], [4], [5]]),
        (TokenGrouping(first=True), [[1], [2], [3], [4], [5], [6]]),
        (TokenGrouping(words=True, special=True), [[1, 2], [3, 4], [5]]),
    ],
)
def test_weights_are_sums_over_keys_and_means_over_queries(grouping, groups) -> None:
    trace = make_trace(WORDS)
    view = group_tokens(trace, grouping)
    member = membership(groups, len(WORDS))
    for head in range(2):
        weights = trace.head_weights(0, head).astype(np.float64)
        real_weights = weights * member.any(0)
        if grouping.special or grouping.first:
            real_weights /= real_weights.sum(1, keepdims=True)
        expected = (member / member.sum(1, keepdims=True)) @ real_weights @ member.T
        np.testing.assert_allclose(view.head_weights(0, head), expected, atol=1e-6)
        np.testing.assert_allclose(view.head_weights(0, head).sum(1), 1, atol=1e-6)
    assert len(view.streams["text"][0].words) == len(groups)


def test_merged_words_are_read_without_their_marks() -> None:
    assert group_tokens(make_trace(WORDS), TokenGrouping(words=True)).streams["text"][0].words == (
        *("[CLS]", "playing", "football", ".", "[SEP]"),
    )


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (("Ġun", "happy", "Ġcats", ".", "Ġ", "x"), [[0, 1], [2], [3], [4, 5]]),
        (("▁The", "▁foot", "ball", "'s"), [[0], [1, 2], [3]]),
        (("a", "b", "c"), [[0], [1], [2]]),  # no marks: every token is a word
        (("<s>", "▁a", "b", "<pad>", "c"), [[0], [1, 2], [3], [4]]),
    ],
)
def test_words_are_found_by_the_marks_of_tokenizers(words, groups) -> None:
    assert find_groups(TokenRow.from_words(words), TokenGrouping(words=True)) == groups


def test_words_are_found_by_offsets_and_ideographs_stay_apart() -> None:
    text = "unhappy cats 猫坐 3rd"
    spans = ((0, 2), (2, 7), (8, 12), (13, 14), (14, 15), (16, 17), (17, 19))
    row = TokenRow(tuple(range(7)), tuple(text[start:stop] for start, stop in spans), spans, text)
    assert find_groups(row, TokenGrouping(words=True)) == [[0, 1], [2], [3], [4], [5, 6]]


def test_cross_attention_groups_both_streams() -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(3), size=(1, 2, 4))
    trace = trace_from_weights(
        cross_attention=[weights], tokens=["a", "##b", "c", "d"], source=["[CLS]", "x", "##y"]
    )
    view = group_tokens(trace, TokenGrouping(words=True, special=True))
    site = view.layers[0].name
    assert view.head_weights(site, 0).shape == (3, 1)
    np.testing.assert_allclose(view.head_weights(site, 0), 1, atol=1e-6)


def test_what_cannot_be_shown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no token of the text would be left"):
        group_tokens(make_trace(["[CLS]", "[SEP]"]), TokenGrouping(special=True))
    monkeypatch.setattr("headwise.observe.traces.attention_trace.MAX_WEIGHT_BYTES", 100)
    with pytest.raises(ValueError, match="use a shorter text"):
        group_tokens(make_trace(WORDS), TokenGrouping(words=True))


def test_a_row_without_weight_on_the_other_tokens_stays_empty() -> None:
    trace = trace_from_weights([np.array([[[[1.0, 0.0], [0.5, 0.5]]]])], ["<s>", "a"])
    np.testing.assert_array_equal(
        group_tokens(trace, TokenGrouping(special=True)).head_weights(0, 0), [[1.0]]
    )
    still = replace(trace, streams={"text": (TokenRow.from_words(("a", "b")),)})
    np.testing.assert_array_equal(
        group_tokens(still, TokenGrouping()).head_weights(0, 0), trace.head_weights(0, 0)
    )
