"""Document 000: every number against numpy, and every verdict with an input that changes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn.measured_layers import make_layer, sample
from learn import learn_entries as learn
from learn.learn_entries import array, layer_parts, softmax

ENTRIES = learn.entries_of("000")
N, D = 4096, 512


def attention_flops(n: int, d: int = D) -> int:
    return 8 * n * d**2 + 4 * n**2 * d


def dilution() -> dict:
    weights = {f"softmax_{n}": math.exp(3) / (math.exp(3) + n - 1) for n in (8, N)}
    return weights | {
        f"entmax_{n}": 1.0 for n in (8, N)
    }  # s/2 - 0 >= 1 leaves the other keys nothing


def read_outs() -> dict:
    values = array(sample(1, 200, 4, 3))
    goal, mean = values[:, :2].reshape(200, 6), values[:, :2].mean(1)
    error = goal - mean @ np.linalg.pinv(mean) @ goal
    return {"one_head": float(np.sqrt((error**2).mean())), "heads": 0.0, "single": 0.0}


def gru_range() -> dict:
    torch.manual_seed(0)
    gru, x = torch.nn.GRU(16, 16).double(), sample(1, 9, 16)
    slopes = torch.autograd.functional.jacobian(lambda rows: gru(rows[:, None])[0][-1, 0], x)
    return {"pairs": 45, "past": 9 * 10 // 2, "far": float(slopes[:, 0].norm())}


def alibi() -> dict:
    steepest = 2 ** (-8 / 8)
    return {
        "plain": 1.0,
        "alibi": math.exp(-40 * steepest),
        "weight_16": 1 / 16,
        "weight_1024": 1 / 1024,
    }


def nearest_keys() -> dict:
    q, k = array(sample(1, 500, 8)), array(sample(2, 20, 8))
    distances = np.linalg.norm(q[:, None] - k[None], axis=-1)
    return {"unit": 1.0, "random": float(((q @ k.T).argmax(1) == distances.argmin(1)).mean())}


def biases() -> dict:
    layer, x = make_layer(hw.design(model=12, heads=3, bias="qkv")), array(sample(1, 5, 12))
    state = {name: array(value) for name, value in layer.state_dict().items()}

    def output(**added: float) -> np.ndarray:
        q, k, v = (
            np.moveaxis(
                (
                    x @ state[f"project.{s}"].T + state[f"project.{s}_bias"] + added.get(s, 0.0)
                ).reshape(5, 3, 4),
                1,
                0,
            )
            for s in "qkv"
        )
        z = softmax(q @ np.swapaxes(k, 1, 2) / 2) @ v
        return np.moveaxis(z, 0, 1).reshape(5, 12) @ state["output.o"].T

    moved = {side: float(np.abs(output(**{side: 1.0}) - output()).max()) for side in "qkv"}
    return moved | {"k": 0.0, "spread": 0.0, "biases": 4 * 12}


def weights_by_content() -> dict:
    layer = make_layer(hw.design(model=16, heads=2))
    one, other = (layer_parts(layer, array(sample(seed, 1, 7, 16))[0], 2)[0] for seed in (1, 2))
    return {
        "names": "output.o, project.k, project.q, project.v",
        "change": float(np.abs(one - other).max()),
    }


def cat_and_dog() -> dict:
    words = sorted({"The", "cat", "dog", "sat", "on", "the", "mat", "."})
    table = dict(zip(words, array(sample(1, 8, 16)), strict=True))
    layer, weights = make_layer(hw.design(model=16, heads=2)), []
    for animal in ("cat", "dog"):
        x = np.stack([table[word] for word in f"The {animal} sat on the mat .".split()])
        weights.append(layer_parts(layer, x, 2)[0])
    return {"change": float(np.abs(weights[0] - weights[1]).max()), "row_sum": 1.0}


def similarities() -> dict:
    layer = make_layer(hw.design(model=12, heads=3, similarity=hw.parts.Additive()))
    state, x = (
        {name: array(value) for name, value in layer.state_dict().items()},
        array(sample(1, 5, 12)),
    )
    q, k = ((x @ state[f"project.{side}"].T).reshape(5, 3, 4).swapaxes(0, 1) for side in "qk")
    hidden = np.tanh(q[:, :, None] + k[:, None] + state["similarity.bias"][:, None, None])
    additive = softmax(np.einsum("htsk,hk->hts", hidden, state["similarity.v"]))
    change = np.abs(additive - softmax(q @ k.swapaxes(1, 2) / 2)).max()
    return {"change": float(change), "shape": "5 x 7"}


def nonlinearity() -> dict:
    layer, (x, z) = (
        make_layer(hw.design(model=16, heads=2)),
        (array(sample(seed, 7, 16)) for seed in (1, 2)),
    )
    whole, one, other = (learn.layer_output(layer, rows, 2) for rows in (2 * x + 3 * z, x, z))
    return {"learned": 0.0, "attention": float(np.abs(whole - 2 * one - 3 * other).max())}


TOO_LONG = (
    "LearnedScores(length=7) knows no position 8, its last one is 6; give it a length of 9, or "
    "give shorter input"
)
COMPUTED = {
    "000-0b": dilution,
    "000-0c": read_outs,
    "000-1": gru_range,
    "000-1c": alibi,
    "000-1.1b": nearest_keys,
    "000-1i": similarities,
    "000-1.2.1c": nonlinearity,
    "000-1.2.2": biases,
    "000-1.2.2c": weights_by_content,
    "000-1.2.3": cat_and_dog,
}


@pytest.mark.parametrize("id", learn.runnable("000"))
def test_numbers_and_verdict(id: str):
    learn.check_numbers(ENTRIES[id], COMPUTED, globals())


def test_the_figure_has_the_weights():
    figure = learn.checked(ENTRIES["000-1.2.3"]).figure
    table = dict(
        zip(
            sorted({"The", "cat", "dog", "sat", "on", "the", "mat", "."}),
            array(sample(1, 8, 16)),
            strict=True,
        )
    )
    x = np.stack([table[word] for word in ["The", "cat", "sat", "on", "the", "mat", "."]])
    weights = layer_parts(make_layer(hw.design(model=16, heads=2)), x, 2)[0]
    for panel, head in zip(figure.panels, weights, strict=True):
        (drawn,) = panel.weights.values()
        assert np.array(drawn) == pytest.approx(head)
