"""Document 002, sections 3 and 4: every number against numpy, and every verdict with an input that
changes it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn import head_variants, multi_head_code
from headwise.learn.measured_layers import make_layer, sample
from headwise.observe import bundled_sample
from learn import learn_entries as learn
from learn.learn_entries import array, layer_output, softmax

ENTRIES = learn.entries_of("002")
SAMPLE = json.loads(Path(bundled_sample.MEASURES).read_text())


def masked_causal_change() -> dict:
    layer, x = (
        make_layer(hw.design(model=12, heads=3, pattern="causal()")),
        array(sample(2, 1, 9, 12))[0],
    )
    other = np.concatenate([x[:5], array(sample(3, 1, 4, 12))[0]])
    allowed = np.tril(np.ones((9, 9), dtype=bool))
    change = np.abs(
        layer_output(layer, x, 3, allowed=allowed) - layer_output(layer, other, 3, allowed=allowed)
    )
    return {"before": 0.0, "after": float(change[5:].max()), "position": 5}


def changed_memory() -> dict:
    layer, x = make_layer(hw.design(model=12, heads=3)), array(sample(1, 1, 5, 12))[0]
    one, other = (
        layer_output(layer, x, 3, source=array(sample(seed, 1, 7, 12))[0]) for seed in (2, 3)
    )
    return {"shape": "5 x 12", "change": float(np.abs(one - other).max())}


def hidden_row() -> dict:
    """A row without a visible key: the listing averages all values, ours gives zeros; both then
    pass W_O.
    """
    torch.manual_seed(0)
    listing, x = multi_head_code.HarvardAttention(3, 12), array(sample(1, 2, 7, 12))
    value, output = (array(listing.linears[n].weight) for n in (2, 3))
    mean = (x[0] @ value.T + array(listing.linears[2].bias)).mean(0)
    return {"visible": 0.0, "hidden": float(np.abs(output @ mean).max())}


def gates_of_two_stages() -> dict:
    spec = hw.design(model=32, heads=8, modifiers=(hw.parts.MixtureOfHeads(always=2, active=3),))
    state, x = (
        {name: array(w) for name, w in make_layer(spec).state_dict().items()},
        array(sample(1, 9, 32)),
    )
    sums = []
    for row in x:
        kinds = 2 * softmax(state["mixture_of_heads.kind"] @ row)
        sums.append(
            2 * kinds[0] + 3 * kinds[1]
        )  # the two shared gates sum to 2, the three chosen ones to 3
    return {"difference": 0.0, "sum": float(np.mean(sums))}


def composed_cost() -> dict:
    """On scores and weights, for queries and for keys: 4 h hidden channels, two maps of 2 h x 4 h,
    and h gates.
    """
    d, h = 2560, 32
    maps = 4 * (4 * h * d + 2 * (2 * h * 4 * h) + h * d)
    qk_norms = 2 * d // h
    return {"share": (maps + qk_norms) / (4 * d * d), "identity": 0.0}


def cross_alignment() -> dict:
    """From the stored measures: heads whose classes include alignment, and the best 1 - AER of both
    conventions.
    """
    heads = [head for head in SAMPLE["heads"] if head["site"].endswith("cross")]
    scores = [head["measures"][f"alignment {row}"] for head in heads for row in ("input", "target")]
    best = max(scores, key=lambda score: score["value"])
    aligned = sum("alignment" in {one["name"] for one in head["classes"]} for head in heads)
    return {"aligned": aligned, "heads": 18, "best": best["value"], "chance": best["chance"]}


def balance() -> dict:
    """Six rotations of one row of scores are even; one row with scores 3, 2, 1, 0, 0, 0 chooses the
    first three.
    """
    row = softmax(np.array([3.0, 2, 1, 0, 0, 0]))
    return {"even": 6 * (1 / 6) * (3 / 6), "same": float(row[:3].sum())}


TALKING = '{part = "TalkingHeads", on = "scores"}'
REFUSED = "mask [2, 5, 12] does not broadcast to [2, 3, 5, 5]; give it one of these sizes, or 1"
EXPECTED = {
    "002-3.3e": lambda: {"encoder": 1, "decoder": 2, "all": 6 + 12},
    "002-4.1c": lambda: {
        "within": float(
            np.abs(array(make_layer(hw.design(model=12, heads=3)).state_dict()["output.o"])).max()
        ),
        "between": 0.0,
    },
    "002-4.2d": gates_of_two_stages,
    "002-3.1": hidden_row,
    "002-3.2": lambda: {
        "found": 6,
        "claimed": 6,
        "operations": len(hw.walk(hw.design(model=512, heads=8)).steps),
    },
    "002-3.2b": lambda: {"difference": 0.0},
    "002-3.2c": lambda: {"heads": 8, "rank": 64},
    "002-3.2d": lambda: {"difference": 0.0},
    "002-3.2f": lambda: {
        "scores": "5 x 8 x 10 x 10",
        "output": "5 x 8 x 10 x 64",
        "merged": 8 * 64,
    },
    "002-3.2g": lambda: {"contiguous": "False", "transposed": "True"},
    "002-3.2h": lambda: {"right": "2 x 5 x 12", "message": REFUSED},
    "002-3.2i": lambda: {"input": "2 x 5 x 12", "heads": "2 x 5 x 15"},
    "002-3.2j": lambda: {"difference": pytest.approx(0, abs=1e-5), "heads": 8, "products": 8},
    "002-3.3": lambda: {"difference": 0.0},
    "002-3.3b": masked_causal_change,
    "002-3.3c": changed_memory,
    "002-3.3d": cross_alignment,
    "002-4.1b": lambda: {"change": 0.0},
    "002-4.2c": balance,
    "002-4.3f": lambda: {"difference": 0.0},
    "002-4.1": lambda: {"used": 4 + 2, "own": 4, "concat": 3 * 6, "w_o": "18 x 12"},
    "002-4.2": lambda: {"extra": (8 + 2) * 512, "formula": (8 + 2) * 512, "plain": 4 * 512**2},
    "002-4.2b": lambda: {"heads": 8, "fewest": 2 + 3, "most": 2 + 3},
    "002-4.3": composed_cost,
    "002-4.3b": lambda: {"tokens": 11, "alone": 5, "mixed": 11},
    "002-4.3c": lambda: {"product": "-", "difference": 0.0},
    "002-4.3d": lambda: {"difference": pytest.approx(0, abs=1e-12), "model": 96, "rank": 16},
    "002-4.3e": lambda: {"pairs": 3 * 3, "difference": 0.0},
}
CHANGES = {
    "002-3.1": {"ours": 4},
    "002-3.2": {"heads": 4},
    "002-3.2b": {"blocks": "strided"},
    "002-3.2c": {"width": 8},
    "002-3.2d": {"transpose": False},
    "002-3.2f": {"tokens": 64},
    "002-3.2g": {"transposed": True},
    "002-3.2h": {"width": 5},
    "002-3.2i": {"with_output": False},
    "002-3.2j": {"heads": 1},
    "002-3.3": {"same": False},
    "002-3.3b": {"pattern": "full()"},
    "002-3.3c": {"cut": True},
    "002-3.3d": {"role": "attention"},
    "002-3.3e": {"model": "gpt2"},
    "002-4.1c": {"step": "attention"},
    "002-4.2d": {"stages": 1},
    "002-4.1b": {"modifiers": TALKING},
    "002-4.2c": {"collapsed": False},
    "002-4.3f": {"with_output": False},
    "002-4.1": {"overlap": 0},
    "002-4.2": {"router": "norm"},
    "002-4.2b": {"active": 6},
    "002-4.3": {"dynamic": False},
    "002-4.3b": {"mixed": False},
    "002-4.3c": {"width": 12},
    "002-4.3d": {"site": "encoder.0.attention"},
    "002-4.3e": {"pairs": False},
}


@pytest.mark.parametrize("id", EXPECTED)
def test_numbers_and_verdict(id: str):
    extra = {"002-4.3": {"flops"}, "002-3.2j": {"ratio"}}.get(id, set())
    learn.check_entry(ENTRIES[id], EXPECTED[id](), counted_elsewhere=extra)


@pytest.mark.parametrize("id", CHANGES)
def test_verdict_follows_the_input(id: str):
    learn.check_flip(ENTRIES[id], CHANGES[id])


def test_composition_adds_work_in_proportion_to_its_parameters():
    numbers = learn.checked(ENTRIES["002-4.3"]).numbers
    assert numbers["share"] < numbers["flops"] < 2 * numbers["share"]


def test_the_figure_of_the_steps_has_every_number():
    figure = learn.checked(ENTRIES["002-3.2"]).figure
    layer, x = make_layer(hw.design(model=4, heads=2)), array(sample(5, 3, 4))
    q, k, v = (x @ array(layer.state_dict()[f"project.{side}"]).T for side in "qkv")
    weights = [softmax(q[:, s] @ k[:, s].T / math.sqrt(2)) for s in (slice(0, 2), slice(2, 4))]
    heads = np.concatenate([weights[0] @ v[:, :2], weights[1] @ v[:, 2:]], 1)
    texts = [panel.texts for panel in figure.panels]
    for matrix in (x, q, *weights, heads, heads @ array(layer.state_dict()["output.o"]).T):
        assert [[f"{number:.2f}" for number in row] for row in matrix] in texts
    assert len(texts) == 2 + 2 * 3 + 2


def test_every_run_of_these_sections_is_checked():
    ids = {id for id in learn.runnable("002") if id.split("-")[1][0] in "34"}
    assert ids == set(EXPECTED) == set(CHANGES)


def test_the_figure_of_compositions_shows_which_heads_meet():
    tables = {name: np.array(rows) for name, rows in head_variants.influence_of_heads().items()}
    assert all(rows.sum(1) == pytest.approx(1) for rows in tables.values())
    assert tables["MHA"] == pytest.approx(np.eye(3))
    assert (tables["MOHSA"] > 0).tolist() == [
        [True, True, False],
        [True, True, True],
        [False, True, True],
    ]
    assert all((tables[name] > 0.05).all() for name in ("collaborative", "talking heads", "DCMHA"))
    figure = learn.checked(ENTRIES["002-4.1"]).figure
    assert [panel.title for panel in figure.panels] == list(tables)
