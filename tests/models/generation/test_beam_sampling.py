"""Beam search with sampling: what is drawn, and with which probability."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.kernels.counter_rng import RandomStream
from headwise.models.generation.decoding_strategies import draw_without_replacement

DRAWS = 4000


def make_net(vocabulary: int, seed: int = 0) -> hw.Transformer:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
    }
    net = hw.build(
        hw.families.read_model_spec(config | {"num_hidden_layers": 1, "vocab_size": vocabulary}),
        seed=seed,
    )
    with torch.no_grad():
        net.get_submodule("head.tokens").get_parameter("weight").mul_(
            2
        )  # so that tokens differ in probability
    return net


def order_probability(shares: np.ndarray, order: tuple[int, ...]) -> float:
    """p_a p_b / (1 - p_a) p_c / (1 - p_a - p_b) ..."""
    probability, left = 1.0, 1.0
    for index in order:
        probability *= shares[index] / left
        left -= shares[index]
    return probability


def assert_frequencies(counts: Counter, expected: dict) -> None:
    """Every frequency within five standard deviations of its probability."""
    for outcome, probability in expected.items():
        deviation = (probability * (1 - probability) / DRAWS) ** 0.5
        assert abs(counts[outcome] / DRAWS - probability) <= 5 * deviation + 1e-9, outcome


def test_draws_without_replacement_have_the_probability_of_their_order():
    shares = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    log_weights, stream = torch.tensor(shares).log(), RandomStream(7)
    counts = Counter(tuple(draw_without_replacement(log_weights, 2, stream)) for _ in range(DRAWS))
    orders = permutations((0, 2, 3, 4), 2)
    assert_frequencies(counts, {order: order_probability(shares, order) for order in orders})
    assert sorted(draw_without_replacement(log_weights, 9, stream)) == [0, 2, 3, 4]


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_sampled_beam_is_the_best_of_its_draws(temperature: float):
    """One token, two beams, seven tokens: four are drawn in some order, and the most likely of them
    is the output.
    """
    net = make_net(7)
    with torch.no_grad():
        logits = net.double()(torch.tensor([[3, 1, 4]]))[0, -1].numpy()
    net.float()
    log_shares = logits - np.log(np.exp(logits).sum())
    warped = np.exp(log_shares / temperature)
    shares = warped / warped.sum()
    expected: dict[int, float] = dict.fromkeys(range(7), 0.0)
    for order in permutations(range(7), 4):
        expected[max(order, key=lambda token: shares[token])] += order_probability(shares, order)
    config = hw.DecodingConfig(beams=2)
    prompts = [[3, 1, 4]] * DRAWS
    outputs = hw.generate(
        net, prompts, max_new_tokens=1, temperature=temperature, config=config, seed=11
    )
    assert_frequencies(Counter(output[0] for output in outputs), expected)
    assert max(expected.values()) < 0.99


def test_beams_are_repeatable_distinct_and_scored_by_their_warped_probabilities():
    net = make_net(11)
    config = hw.DecodingConfig(beams=3, best=3, top_k=6)
    options = {"max_new_tokens": 5, "temperature": 0.8, "config": config}
    first = hw.generate(net, [3, 1, 4], seed=2, **options)
    assert first == hw.generate(net, [3, 1, 4], seed=2, **options)
    assert len({tuple(output) for output in first}) == 3
    others = {str(hw.generate(net, [3, 1, 4], seed=seed, **options)) for seed in range(6)}
    assert len(others) > 1
    # A row of a batch samples from its own stream.
    together = hw.generate(net, [[3, 1, 4], [1, 5]], seed=[2, 9], **options)
    assert together == [first, hw.generate(net, [1, 5], seed=9, **options)]
