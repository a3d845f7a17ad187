"""Document 003, sections 6 to 8: every number against numpy, and every verdict with an input that
changes it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn.measured_layers import make_layer, sample
from headwise.observe.bundled_sample import load_sample_model
from learn import learn_entries as learn
from learn.learn_entries import array, entropy, layer_output, layer_parts, softmax

ENTRIES = learn.entries_of("003")


def entropies() -> dict:
    q, k = array(sample(1, 5, 4)), array(sample(2, 8, 4))
    scores = q @ k.T
    rows = {"average": 0 * scores, "soft": scores / 2, "hard": 100 * scores}
    return {name: float(entropy(softmax(row)).mean()) for name, row in rows.items()} | {
        "most": math.log(8)
    }


def deviations() -> dict:
    numbers = {}
    for width in (4, 64, 1024):
        queries, keys = (
            array(sample(width, 512, 1, width)),
            array(sample(width + 1, 512, 16, width)),
        )
        scores = np.einsum("rod,rkd->rk", queries, keys) / math.sqrt(width)
        numbers[f"std_{width}"] = float(scores.std(ddof=1))
    return numbers


def periods() -> dict:
    lengths = 2 * np.pi * 10000 ** (np.arange(0, 64, 2) / 64)
    angles = np.arange(128)[:, None] * 10000 ** (-np.arange(0, 64, 2) / 64)
    table = np.concatenate(
        [np.sin(angles), np.cos(angles)], 1
    )  # distances do not depend on the layout
    distance = np.linalg.norm(table[:64] - table[127], axis=1).min()
    spacing = np.linalg.norm(table[1] - table[0])
    return {
        "pairs": 32,
        "unseen": int((lengths > 64).sum()),
        "distance": float(distance),
        "spacing": float(spacing),
    }


def smallest_dims() -> dict:
    """Dimensions of 90 % of the energy of the summed W_Q W_K^T of each layer, by full singular
    values.
    """
    dims = []
    for name, weight in (state := load_sample_model().state_dict()).items():
        if name.endswith("project.q"):
            summed = array(weight).astype(float).T @ array(state[name[:-1] + "k"]).astype(float)
            energy = np.linalg.svd(summed, compute_uv=False) ** 2
            dims.append(1 + int((energy.cumsum() < 0.9 * energy.sum()).sum()))
    return {"layers": len(dims), "all": dims}


def flipped_bit() -> dict:
    numbers, table = {}, array(sample(4, 2, 8))
    for tokens in (16, 1024):
        layer = make_layer(hw.design(model=8, heads=2))
        bits = (array(sample(3, tokens)) > 0).astype(int)
        other = bits.copy()
        other[0] = 1 - other[0]
        before, after = (layer_output(layer, table[b], 2)[-1] for b in (bits, other))
        numbers[f"change_{tokens}"] = float(np.linalg.norm(after - before))
    return numbers | {"factor": numbers["change_16"] / numbers["change_1024"]}


def changed_queries() -> dict:
    layer = make_layer(hw.design(model=8, heads=2))
    source, queries = (
        array(sample(2, 1, 6, 8))[0],
        [array(sample(seed, 1, 4, 8))[0] for seed in (3, 4)],
    )
    (one, outputs), (other, _) = (layer_parts(layer, x, 2, source=source) for x in queries)
    values = (source @ array(layer.state_dict()["project.v"]).T).reshape(6, 2, 4)
    outside = np.maximum(outputs - values.max(0), values.min(0) - outputs).max()
    return {"row_sum": 1.0, "outside": float(outside), "changed": float(np.abs(one - other).max())}


def coupled_heads() -> dict:
    """Second derivative of |sum_h z_h W_h - target|^2 by z_0 and z_1: 2 W_0 W_1^T."""
    weight = array(make_layer(hw.design(model=12, heads=3)).state_dict()["output.o"])
    return {
        "difference": 0.0,
        "coupling": float(np.abs(2 * weight[:, :4].T @ weight[:, 4:8]).max()),
    }


def two_sentences() -> dict:
    layer, (i, love, you) = make_layer(hw.design(model=12, heads=3)), array(sample(1, 3, 12))
    means = [
        layer_output(layer, np.stack(words), 3, allowed=np.tril(np.ones((3, 3), dtype=bool))).mean(
            0
        )
        for words in ((i, love, you), (you, love, i))
    ]
    return {"encoder": 0.0, "decoder": float(np.abs(means[0] - means[1]).max())}


def pattern_shares() -> dict:
    longformer = sum(min(4095, t + 256) - max(0, t - 256) + 1 for t in range(4096))
    far = [
        t for t in range(4096) if t > 256
    ]  # the first token attends to all, and all attend to it
    return {"longformer": (longformer + 2 * len(far)) / 4096**2, "bigbird": bigbird_share()}


def bigbird_share() -> float:
    pattern = hw.design(preset="bigbird", model=64, heads=1).pattern
    rows = torch.arange(4096)[:, None]
    return (
        float(sum(int(pattern.allows(rows[t : t + 64], rows.T).sum()) for t in range(0, 4096, 64)))
        / 4096**2
    )


COMPUTED = {
    "003-6.1": entropies,
    "003-6.2": deviations,
    "003-6.4": periods,
    "003-6.6": learn.heads_of_the_translator,
    "003-6.7": flipped_bit,
    "003-7.1": changed_queries,
    "003-7.2": coupled_heads,
    "003-7.4": two_sentences,
    "003-8.3": pattern_shares,
}


@pytest.mark.parametrize("id", learn.runnable("003", "678"))
def test_numbers_and_verdict(id: str):
    learn.check_numbers(ENTRIES[id], COMPUTED, globals())


def test_the_figure_has_the_weights_at_three_scales():
    q, k = array(sample(1, 5, 4)), array(sample(2, 8, 4))
    weights = [softmax(q @ k.T * scale) for scale in (0, 0.5, 100)]
    figure = learn.checked(ENTRIES["003-6.1"]).figure
    for panel, rows in zip(figure.panels, weights, strict=True):
        assert np.array(panel.texts, float) == pytest.approx(rows, abs=0.00501)


def test_unequal_lengths_need_a_layer_without_a_fixed_length():
    assert learn.checked(ENTRIES["003-7.3"]).verdict == "wrong"
    with pytest.raises(ValueError, match="knows no position 12"):
        ENTRIES["003-7.3"].run(modifiers='modifiers = [{part = "LearnedScores", length = 7}]')


def test_dimensions_of_the_translator():
    entry, expected = ENTRIES["003-6.6b"], smallest_dims()
    result = entry.check()
    assert result.verdict == entry.verdict
    assert result.numbers["layers"] == expected["layers"] == 9
    assert result.numbers["dims"] in expected["all"]
    rng = np.random.default_rng(0)
    draws = [rng.standard_normal((96, 96)) @ rng.standard_normal((96, 96)) for _ in range(8)]
    energies = [np.linalg.svd(draw, compute_uv=False) ** 2 for draw in draws]
    chance = np.mean([1 + (e.cumsum() < 0.9 * e.sum()).sum() for e in energies])
    assert result.numbers["chance"] == pytest.approx(chance, rel=0.1)
    share = np.mean([dims / chance for dims in expected["all"]])
    assert result.numbers["share"] == pytest.approx(share, rel=0.1)


def test_random_weights_share_no_dimensions():
    from headwise.observe.head_analysis.head_circuits import make_random_baseline

    entry = ENTRIES["003-6.6b"]
    assert entry.run(model=make_random_baseline(load_sample_model())).verdict != entry.verdict
