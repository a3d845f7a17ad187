"""Queries and keys as points: the plane is that of numpy's covariance, and near points have large
scores.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.observe.traces import Trace, trace_from_weights
from headwise.observe.traces.head_steps import map_queries_and_keys
from support.tiny_configs import model_config

GPT = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=40, n_positions=64)


def record() -> Trace:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, 23), generator=torch.Generator().manual_seed(0))
    return hw.trace(net, ids)


def test_the_plane_holds_the_two_largest_variances() -> None:
    trace = record()
    layer = trace.layers[1]
    found = map_queries_and_keys(trace, layer.name, 2)
    sides = []
    for vectors in (layer.arrays["q"][0, :, 2], layer.arrays["k"][0, :, layer.kv_head_of_query[2]]):
        centred = vectors.astype(np.float64) - vectors.mean(0)
        sides.append(centred / np.linalg.norm(centred, axis=1).mean())
    stacked = np.concatenate(sides)
    values, vectors = np.linalg.eigh(stacked.T @ stacked)
    plane = vectors[:, [-1, -2]]
    points = np.concatenate([found.queries, found.keys])
    np.testing.assert_allclose(np.abs(points), np.abs(stacked @ plane), atol=1e-5)
    assert found.share == pytest.approx(values[-2:].sum() / values.sum(), abs=1e-9)
    # the plane holds part of every scalar product, so that large scores lie near each other
    scores, shown = sides[0] @ sides[1].T, found.queries @ found.keys.T
    assert np.corrcoef(scores.ravel(), shown.ravel())[0, 1] > 0.7


def test_traces_without_queries_and_unknown_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="were not recorded"):
        map_queries_and_keys(trace_from_weights([np.eye(2)[None, None]]), 0, 0)
    with pytest.raises(ValueError, match="has no head 9"):
        map_queries_and_keys(record(), 0, 9)
