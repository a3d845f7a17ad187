"""Document 002, sections 3 and 4: every number against numpy, and every verdict with an input that
changes it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn import head_variants, multi_head_code
from headwise.learn.measured_layers import make_layer, sample
from headwise.learn.translator_runs import measure_translator
from learn import learn_entries as learn
from learn.learn_entries import array, softmax

ENTRIES = learn.entries_of("002")


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
    """Heads whose classes include alignment, and the best 1 - AER of both conventions."""
    heads = [head for head in measure_translator().heads if head.site.endswith("cross")]
    scores = [head.measures[f"alignment {row}"] for head in heads for row in ("input", "target")]
    best = max(scores, key=lambda score: score.value)
    aligned = sum("alignment" in {one.name for one in head.classes} for head in heads)
    numbers = {"aligned": aligned, "heads": 18, "texts": 64}
    return numbers | {"best": best.value, "chance": best.chance}


def balance() -> dict:
    """Six rotations of one row of scores are even; one row with scores 3, 2, 1, 0, 0, 0 chooses the
    first three.
    """
    row = softmax(np.array([3.0, 2, 1, 0, 0, 0]))
    return {"even": 6 * (1 / 6) * (3 / 6), "same": float(row[:3].sum())}


REFUSED = "mask [2, 5, 12] does not broadcast to [2, 3, 5, 5]; give it one of these sizes, or 1"


COMPUTED = {
    "002-4.2d": gates_of_two_stages,
    "002-3.1": hidden_row,
    "002-3.3b": learn.masked_change,
    "002-3.3c": learn.changed_source,
    "002-3.3d": cross_alignment,
    "002-4.2c": balance,
    "002-4.3": composed_cost,
}


@pytest.mark.parametrize("id", learn.runnable("002", "34"))
def test_numbers_and_verdict(id: str):
    learn.check_numbers(
        ENTRIES[id],
        COMPUTED,
        globals(),
        counted_elsewhere={"002-4.3": {"flops"}, "002-3.2j": {"ratio"}},
    )


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
    assert [panel.title for panel in figure.panels][2:] == list(tables)
