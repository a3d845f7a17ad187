"""Document 003, sections 1 to 5: every number against numpy, and every verdict with an input that
changes it.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn.attention_mechanism import gru_steps
from headwise.learn.measured_layers import make_layer, sample
from learn import learn_entries as learn
from learn.learn_entries import array, attention, layer_output, softmax

ENTRIES = learn.entries_of("003")


def unit_keys() -> dict:
    keys, values = array(sample(1, 6, 8)), array(sample(2, 6, 3))
    keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    errors = [
        float(np.abs(attention(keys, keys, values, scale) - values).max())
        for scale in (None, 200.0)
    ]
    return {"usual": errors[0], "sharp": errors[1], "scale": 200.0}


def saturation() -> dict:
    widths = (4, 16, 64, 256, 1024)
    raw = {f"raw_{d}": learn.jacobian_norm(learn.random_scores(d)) for d in widths}
    return raw | {
        f"scaled_{d}": learn.jacobian_norm(learn.random_scores(d) / math.sqrt(d)) for d in widths
    }


def variances() -> dict:
    return {f"ratio_{d}": float(learn.random_scores(d).var(ddof=1) / d) for d in (4, 64, 1024)}


def steps_by_hand() -> dict:
    first, second = 1 / (1 + math.exp(-1 / math.sqrt(2))), 1 / (1 + math.exp(1 / math.sqrt(2)))
    output = f"{first * 1 + second * 3:.4f}, {first * 2:.4f}"  # the third key is masked
    return {
        "score_21": 2.0,
        "scaled_21": math.sqrt(2),
        "weight_21": first,
        "output_2": output,
        "row_sum": 1.0,
        "difference": 0.0,
    }


def four_matrices() -> dict:
    params, scores = 4 * 512 * 512, 512 * 512
    flops = 2 * params * 512 + 4 * 512 * 512 * 512
    return {
        "params_1": params,
        "flops_1": flops,
        "scores_1": scores,
        "params_32": params,
        "scores_32": 32 * scores,
    }


def ranks() -> dict:
    torch.manual_seed(0)
    gru = torch.nn.GRU(4, 4, batch_first=True).double()
    x = sample(2, 12, 4)
    state = learn.derivative(lambda rows: array(gru(torch.as_tensor(rows)[None])[1]), array(x))
    weights = softmax(
        array(sample(1, 12, 4)) @ array(x).T / 2
    )  # contexts are weights V: rank(weights) d
    width = 4
    rank = int(np.linalg.matrix_rank(weights, rtol=1e-9)) * width
    return {
        "fixed": int(np.linalg.matrix_rank(state, rtol=1e-7)),
        "attention": rank,
        "source": 48,
        "width": 4,
    }


def gradients() -> dict:
    torch.manual_seed(0)
    gru, x = torch.nn.GRU(16, 16).double(), sample(1, 41, 16)
    recurrent = torch.autograd.functional.jacobian(
        lambda rows: gru(rows[:, None])[0][-1, 0], x
    ).norm(dim=(0, 2))
    layer = make_layer(hw.design(model=16, heads=2))
    slopes = learn.derivative(lambda rows: layer_output(layer, rows, 2)[-1], array(x)).reshape(
        16, 41, 16
    )
    norms = np.sqrt((slopes**2).sum((0, 2)))
    ratios = {"gru": float(recurrent[0] / recurrent[-2]), "attention": float(norms[0] / norms[-2])}
    return ratios | {"distance": 40}


def table_of_layers() -> dict:
    n, d = 4096, 512
    attention_flops = {length: 8 * length * d**2 + 4 * length**2 * d for length in (n, d, d + 1)}
    assert attention_flops[d] == 12 * d * d**2
    assert attention_flops[d + 1] > 12 * (d + 1) * d**2
    return {
        "tokens": n,
        "model": d,
        "gru_serial": n,
        "attention_serial": 1,
        "gru_path": n,
        "attention_path": 1,
        "gru_flops": 12 * n * d**2,
        "attention_flops": attention_flops[n],
        "dearer": d + 1,
    }


def reversed_gru() -> dict:
    torch.manual_seed(0)
    gru, k = torch.nn.GRU(5, 5).double(), sample(2, 11, 5)
    states = [gru(rows[:, None])[1][0, 0] for rows in (k, k.flip(0))]
    return {
        "streamed": 0.0,
        "permuted": 0.0,
        "gru": float((states[0] - states[1]).detach().abs().max()),
    }


def permuted_convolution() -> dict:
    x, kernel = array(sample(1, 7, 8)), array(sample(2, 8, 8, 3))
    order = [3, 0, 6, 1, 5, 2, 4]

    def convolve(rows: np.ndarray) -> np.ndarray:
        return np.stack(
            [sum(kernel[:, :, n] @ rows[(t + n - 1) % 7] for n in range(3)) for t in range(7)]
        )

    return {
        "attention": 0.0,
        "convolution": float(np.abs(convolve(x[order]) - convolve(x)[order]).max()),
        "shifted": 0.0,
    }


def influence_of_others() -> dict:
    layer, x = make_layer(hw.design(model=16, heads=2)), array(sample(1, 5, 16))
    slopes = learn.derivative(lambda rows: layer_output(layer, rows, 2)[0], x).reshape(16, 5, 16)
    return {"parameters": 4 * 16 * 16, "other": float(np.abs(slopes[:, 1:]).max())}


def other_functions() -> dict:
    """Heads of a layer with queries and keys of half the size, with other features of both."""
    layer = make_layer(hw.design(model=16, heads=2))
    state = {name: array(w) for name, w in layer.state_dict().items()}
    x = array(sample(1, 1, 9, 16))[0]
    q, k, v = ((x @ state[f"project.{n}"].T).reshape(9, 2, 8).swapaxes(0, 1) for n in "qkv")
    q, k = q / 2, k / 2
    exact = learn.attention(q, k, v)

    def features(y: np.ndarray) -> np.ndarray:
        return np.where(y > 0, y + 1, np.exp(y))

    def error(one: np.ndarray, other: np.ndarray) -> float:
        weights = one @ other.swapaxes(1, 2)
        return float(np.abs(weights @ v / weights.sum(-1, keepdims=True) - exact).max())

    numbers = {"linear": error(features(q), features(k)), "flash": 0.0}
    for draws in (64, 16384):
        similarity = hw.parts.FeatureMap(kind="favor", draws=draws, seed=7)
        spec = hw.design(
            model=16, heads=2, similarity=similarity, normaliser=hw.parts.SumNormaliser()
        )
        w = array(hw.Attention(spec).state_dict()["similarity.directions"]).astype(float)
        maps = [
            np.exp(y @ w.T / 8**0.25 - (y**2).sum(-1, keepdims=True) / 2 / 8**0.5) for y in (q, k)
        ]
        numbers[f"performer_{draws}"] = pytest.approx(error(*maps), rel=1e-4)
    return numbers


def window_pairs() -> dict:
    pairs = {n: sum(min(t + 1, 64) for t in range(n)) for n in (1024, 2048)}
    return {
        "pairs_1024": pairs[1024],
        "growth": pairs[2048] / pairs[1024],
        "full_1024": 1024**2,
        "full_2048": 2048**2,
    }


def checkpointed_ratio() -> dict:
    """Products of a layer of width 32 over 64 tokens, 4 heads; the output projection is not
    recomputed. Kept with checkpointing: the inputs alone.
    """

    def forward(n: int, projections: int, d: int = 32) -> int:
        return projections * 2 * n * d * d + 2 * 2 * n * n * d

    flops = {n: 3 * forward(n, 4) + forward(n, 3) for n in (64, 128)}
    plain = 3 * forward(64, 4)
    numbers = {"ratio": flops[64] / plain, "flops": plain, "growth": flops[128] / flops[64]}
    weights, states = 4 * 64 * 64, 64 * 32
    # nine tensors of states (inputs, q, k, v, heads and copies), four matrices, two of weights
    return numbers | {"kept": states, "saved": 9 * states + 4 * 32**2 + 2 * weights}


def moved_tokens() -> dict:
    """Outputs of a causal layer with ALiBi if the last of 9 tokens moves to position 50."""
    layer = make_layer(hw.design(model=16, heads=2))
    x = array(sample(1, 1, 9, 16))[0]
    state = {name: array(w) for name, w in layer.state_dict().items()}
    q, k, v = ((x @ state[f"project.{n}"].T).reshape(9, 2, 8).swapaxes(0, 1) for n in "qkv")
    slopes = np.array([2.0**-4, 2.0**-8])[:, None, None]
    outputs = []
    for last in (8, 50):
        t = np.array([*range(8), last])
        scores = q @ k.swapaxes(1, 2) / math.sqrt(8) - slopes * (t[:, None] - t)
        weights = softmax(np.where(np.tri(9) > 0, scores, -np.inf))
        heads = (weights @ v).swapaxes(0, 1).reshape(9, 16)
        outputs.append(heads @ state["output.o"].T)
    return {"change": 0.0, "apart": float(np.abs(outputs[0] - outputs[1]).max())}


def shifted_encoding() -> dict:
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16)
    before, after = np.sin(angles)[:-5], np.sin(angles)[5:]
    best = np.linalg.pinv(before, rcond=1e-10) @ after
    return {"both": 0.0, "sine": float(np.abs(before @ best - after).max())}


def parameters_of_the_transformer() -> dict:
    """Six encoder layers with one attention, six decoder layers with two; d = 512, hidden width
    2048, biases.
    """
    attention, feed, norm = 4 * 512**2 + 4 * 512, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    total = 6 * (attention + feed + 2 * norm) + 6 * (2 * attention + feed + 3 * norm)
    return {"feed": 12 * feed / total, "attention": 18 * attention / total, "recurrent": 0}


@functools.cache
def performers() -> dict:
    """2009.14794, lemma 1: features exp(w x - |x|^2 / 2) of x / dim^(1/4), with the directions that
    each seed draws.
    """
    state = {
        name: array(w) for name, w in make_layer(hw.design(model=16, heads=2)).state_dict().items()
    }
    x, errors, draws = array(sample(1, 1, 32, 16))[0], [], [32 * 2**n for n in range(8)]
    q, k, v = ((x @ state[f"project.{n}"].T).reshape(32, 2, 8).swapaxes(0, 1) for n in "qkv")
    q, k = q / 4, k / 4
    exact = learn.attention(q, k, v)
    for count in draws:
        squares = []
        for seed in range(16):
            similarity = hw.parts.FeatureMap(kind="favor", draws=count, seed=seed)
            spec = hw.design(
                model=16, heads=2, similarity=similarity, normaliser=hw.parts.SumNormaliser()
            )
            w = array(hw.Attention(spec).state_dict()["similarity.directions"]).astype(float)
            maps = [
                np.exp(y @ w.T / 8**0.25 - (y**2).sum(-1, keepdims=True) / 2 / 8**0.5)
                for y in (q, k)
            ]
            shares = maps[0] @ maps[1].swapaxes(1, 2)
            outputs = shares / shares.sum(-1, keepdims=True) @ v
            squares.append(((outputs - exact) ** 2).sum() / (exact**2).sum())
        errors.append(float(np.sqrt(np.mean(squares))))
    slope = float(np.polyfit(np.log(draws), np.log(errors), 1)[0])
    assert slope == pytest.approx(-0.5, abs=0.05)
    return {
        "few": 32,
        "many": 4096,
        "error_few": errors[0],
        "error_many": errors[-1],
        "slope": slope,
    }


def best_sources() -> dict:
    counts = []
    for site, batches in learn.translator_weights().items():
        if not site.endswith("cross"):
            continue
        chosen = [text.argmax(-1) for weights in batches for text in weights]  # [heads, steps]
        distinct = np.array([[len(set(row)) for row in text.tolist()] for text in chosen])
        counts += distinct.mean(0).tolist()
    return {
        "fewest": pytest.approx(float(min(counts)), rel=1e-5),
        "most": pytest.approx(float(max(counts)), rel=1e-5),
        "mean": pytest.approx(float(np.mean(counts)), rel=1e-5),
        "heads": 18,
        "texts": 64,
    }


def growth_by_length() -> dict:
    flops = {n: 8 * n * 512**2 + 4 * n**2 * 512 for n in (64, 128, 65536, 131072)}
    return {
        "from_64": flops[128] / flops[64],
        "from_65536": flops[131072] / flops[65536],
        "model": 512,
    }


def kept_numbers() -> dict:
    """Written out: q, k, v, and four tensors of n^2: weights and masks. Fused: q, k, v, the output
    and one number for each query.
    """
    written, fused = (
        {n: count(n) for n in (256, 512)}
        for count in (lambda n: 48 * n + 4 * n * n, lambda n: 65 * n)
    )
    growth = {"written_growth": written[512] / written[256], "fused_growth": 2.0}
    return {"written": written[512], "fused": fused[512]} | growth


def half_errors() -> dict:
    scores = array(sample(1, 64, 4096))
    exact, powers = softmax(scores), np.exp(scores.astype(np.float16))
    low = powers / np.add.accumulate(powers, axis=-1, dtype=np.float16)[:, -1:]
    return {
        "low": pytest.approx(float(np.abs((low.astype(float) - exact) / exact).max()), rel=1e-3),
        "overflow": "True",
    }


REFUSED = (
    "query [3, 5], key [11, 5], value [7, 5]: queries and keys need equal channels, keys "
    "and values equal other sizes"
)


COMPUTED = {
    "003-1.2": unit_keys,
    "003-2.1b": saturation,
    "003-2.2": steps_by_hand,
    "003-2.2b": variances,
    "003-2.2c": learn.masked_change,
    "003-2.3b": four_matrices,
    "003-3.1b": ranks,
    "003-3.1d": parameters_of_the_transformer,
    "003-3.1e": best_sources,
    "003-4.3e": growth_by_length,
    "003-4.3f": kept_numbers,
    "003-3.2": gradients,
    "003-4.1": table_of_layers,
    "003-4.1b": reversed_gru,
    "003-4.2b": permuted_convolution,
    "003-4.2c": influence_of_others,
    "003-4.3": other_functions,
    "003-4.3b": window_pairs,
    "003-4.3d": performers,
    "003-5.2": checkpointed_ratio,
    "003-5.2b": shifted_encoding,
    "003-5.2f": moved_tokens,
}


@pytest.mark.parametrize("id", learn.runnable("003", "12345"))
def test_numbers_and_verdict(id: str):
    learn.check_numbers(ENTRIES[id], COMPUTED, globals())


def test_figures_have_every_number():
    figure = learn.checked(ENTRIES["003-2.2"]).figure
    q, k, v = (
        np.array([[1, 0], [0.5, 1], [0, 2]]),
        np.array([[2, 1], [0, 1], [1, -1]]),
        np.array([[1, 2], [3, 0], [5, 4]]),
    )
    scores = q @ k.T
    weights = softmax(np.where(np.tri(3) > 0, scores / math.sqrt(2), -np.inf))
    expected = [q, k, v, scores, scores / math.sqrt(2), None, weights, weights @ v]
    for panel, numbers in zip(figure.panels, expected, strict=True):
        if numbers is not None:
            assert panel.texts == [[f"{number:.2f}" for number in row] for row in numbers]
    assert str(figure.panels[5].texts).count("-∞") == 3
    errors, (curve,) = performers(), learn.checked(ENTRIES["003-4.3d"]).figure.panels
    labels = curve.series[0].labels
    assert len(labels) == 8
    assert (labels[0], labels[-1]) == tuple(
        f"{errors[name]:.3g}" for name in ("error_few", "error_many")
    )
    reach = learn.checked(ENTRIES["003-1.2b"]).figure
    layer, x = make_layer(hw.design(model=4, heads=2)), array(sample(4, 9, 4))
    slopes = learn.derivative(lambda rows: layer_output(layer, rows, 2), x).reshape(9, 4, 9, 4)
    kernel = array(sample(3, 4, 4, 3))
    expected = np.zeros((2, 9, 9))
    expected[0] = np.abs(slopes).max((1, 3))
    for row in range(9):
        for n in range(max(1 - row, 0), min(3, 10 - row)):
            expected[1, row, row + n - 1] = np.abs(kernel[:, :, n]).max()
    texts = np.array([panel.texts for panel in reach.panels], float)
    assert texts == pytest.approx(expected, abs=0.00501)


def test_gru_steps_are_those_of_torch():
    torch.manual_seed(0)
    gru, x = torch.nn.GRU(4, 5).double(), sample(1, 6, 4)
    torch.testing.assert_close(gru_steps(gru, x), gru(x[:, None])[0][:, 0], rtol=0, atol=1e-12)
