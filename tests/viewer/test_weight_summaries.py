"""Tiles, marginals and thumbnail masks: every summary equals numpy's over the whole matrix of
weights.
"""

from __future__ import annotations

import numpy as np
import pytest

from headwise.observe.traces import trace_from_weights
from headwise.observe.traces.attention_record import (
    AttentionCallRecord,
    AttentionRecord,
    PackedMask,
)
from headwise.observe.traces.attention_trace import Trace, make_token_rows
from headwise.viewer.open_model import OpenModel, TileRange
from headwise.viewer.weight_summaries import thumbnail_masks

SITE = "layers.0"


def record(
    mask: np.ndarray | None, *, causal: bool, heads: int = 2, queries: int = 1300, keys: int = 1300
) -> Trace:
    """A trace of random queries and keys, longer than a block of queries."""
    rng = np.random.default_rng(5)
    arrays = {
        "q": rng.standard_normal((1, queries, heads, 8)).astype(np.float32),
        "k": rng.standard_normal((1, keys, heads, 8)).astype(np.float32),
        "v": rng.standard_normal((1, keys, heads, 8)).astype(np.float32),
    }
    grids = () if mask is None else (PackedMask.pack(mask),)
    call = AttentionCallRecord(
        (0, queries), (0, keys), causal=causal, grids=tuple(range(len(grids)))
    )
    layer = AttentionRecord(
        *(SITE, "decoder", 0, "self", "test", heads),
        tuple(range(heads)),
        *("text", "text", (call,), arrays),
    )
    return Trace({}, {"text": make_token_rows([list(map(str, range(queries)))])}, (layer,), grids)


@pytest.mark.parametrize("causal", [True, False])
def test_a_tile_of_a_long_text_is_pooled_exactly(causal: bool):
    opened = OpenModel(record(None, causal=causal))
    weights = opened.get_trace().head_weights(SITE, 1)[13:1313, 3:1203]
    tile = opened.tile(SITE, 1, TileRange(slice(13, 1300), slice(3, 1203), (9, 40)))
    edges = 13 + np.arange(10) * 1287 // 9
    for row in range(9):
        part = weights[edges[row] - 13 : edges[row + 1] - 13].reshape(
            edges[row + 1] - edges[row], 40, 30
        )
        expected = part.max((0, 2))
        assert np.abs(tile.weights[row] - np.round(expected * 255)).max() <= 1
        assert tile.masked[row].tolist() == [
            int(causal and 3 + 30 * cell >= edges[row + 1]) for cell in range(40)
        ]


@pytest.mark.parametrize("lens", ["weight", "value"])
def test_marginals_of_a_long_text(lens: str):
    window = np.abs(np.arange(1300)[:, None] - np.arange(1300)) < 40
    opened = OpenModel(record(window[None, None], causal=False))
    plain = opened.get_trace().head_weights(SITE, 0)
    weights = opened.weights(SITE, 0, slice(None), lens=lens)
    found = opened.marginals(SITE, 0, lens=lens)
    assert np.allclose(found["received"], weights.sum(0) / window.sum(0), rtol=1e-4)
    assert np.allclose(found["maximum"], weights.max(1), rtol=1e-5)
    assert np.allclose(
        found["entropy"], -(plain * np.log(np.where(plain > 0, plain, 1))).sum(1), rtol=1e-4
    )
    for offset in (-39, -1, 0, 7, 40, 1299):
        pairs = window.diagonal(-offset)
        expected = plain.diagonal(-offset)[pairs].mean() if pairs.any() else 0.0
        assert found["by_offset"][offset + 1299] == pytest.approx(expected, rel=1e-4)


def test_the_peak_is_the_first_largest_weight():
    opened = OpenModel(record(None, causal=True))
    weights = opened.get_trace().head_weights(SITE, 1)[100:1200, 50:90]
    query, key, weight = opened.peak(SITE, 1, TileRange(slice(100, 1200), slice(50, 90)))
    assert (query - 100, key - 50) == np.unravel_index(weights.argmax(), weights.shape)
    assert weight == pytest.approx(weights.max(), rel=1e-6)


def test_heads_with_masks_of_their_own_have_their_own_pictures():
    lower = np.tri(70, dtype=bool)
    masks, mask_of_head = thumbnail_masks(
        record(np.stack([lower, lower.T, lower])[None], causal=False, heads=3, queries=70, keys=70)
    )
    assert mask_of_head.tolist() == [0, 1, 0]
    assert masks[0, 0].tolist() == [0] + [1] * 63
    assert masks[1, 63].tolist() == [1] * 63 + [0]


def test_recorded_weights_are_masked_where_they_are_zero():
    weights = np.zeros((1, 2, 5, 5))
    weights[0, 0] = np.tri(5) / np.arange(1, 6)[:, None]
    weights[0, 1] = 0.2
    masks, mask_of_head = thumbnail_masks(trace_from_weights([weights], list("abcde")))
    assert mask_of_head.tolist() == [0, 1]
    assert masks[0].sum() > 0
    assert masks[1].sum() == 0
