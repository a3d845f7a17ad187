"""Edits of trained models in a study: the same numbers as the edits of surgery made by hand;
refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import examples_from_task
from headwise.studies.run_cell import ModelEdit, evaluate_edit
from headwise.studies.study_file import parse_study
from headwise.surgery.head_selection import HeadRanking, score_heads
from headwise.training.data import make_task
from headwise.training.evaluation import sum_batch_metrics
from headwise.training.recipe import Recipe
from headwise.util.errors import SpecError
from support.refusals import refused_cases

TASK = make_task("recall", vocabulary=16, length=16, pairs=2)
RECIPE = Recipe(
    steps=2, batch=4, seed=5, precision="fp32", compile="off", rows="padded", attention="fused"
)


@pytest.fixture
def net() -> hw.models.Transformer:
    model = hw.build(TASK.model(), seed=1)
    model.usage = TASK.usage
    return model.eval()


def loss(net: hw.models.Transformer) -> float:
    total, count = sum_batch_metrics(net, TASK, (RECIPE.batch, 4), "test")["loss"]
    return total / count


def test_ablated_and_pruned_heads_are_rows_of_zeros(net: hw.models.Transformer, tmp_path: Path):
    """Both edits remove the same heads; the truth zeroes their columns of the output projection."""
    edits = [ModelEdit("ablate", share=0.5), ModelEdit("prune", share=0.5)]
    ablated, pruned = (evaluate_edit(net, TASK, RECIPE, edit, tmp_path) for edit in edits)
    scores = score_heads(net, [], HeadRanking("random", seed=RECIPE.seed)).scores
    by_hand = hw.build(TASK.model(), seed=1).eval()
    width = 64 // 4
    with torch.no_grad():
        for site, head in sorted(scores, key=lambda one: scores[one])[:4]:
            matrix = dict(by_hand.named_parameters())[f"{site}.output.o"]
            matrix[:, head * width : (head + 1) * width] = 0
    expected = loss(by_hand)
    assert expected != pytest.approx(loss(net), rel=1e-4)
    assert evaluate_edit(net, TASK, RECIPE, ModelEdit("ablate", count=4), tmp_path) == ablated
    assert ablated["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert pruned["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert ablated["parameters"] == sum(one.numel() for one in net.parameters())
    assert pruned["parameters"] == ablated["parameters"] - 4 * 4 * 64 * width


def test_conversion_and_training_after_it(net: hw.models.Transformer, tmp_path: Path):
    pooled = evaluate_edit(net, TASK, RECIPE, ModelEdit("convert", kv=1), tmp_path)
    assert pooled["metrics"]["loss"] == pytest.approx(
        loss(hw.convert(net, 1).after.eval()), rel=1e-6
    )
    trained = evaluate_edit(
        net, TASK, RECIPE, ModelEdit("convert", kv=1, steps=3), tmp_path / "kv1"
    )
    again = evaluate_edit(
        net, TASK, RECIPE, ModelEdit("convert", kv=1, steps=3), tmp_path / "again"
    )
    assert trained["metrics"]["loss"] != pooled["metrics"]["loss"]
    assert trained == again


@pytest.mark.parametrize(("values", "words"), refused_cases(__file__, "model edits", globals()))
def test_refusals(values: Any, words: str):
    table = {
        "hypothesis": "x",
        "variants": {"mha": {}},
        "tasks": {"recall": {}},
        "edits": {"e": values},
    }
    with pytest.raises(SpecError, match=words):
        parse_study(table, "t", "small", {})


def test_a_scale_leaves_out_what_it_sets_to_false():
    table: dict[str, Any] = {
        "hypothesis": "x",
        "variants": {"mha": {}, "gqa": {}},
        "tasks": {"recall": {}, "copy": {}},
    }
    table["edits"] = {"half": {"change": "ablate", "share": 0.5}}
    table["scales"] = {
        "page": {"tasks": {"copy": False}, "variants": {"gqa": False}, "edits": {"half": False}}
    }
    study = parse_study(table, "t", "page", {})
    assert not study.edits
    assert (list(study.variants), list(study.tasks)) == (["mha"], ["recall"])
    assert list(parse_study(table, "t", "small", {}).tasks) == ["recall", "copy"]


@pytest.mark.parametrize("change", ["ablate", "prune"])
def test_an_edit_changes_only_heads_of_its_sites(
    net: hw.models.Transformer, tmp_path: Path, change: str
):
    edit = ModelEdit(change, share=0.5, sites="decoder.1", ranking="michel", texts=8)
    found = evaluate_edit(net, TASK, RECIPE, edit, tmp_path)["metrics"]["loss"]
    examples = examples_from_task(net, TASK, 8).examples
    scores = score_heads(net, examples, HeadRanking("michel", seed=RECIPE.seed)).scores
    own = sorted((one for one in scores if one[0] == "decoder.1.attention"), key=scores.get)
    with hw.ablate(net, own[:2], "zero"):
        assert found == pytest.approx(loss(net), rel=1e-5)
    assert found != pytest.approx(loss(net), rel=1e-3)
