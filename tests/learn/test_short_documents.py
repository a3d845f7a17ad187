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
from learn import learn_entries as learn
from learn.learn_entries import array, entropy, softmax

ENTRIES = learn.entries_of("001") | learn.entries_of("004")


def saturation() -> dict:
    return {
        "width_4": learn.jacobian_norm(learn.random_scores(4)),
        "unit": learn.jacobian_norm(learn.random_scores(1024)),
        "small": learn.jacobian_norm(learn.random_scores(1024) / 32),
    }


def variance_ratios() -> dict:
    return {
        f"ratio_{width}": float(np.var(learn.random_scores(width), ddof=1)) / width
        for width in (4, 64, 1024)
    }


def moments() -> dict:
    scores = learn.random_scores(256)
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


def largest_singular_values() -> dict:
    numbers = {}
    for factor in (1, 100, 10_000):
        p = softmax(learn.random_scores(64) * factor)
        jacobian = np.eye(16) * p[:, None] - p[:, :, None] * p[:, None]
        numbers[f"largest_{factor}"] = float(np.linalg.norm(jacobian, 2, axis=(1, 2)).max())
    assert max(numbers.values()) <= 0.5
    return numbers


def distances() -> dict:
    sums, even = np.zeros(6), 0.0
    for weights in learn.translator_weights()["encoder.2.attention"]:
        places = np.arange(weights.shape[-1])
        distance = np.abs(places[:, None] - places)
        sums += (weights * distance).sum((0, 2, 3))
        even += len(weights) * distance.mean() * len(places)
    rows = sum(w.shape[0] * w.shape[2] for w in learn.translator_weights()["encoder.2.attention"])
    return {
        "near": float(min(sums) / rows),
        "far": float(max(sums) / rows),
        "heads": 6,
        "texts": 64,
        "chance": float(even / rows),
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


COMPUTED = {
    "001-3": diversity,
    "001-3b": dict,
    "001-3e": distances,
    "001-4e": largest_singular_values,
    "001-4": saturation,
    "001-4b": variance_ratios,
    "001-4c": moments,
    "004-1c": look_ups,
    "004-4": learn.changed_source,
    "004-5": training,
}


@pytest.mark.parametrize("id", learn.runnable("001") + learn.runnable("004"))
def test_numbers_and_verdict(id: str):
    trained = set(learn.checked(ENTRIES["001-3b"]).numbers) if id == "001-3b" else set()
    learn.check_numbers(ENTRIES[id], COMPUTED, globals(), counted_elsewhere={id: trained})


def test_trained_heads_lose_by_noise_and_by_too_few_texts():
    numbers = learn.checked(ENTRIES["001-3b"]).numbers
    assert numbers["clean_many"] == pytest.approx(1 - numbers["gap_many"], abs=1e-9)
    for name in ("few", "many"):
        assert 1 / 4 < numbers[name] < numbers[f"clean_{name}"] < 1
