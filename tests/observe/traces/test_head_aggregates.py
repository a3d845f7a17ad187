"""Weights of many heads as one matrix, and scores channel by channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.observe.head_analysis.attention_maps import compute_attention_maps
from headwise.observe.traces import trace_from_weights
from headwise.observe.traces.attention_trace import aggregate_heads, roll_out_attention
from headwise.observe.traces.head_steps import multiply_channels

LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}


SINKS = {
    "model_type": "gpt_oss",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 4,
    "vocab_size": 37,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "layer_types": ["full_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def llama() -> Any:
    net = hw.build(hw.families.read_model_spec(LLAMA), seed=0).eval()
    ids = torch.randint(0, 37, (1, 13), generator=torch.Generator().manual_seed(0))
    return hw.trace(net, ids)


def stacked(trace: Any, site: str) -> np.ndarray[Any, Any]:
    layer = trace.get_layer(site)
    return np.stack([trace.head_weights(site, head) for head in range(layer.heads)]).astype(
        np.float64
    )


def test_mean_and_maximum_are_those_of_all_heads(llama: Any):
    names = [layer.name for layer in llama.layers]
    every = np.concatenate([stacked(llama, name) for name in names])
    assert aggregate_heads(llama, names, "mean") == pytest.approx(every.mean(0), abs=1e-6)
    assert aggregate_heads(llama, names, "max") == pytest.approx(every.max(0), abs=1e-7)
    assert aggregate_heads(llama, names[1:2], "mean") == pytest.approx(
        stacked(llama, names[1]).mean(0), abs=1e-6
    )
    with pytest.raises(ValueError, match="unknown how='median'"):
        aggregate_heads(llama, names, "median")


def test_a_rollout_is_the_product_of_layers_with_their_residual_connection(llama: Any):
    names = [layer.name for layer in llama.layers]
    wanted = np.eye(13)
    for name in names[:2]:
        wanted = (0.5 * stacked(llama, name).mean(0) + 0.5 * np.eye(13)) @ wanted
    found = roll_out_attention(llama, names[1])
    assert found == pytest.approx(wanted, abs=1e-6)
    assert found.sum(1) == pytest.approx(np.ones(13), abs=1e-6)
    assert abs(found - roll_out_attention(llama, names[2])).max() > 1e-3


@pytest.mark.parametrize("config", [LLAMA, SINKS], ids=["llama", "gpt-oss"])
def test_a_trace_has_the_rollout_of_its_model(config: dict[str, Any]):
    """Also where a learned sink takes a part of every row."""
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    ids = torch.randint(0, 37, (1, 13), generator=torch.Generator().manual_seed(1))
    trace = hw.trace(net, ids)
    wanted = compute_attention_maps(net, ids).rollout().numpy()
    assert roll_out_attention(trace, trace.layers[-1].name) == pytest.approx(wanted, abs=1e-6)


def test_cross_attention_has_no_rollout():
    weights = np.full((1, 2, 3, 5), 0.2)
    trace = trace_from_weights(
        [], ["a", "b", "c"], cross_attention=[weights], source=["1", "2", "3", "4", "5"]
    )
    with pytest.raises(ValueError, match=r"is cross-attention, .*; choose self-attention"):
        roll_out_attention(trace, trace.layers[0].name)


def test_sites_over_other_tokens_are_refused():
    own, cross = np.full((1, 2, 3, 3), 1 / 3), np.full((1, 2, 3, 5), 0.2)
    trace = trace_from_weights(
        [own], ["a", "b", "c"], cross_attention=[cross], source=["1", "2", "3", "4", "5"]
    )
    with pytest.raises(ValueError, match="attend over different tokens"):
        aggregate_heads(trace, [layer.name for layer in trace.layers], "mean")


def test_products_add_up_to_the_scores(llama: Any):
    """The softmax of the sums times the scale is the row of weights; keys of the future have no
    products.
    """
    site = llama.layers[2].name
    found = multiply_channels(llama, site, 4, 9)
    assert found.products.shape == (10, 4)
    assert found.positions.tolist() == list(range(10))
    scores = found.products.astype(np.float64).sum(1) * found.scale
    weights = np.exp(scores) / np.exp(scores).sum()
    assert weights == pytest.approx(llama.head_weights(site, 4)[9, :10], abs=1e-6)


def test_of_many_keys_those_with_the_largest_scores_are_kept(llama: Any):
    site = llama.layers[0].name
    whole = multiply_channels(llama, site, 1, 12)
    found = multiply_channels(llama, site, 1, 12, max_keys=4)
    best = np.sort(np.argsort(-whole.products.sum(1))[:4])
    assert found.positions.tolist() == best.tolist()
    assert np.array_equal(found.products, whole.products[best])


def test_products_need_recorded_queries():
    trace = trace_from_weights([np.full((1, 2, 3, 3), 1 / 3)], ["a", "b", "c"])
    with pytest.raises(ValueError, match="were not recorded"):
        multiply_channels(trace, 0, 0, 0)
