"""Documents 001 and 004: every number against numpy, and every verdict with an input that changes
it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn.measured_layers import make_layer, sample
from headwise.observe.bundled_sample import load_sample_trace
from learn import learn_entries as learn
from learn.learn_entries import array, entropy, layer_output, layer_parts, softmax

ENTRIES = learn.entries_of("001") | learn.entries_of("004")


def scores_of(width: int, spread: float = 1.0) -> np.ndarray:
    queries, keys = array(sample(width, 512, 1, width)), array(sample(width + 1, 512, 16, width))
    return np.einsum("rod,rkd->rk", queries, keys) * spread**2


def jacobian_norm(scores: np.ndarray) -> float:
    p = softmax(scores)
    full = np.eye(16) * p[:, None] - p[:, :, None] * p[:, None]
    return float(np.linalg.norm(full, axis=(1, 2)).mean())


def saturation() -> dict:
    return {
        "width_4": jacobian_norm(scores_of(4)),
        "unit": jacobian_norm(scores_of(1024)),
        "small": jacobian_norm(scores_of(1024, 1024**-0.25)),
    }


def variance_ratios() -> dict:
    return {
        f"ratio_{width}": float(np.var(scores_of(width), ddof=1)) / width for width in (4, 64, 1024)
    }


def moments() -> dict:
    scores = scores_of(256)
    return {
        "mean_raw": float(scores.mean()),
        "variance_raw": float(scores.var(ddof=1)),
        "variance_scaled": float((scores / 16).var(ddof=1)),
    }


def diversity() -> dict:
    q, k = array(sample(1, 4, 12, 16)), array(sample(2, 4, 12, 16))
    weights = softmax(q @ np.swapaxes(k, 1, 2) / 4)
    return {
        "divergence": float(entropy(weights.mean(0)).mean() - entropy(weights).mean()),
        "most": math.log(4),
    }


def noisy_heads() -> dict:
    numbers = {}
    for name, heads in (("few", 4), ("many", 8)):
        layer, x = make_layer(hw.design(model=64, heads=heads)), array(sample(5, 4, 9, 64))
        o = np.stack([layer_parts(layer, row, heads)[1] for row in x])
        weight, bad = array(layer.state_dict()["output.o"]), heads // 4
        changed = o.copy()
        changed[:, :, :bad] = (array(sample(6, *o.shape)) * o.std(ddof=1))[:, :, :bad]
        before, after = (rows.reshape(4, 9, -1) @ weight.T for rows in (o, changed))
        numbers[name] = float(np.linalg.norm(after - before) / np.linalg.norm(before))
    return numbers


def largest_singular_values() -> dict:
    numbers = {}
    for factor in (1, 100, 10_000):
        p = softmax(scores_of(64) * factor)
        jacobian = np.eye(16) * p[:, None] - p[:, :, None] * p[:, None]
        numbers[f"largest_{factor}"] = float(np.linalg.norm(jacobian, 2, axis=(1, 2)).max())
    assert max(numbers.values()) <= 0.5
    return numbers


def distances() -> dict:
    trace = load_sample_trace()
    means = []
    for head in range(6):
        weights = np.asarray(trace.head_weights("encoder.2.attention", head), dtype=float)
        means.append(
            sum(w * abs(t - s) for t, row in enumerate(weights) for s, w in enumerate(row))
            / len(weights)
        )
    n = len(weights)
    return {
        "near": min(means),
        "far": max(means),
        "heads": 6,
        "tokens": n,
        "chance": (n * n - 1) / (3 * n),
    }


def kernel(width: float, query: float = 57.0) -> float:
    keys, values = np.array([51.0, 56.0, 58.0]), np.array([40.0, 43.0, 48.0])
    return float(softmax(-((query - keys) ** 2) / (2 * width**2)) @ values)


def look_ups() -> dict:
    numbers = {"far": 0.75, "near": 0.125, "all": 0.75 * 40 + 0.125 * (43 + 48), "two": 45.5}
    numbers |= {
        "unequal": 0.25 * 43 + 0.75 * 48,
        "line": 0.75 * 43 + 0.25 * 48,
        "at_key": (5 * 43 + 7 * 48) / 12,
    }
    numbers["inverse"] = (40 / 6 + 43 + 48) / (1 / 6 + 2)
    names = {
        "kernel_0_5": 0.5,
        "kernel_1": 1.0,
        "kernel_2": 2.0,
        "kernel_5": 5.0,
        "kernel_10": 10.0,
    }
    return numbers | {name: kernel(width) for name, width in names.items()}


def other_sources() -> dict:
    layer, x = make_layer(hw.design(model=12, heads=3)), array(sample(1, 1, 5, 12))[0]
    one, other = (
        layer_output(layer, x, 3, source=array(sample(seed, 1, 7, 12))[0]) for seed in (2, 3)
    )
    return {"shape": "5 x 12", "change": float(np.abs(one - other).max())}


def training() -> dict:
    """The same steps with plain torch, and Adam written out."""
    layer = make_layer(hw.design(model=8, heads=1, dim=8), scale=0.3)
    w = [
        layer.state_dict()[name].clone().requires_grad_()
        for name in ("project.q", "project.k", "project.v", "output.o")
    ]
    x, target = (
        sample(1, 16, 4, 8),
        (sample(1, 16, 4, 8) @ (sample(2, 8, 8) / math.sqrt(8))).softmax(-1),
    )
    first, second, losses = [torch.zeros_like(p) for p in w], [torch.zeros_like(p) for p in w], []
    for step in range(1, 62):
        q, k, v = (x @ p.T for p in w[:3])
        y = (q @ k.mT / math.sqrt(8)).softmax(-1) @ v @ w[3].T
        loss = ((y - target) ** 2).mean()
        losses.append(float(loss.detach()))
        for n, gradient in enumerate(torch.autograd.grad(loss, w)):
            first[n] = 0.9 * first[n] + 0.1 * gradient
            second[n] = 0.999 * second[n] + 0.001 * gradient**2
            move = first[n] / (1 - 0.9**step) / ((second[n] / (1 - 0.999**step)).sqrt() + 1e-8)
            w[n] = (w[n] - 0.1 * move).detach().requires_grad_()
    return {"before": losses[0], "after": pytest.approx(losses[-1], rel=1e-3), "parameters": 4 * 64}


SIZES = "queries and keys need equal channels, keys and values equal other sizes"
EXPECTED = {
    "001-1": lambda: {"difference": 0.0},
    "001-1b": lambda: {
        "query": 5,
        "key": 4,
        "message": f"query [3, 5], key [7, 4], value [7, 2]: {SIZES}",
    },
    "001-2": lambda: {"one": 512 * 64, "three": 3 * 512 * 64},
    "001-2b": lambda: {
        "formula": 3 * 8 * 512 * 64 + 512**2,
        "counted": 4 * 512**2,
        "biased": 4 * 512**2 + 4 * 512,
        "wide": 4 * 512 * 1024,
        "wide_formula": 3 * 512 * 1024 + 512**2,
    },
    "001-2c": lambda: dict.fromkeys(("h1", "h8", "h32"), 4 * 512**2),
    "001-3": diversity,
    "001-3b": noisy_heads,
    "001-3e": distances,
    "001-4e": largest_singular_values,
    "001-3d": lambda: {"change": 0.0},
    "001-3c": lambda: dict.fromkeys(("h1", "h16"), 4 * 512**2),
    "001-4": saturation,
    "001-4b": variance_ratios,
    "001-4c": moments,
    "001-4d": lambda: {"scaled": 3.0, "normed": pytest.approx(1.0, abs=1e-3)},
    "001-5": lambda: {"shape": "(2, 3, 7, 5)", "difference": 0.0},
    "004-1": lambda: {"value": (43 + 48) / 2, "other": 43 + 5 / 4},
    "004-1b": lambda: {"indices": "2, 3"},
    "004-1c": look_ups,
    "004-1d": lambda: {"distance": "0/0", "softmax": 1.0},
    "004-1e": lambda: {
        "width": 5.0,
        "weight": math.exp(-36 / 50) / (math.exp(-36 / 50) + 2 * math.exp(-1 / 50)),
        "value": kernel(5.0),
    },
    "004-2": lambda: {"kernel": kernel(2.0), "value": kernel(2.0), "layer": 0.0, "dot": 0.0},
    "004-2b": lambda: {"near": 43.0, "far": pytest.approx(131 / 3, rel=1e-7), "mean": 131 / 3},
    "004-2c": lambda: {"right": "5 x 3", "product": "-"},
    "004-2d": lambda: {"queries": 5, "keys": 7, "shape": "5 x 7", "row_sum": 1.0},
    "004-2e": lambda: {"rows": 3, "columns": 4, "first_sum": 1.0},
    "004-3": lambda: {"difference": 0.0},
    "004-4": other_sources,
    "004-5": training,
}
CHANGES = {
    "001-1": {"shared_input": False},
    "001-1b": {"key": 5},
    "001-2": {"matrices": 3},
    "001-2b": {"width": 128},
    "001-2c": {"width": 64},
    "001-3": {"tied": True},
    "001-3b": {"fixed": True},
    "001-3e": {"uniform": True},
    "001-4e": {"normalised": False},
    "001-3c": {"width": 64},
    "001-3d": {"modifiers": '{part = "TalkingHeads", on = "scores"}'},
    "001-4": {"spread": 1024**-0.25},
    "001-4b": {"repeated": True},
    "001-4c": {"mean": 1.0},
    "001-4d": {"stretch": 1.0},
    "001-5": {"scale_power": 1.0},
    "004-1": {"query": 56.5},
    "004-1b": {"query": 52.0},
    "004-1c": {"power": -1.0},
    "004-1d": {"keys": (51.0, 56.0)},
    "004-1e": {"width": 1.0},
    "004-2": {"unit": False},
    "004-2b": {"narrow": 5.0},
    "004-2c": {"row_vector": True},
    "004-2d": {"queries": 7},
    "004-2e": {"normaliser": "Sigmoid"},
    "004-3": {"other_source": True},
    "004-4": {"cut": True},
    "004-5": {"rate": 0.0},
}


@pytest.mark.parametrize("id", EXPECTED)
def test_numbers_and_verdict(id: str):
    learn.check_entry(ENTRIES[id], EXPECTED[id]())


@pytest.mark.parametrize("id", CHANGES)
def test_verdict_follows_the_input(id: str):
    learn.check_flip(ENTRIES[id], CHANGES[id])


def test_every_run_of_these_documents_is_checked():
    assert set(learn.runnable("001")) | set(learn.runnable("004")) == set(EXPECTED) == set(CHANGES)
