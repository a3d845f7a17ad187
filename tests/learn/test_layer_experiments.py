"""Runs of layer_experiments: every number against numpy or a formula written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

import headwise as hw
from headwise.costs.published_article import list_gpt3_rows, list_llama_rows
from headwise.learn import catalogue
from headwise.learn.measured_layers import make_layer, sample
from learn import learn_entries as learn
from learn.learn_entries import array, layer_output, softmax

ENTRIES = {entry.id: entry for entry in catalogue.load_entries()}
RUNS = [id for id, entry in ENTRIES.items() if learn.module_of(entry) == "layer_experiments"]


def wanted_weights() -> dict:
    """exp(6) / (m exp(6) + n - m) for a head that looks for m of 4 keys among n."""
    return {
        f"h{heads}_{tokens}": math.exp(6) / (4 / heads * (math.exp(6) - 1) + tokens)
        for heads in (1, 2, 4)
        for tokens in (16, 4096)
    }


def lost_energy() -> dict:
    state = make_layer(hw.design(model=12, heads=1)).state_dict()
    circuit = array(state["project.q"]).T @ array(state["project.k"])
    values = np.linalg.svd(circuit, compute_uv=False) ** 2
    return {"difference": 0.0, "lost": float(values[4:].sum() / values.sum())}


def rows_of_the_article() -> dict:
    rows = [*list_gpt3_rows(), *list_llama_rows()]
    days = 1.4e12 * 65e9 * 8 / (2048 * 624e12 * 0.3) / 86400
    width, layers = 12288, 96
    norms_and_biases = layers * 13 * width + 2 * width
    tables = (50257 + 2048) * width
    return {
        "close": sum(0.99 < row.headwise / row.article < 1.01 for row in rows),
        "rows": 10,
        "parameters": 12 * layers * width**2 + norms_and_biases + tables,
        "article": days,
        "headwise": pytest.approx(43.3, abs=0.05),
    }


def relu_layers() -> dict:
    """Four stacks of 16 layers, from the definition of attention with one head."""
    numbers = {}
    for name, skip, feed in (
        ("alone", 0, 0),
        ("skip", 1, 0),
        ("feed", 0, 1),
        ("both", 1, 1),
    ):
        x = array(sample(0, 32, 64))
        for layer in range(1, 17):
            own = make_layer(hw.design(model=64, heads=1), seed=layer)
            x = skip * x + layer_output(own, x, 1)
            if feed:
                up, down = (array(sample(100 * layer + n, 64, 64)) / 8 for n in (0, 1))
                x = skip * x + math.sqrt(2) * np.maximum(x @ up, 0) @ down
        apart = x - x.mean(0)
        numbers[name] = float(np.linalg.norm(apart) / np.linalg.norm(x))
    return {name: pytest.approx(value, rel=1e-6, abs=1e-12) for name, value in numbers.items()}


def balance_of_routing() -> dict:
    spec = hw.design(model=32, heads=8, modifiers=(hw.parts.MixtureOfHeads(always=2, active=3),))
    router = array(make_layer(spec).state_dict()["mixture_of_heads.router"])
    tokens = array(sample(1, 4, 9, 32)).reshape(36, 32)
    probabilities = softmax(tokens @ router.T)
    order = probabilities.argsort(-1)[:, ::-1][:, :3]
    fraction = np.bincount(order.ravel(), minlength=6) / 36
    balance = float((probabilities.mean(0) * fraction).sum())
    return {"balance": balance, "added": 0.01 * balance, "difference": 0.0}


def composed_outputs() -> dict:
    """The largest change by composition, from the weights of each pair of tokens."""
    part = hw.parts.DynamicComposition(on="weights", static="full")
    state = make_layer(hw.design(model=12, heads=3, modifiers=(part,))).state_dict()
    own = {name.rpartition(".")[2]: array(one) for name, one in state.items()}
    x = array(sample(1, 7, 12))
    q, k, v = ((x @ own[side].T).reshape(7, 3, 4) for side in "qkv")
    weights = softmax(np.einsum("thd,shd->hts", q, k) / 2)

    def factors(side: str, token: np.ndarray) -> np.ndarray:
        hidden = own[f"{side}_hidden"] @ token
        hidden = hidden * 0.5 * (1 + np.array([math.erf(one / math.sqrt(2)) for one in hidden]))
        source = (own[f"{side}_source"] @ hidden).reshape(2, 3)
        source /= np.sqrt((source**2).mean(1, keepdims=True) + 1e-6)
        target = (own[f"{side}_target"] @ hidden).reshape(2, 3)
        return source.T @ target + np.diag(np.tanh(own[f"{side}_gate"] @ token))

    changed = np.zeros((7, 3, 4))
    for t in range(7):
        for s in range(7):
            extra = factors("query", x[t]) + factors("key", x[s]) + own["static"]
            changed[t] += (weights[:, t, s] @ extra)[:, None] * v[s]
    return {"difference": 0.0, "rank": 2, "changed": float(np.abs(changed).max())}


COMPUTED = {
    "000-0d": wanted_weights,
    "000-1.1c": lambda: {
        "query_weights": 1,
        "query_outputs": 1,
        "key_weights": 5,
        "value_weights": 0,
        "value_outputs": 5,
    },
    "000-2": rows_of_the_article,
    "002-1.1b": wanted_weights,
    "002-2.2f": lost_energy,
    "002-4.2f": balance_of_routing,
    "002-4.3g": composed_outputs,
    "002-FF.1c": relu_layers,
    "002-FF.10": lambda: {"difference": 0.0, "merged": 4 * 12**2, "both": 8 * 12**2},
}


def test_every_run_is_computed_here():
    assert set(RUNS) == set(COMPUTED) | {"003-5.2g"}


@pytest.mark.parametrize("id", sorted(COMPUTED))
def test_numbers(id: str):
    learn.check_entry(ENTRIES[id], COMPUTED[id]())


def positions_written_out(kind: str, positions: np.ndarray) -> np.ndarray:
    """Outputs of a layer of 2 heads of 8 channels, with biases or turned queries and keys."""
    part = {"sinusoids": ()}.get(kind, (getattr(hw.parts, kind)(),) if kind != "sinusoids" else ())
    layer = make_layer(hw.design(model=16, heads=2, modifiers=part))
    state = {name: array(one) for name, one in layer.state_dict().items()}
    x = array(sample(1, 9, 16))
    if kind == "sinusoids":
        angles = positions[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16)
        x = x + np.stack([np.sin(angles), np.cos(angles)], -1).reshape(9, 16)
    q, k, v = ((x @ state[f"project.{side}"].T).reshape(9, 2, 8) for side in "qkv")
    distance = positions[:, None] - positions  # of the query from the key
    if kind == "Rotary":
        angles = positions[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
        turn = np.exp(1j * angles)[:, None]

        def turned(z: np.ndarray) -> np.ndarray:
            return (z[..., :4] + 1j * z[..., 4:]) * turn

        scores = np.einsum("thd,shd->hts", turned(q), turned(k).conj()).real / math.sqrt(8)
    else:
        scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(8)
    if kind == "Alibi":
        slopes = state["alibi.slope"].reshape(-1)
        scores = scores - slopes[:, None, None] * np.abs(distance)
    outputs = np.einsum("hts,shd->thd", softmax(scores), v).reshape(9, 16)
    return outputs @ state["output.o"].T


@pytest.mark.parametrize("kind", ["Alibi", "Rotary", "sinusoids"])
def test_positions_against_their_formulas(kind: str):
    numbers = learn.checked(ENTRIES["003-5.2g"]).numbers
    before, moved, stretched = (
        positions_written_out(kind, places)
        for places in (np.arange(9), np.arange(100, 109), 10 * np.arange(9))
    )
    found = [numbers[f"{kind.lower()}_{what}"] for what in ("moved", "used")]
    assert found[0] == pytest.approx(np.abs(before - moved).max(), abs=1e-9)
    assert found[1] == pytest.approx(np.abs(before - stretched).max(), rel=1e-6)


def test_tables_of_distances_are_relative_and_used():
    result = learn.checked(ENTRIES["003-5.2g"])
    assert result.verdict == "holds"
    for kind in ("t5bias", "shaw"):
        moved, used = (float(result.numbers[f"{kind}_{what}"]) for what in ("moved", "used"))
        assert moved < 1e-12 < 0.1 < used
    assert "PositionSpec('learned', 10)" in result.reason_en
