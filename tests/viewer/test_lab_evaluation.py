"""The Lab over several texts: its losses are those of a model with edited weights, and its intervals are over texts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.head_analysis.annotated_examples import Example
from headwise.surgery.verification.quality_metrics import measure_quality
from headwise.viewer import bundled_sample, lab_evaluation
from headwise.viewer.lab_evaluation import MAX_TEXTS, evaluate_texts
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from support.page_browser import sample_model, served

GPT = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 40, "n_positions": 64}
SITE = "decoder.1.attention"
LINES = ["one", "two", "three", "four"]


def progress() -> JobProgress:
    return JobProgress(Job("evaluate", {}))


def without_head(net: Any, head: int) -> Any:
    edited = copy.deepcopy(net)
    edited.state_dict()[f"{SITE}.output.o"][:, 4 * head : 4 * head + 4] = 0
    return edited


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> tuple[OpenModel, Any, list[Example]]:
    """A model without a tokenizer, its open ids, and the examples that the lines of a job stand for."""
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 40, (1, length), generator=generator) for length in (17, 9, 12, 20)]
    examples = [Example({"x": ids}, {}) for ids in rows]
    monkeypatch.setattr(lab_evaluation, "make_examples", lambda *_: examples)
    return OpenModel(hw.trace(net, rows[0], log=lambda _: None), net), net, examples


def rows_by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["rows"]}


def test_losses_are_those_of_a_model_with_edited_weights(gpt: tuple[OpenModel, Any, list[Example]]):
    model, net, examples = gpt
    found = evaluate_texts(model, {"heads": [[1, 2]], "texts": LINES}, progress())
    expected = measure_quality(without_head(net, 2), examples, baseline=net)
    assert found["texts"] == 4
    assert found["objective"] == "next-token"
    assert list(rows_by_name(found)) == ["loss", "perplexity", "accuracy"]
    for row in expected.data["rows"]:
        for side in ("before", "after", "change"):
            assert rows_by_name(found)[row["name"]][side] == pytest.approx(row[side], rel=1e-5, abs=1e-7), row["name"]
    assert rows_by_name(found)["loss"]["change"]["value"] != 0
    assert model.ablated == ()


def test_means_are_those_of_the_open_text(gpt: tuple[OpenModel, Any, list[Example]]):
    model, net, examples = gpt
    found = evaluate_texts(model, {"heads": [[1, 0, "mean"]], "texts": LINES}, progress())
    means = hw.head_means(net, [examples[0].model_inputs["x"]], [(SITE, 0)])
    losses, counts = [], []
    for example in examples:
        ids = example.model_inputs["x"]
        with torch.inference_mode(), hw.patch(net, means):
            logits = net(ids)[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")))
        counts.append(ids.shape[1] - 1)
    assert rows_by_name(found)["loss"]["after"]["value"] == pytest.approx(sum(losses) / sum(counts), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": [[1, 0]], "texts": ["one", " "]}, "cannot evaluate on 1 text; give 2 to 256, one a line"),
        ({"heads": [[1, 0]], "texts": ["a"] * (MAX_TEXTS + 1)}, "cannot evaluate on 257 texts"),
        ({"heads": [[1, 0]]}, "cannot evaluate on 0 texts"),
        ({"heads": [], "texts": LINES}, "no head is ablated"),
        ({"heads": [[1, 0, "resample"]], "texts": LINES}, "ablate at all tokens, by zero, mean or noise"),
        ({"heads": [[1, 0]], "texts": LINES, "tokens": {"text": [2]}}, "other texts have other tokens"),
        ({"heads": [[1, 9]], "texts": LINES}, "there is no head 9"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    gpt: tuple[OpenModel, Any, list[Example]], arguments: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        evaluate_texts(gpt[0], arguments, progress())


def test_the_page_shows_the_loss_over_an_evaluation_set(page: Any):
    model = sample_model()
    lines = list(bundled_sample.TEXTS[:4])
    expected = evaluate_texts(model, {"heads": [[2, 1]], "texts": lines}, progress())
    with served(model) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.get_by_role("link", name="Lab").click()
        page.get_by_role("switch", name="E2 H1").click()
        page.get_by_text("Evaluation set: 0 texts").click()
        page.get_by_label("Evaluation set").fill("\n".join(lines))
        page.get_by_text("Evaluation set: 4 texts").wait_for()
        page.get_by_role("button", name="Measure the loss").click()
        shown = page.get_by_test_id("evaluation")
        shown.wait_for(timeout=60_000)
        cells = shown.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
        loss = rows_by_name(expected)["loss"]
        np.testing.assert_allclose(
            [float(text) for text in cells[1:3]], [loss["before"]["value"], loss["after"]["value"]], rtol=0.05
        )
        page.get_by_role("switch", name="E2 H2").click()
        page.get_by_text("The heads have changed since").first.wait_for()
