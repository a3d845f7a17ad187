"""Checks of the Lab: a copy without the ablated heads, the continued text, and the losses over
several texts.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.surgery.attention_replacement import remove_heads
from headwise.surgery.verification.quality_metrics import measure_quality
from headwise.viewer import lab_actions
from headwise.viewer.lab_actions import (
    MAX_TEXTS,  # noqa: F401 - used in refused.txt
    Ablation,
    LabRuns,
    check_by_removal,
    compute_effect,
    continue_text,
    evaluate_texts,
)
from headwise.viewer.open_model import AblatedHead, OpenModel
from support.refusals import refused_cases
from viewer.page_browser import sample_model
from viewer.page_models import GPT, progress

SITE = "decoder.1.attention"


@pytest.fixture
def gpt() -> tuple[OpenModel, Any, torch.Tensor]:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if "attention" in name:
                tensor.mul_(4)  # heads that change what is written
    ids = torch.randint(0, 40, (1, 11), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids), net), net, ids


def without_heads(net: Any, site: str, heads: list[int]) -> Any:
    """A copy whose output projection ignores some heads of four channels."""
    edited = copy.deepcopy(net)
    for head in heads:
        edited.state_dict()[f"{site}.output.o"][:, 4 * head : 4 * head + 4] = 0
    return edited


def test_the_outputs_are_those_of_a_model_without_the_weights(gpt):
    model, net, ids = gpt
    found = compute_effect(model, {"heads": [[1, 0], [1, 2]]}, progress())["check"]
    with torch.inference_mode():
        largest = without_heads(net, SITE, [0, 2])(ids).abs().max().item()
    assert found["possible"]
    assert found["same"]
    assert found["largest"] == pytest.approx(largest, rel=1e-5)
    assert 0 <= found["apart"] <= found["allowed"] < 1e-2


def test_a_wrong_ablation_is_found(gpt: tuple[OpenModel, Any, torch.Tensor]):
    model, net, ids = gpt
    heads, runs = [AblatedHead(SITE, 1, "zero", 0.0)], LabRuns(model)
    wrong = runs.without(Ablation([AblatedHead(SITE, 2, "zero", 0.0)]))
    found = check_by_removal(model, Ablation(heads), wrong)
    with torch.inference_mode():
        apart = (
            (without_heads(net, SITE, [1])(ids) - without_heads(net, SITE, [2])(ids))
            .abs()
            .max()
            .item()
        )
    assert not found["same"]
    assert found["apart"] == pytest.approx(apart, rel=1e-3)


def test_a_wrong_head_of_16_bits_is_found_in_float32(gpt, monkeypatch):
    _, net, ids = gpt
    half = copy.deepcopy(net).bfloat16()
    with torch.no_grad():
        half.state_dict()[f"{SITE}.output.o"].mul_(
            1e-3
        )  # so that no head matters beyond the rounding of 16 bits
    model = OpenModel(hw.trace(half, ids), half)
    right = compute_effect(model, {"heads": [[1, 0]]}, progress())["check"]
    assert (right["dtype"], right["same"]) == ("float32", True)
    monkeypatch.setattr(
        "headwise.surgery.attention_replacement.remove_heads",
        lambda net, keep: remove_heads(net, {SITE: [0, 1, 2]}),
    )
    wrong = compute_effect(model, {"heads": [[1, 0]]}, progress())["check"]
    assert (wrong["dtype"], wrong["same"]) == ("float32", False)


def test_other_ablations_say_why_they_are_not_checked(gpt: tuple[OpenModel, Any, torch.Tensor]):
    model = gpt[0]
    for arguments in ({"heads": [[1, 0, "mean"]]}, {"heads": [[1, 0]], "tokens": {"text": [2]}}):
        found = compute_effect(model, arguments, progress())["check"]
        assert found == {"possible": False, "reason": found["reason"]}
        assert "equals zero ablation at all tokens" in found["reason"]


def greedy(net: Any, ids: torch.Tensor, count: int) -> list[str]:
    """Greedy decoding by whole passes, without a cache."""
    row = ids
    with torch.inference_mode():
        for _ in range(count):
            row = torch.cat([row, net(row)[:, -1:].argmax(-1)], 1)
    return [str(token) for token in row[0, ids.shape[1] :].tolist()]


def test_the_text_goes_on_as_in_a_model_with_edited_weights(gpt):
    model, net, ids = gpt
    found = continue_text(model, {"heads": [[1, 0], [1, 1], [1, 2]]}, progress())
    assert found["before"] == greedy(net, ids, len(found["before"]))
    assert found["after"] == greedy(without_heads(net, SITE, [0, 1, 2]), ids, len(found["after"]))
    assert found["before"] != found["after"]
    assert len(found["before"]) > 8
    assert model.revision == 0


def test_a_translation_is_written_again_without_a_head():
    model = sample_model()
    found = continue_text(model, {"heads": [[2, head] for head in range(6)]}, progress())
    written = list(model.get_trace().streams["text"][0].words[1:])
    assert found["before"][: len(written)] == written
    assert found["after"] != found["before"]


LINES = ["one", "two", "three", "four"]


@pytest.fixture
def model_of_lines(monkeypatch: pytest.MonkeyPatch) -> tuple[OpenModel, Any, list[Example]]:
    """A model without a tokenizer, its open ids, and the examples that the lines of a job stand
    for.
    """
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 40, (1, length), generator=generator) for length in (17, 9, 12, 20)]
    examples = [Example({"x": ids}, {}) for ids in rows]
    monkeypatch.setattr(lab_actions, "make_examples", lambda *_: examples)
    return OpenModel(hw.trace(net, rows[0]), net), net, examples


def rows_by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["rows"]}


def test_losses_are_those_of_a_model_with_edited_weights(model_of_lines):
    model, net, examples = model_of_lines
    found = evaluate_texts(model, {"heads": [[1, 2]], "texts": LINES}, progress())
    expected = measure_quality(without_heads(net, SITE, [2]), examples, baseline=net)
    assert found["texts"] == 4
    assert found["objective"] == "next-token"
    assert list(rows_by_name(found)) == ["loss", "perplexity", "accuracy"]
    for row in expected.data["rows"]:
        for side in ("before", "after", "change"):
            for name, number in row[side].items():
                actual = rows_by_name(found)[row["name"]][side][name]
                if number is None:
                    assert actual is None, (row["name"], name)
                else:
                    assert actual == pytest.approx(number, rel=1e-5, abs=1e-7, nan_ok=True)
    assert rows_by_name(found)["loss"]["change"]["value"] != 0
    assert model.revision == 0


def test_means_are_those_of_the_open_text(model_of_lines: tuple[OpenModel, Any, list[Example]]):
    model, net, examples = model_of_lines
    found = evaluate_texts(model, {"heads": [[1, 0, "mean"]], "texts": LINES}, progress())
    means = hw.head_means(net, [examples[0].model_inputs["x"]], [(SITE, 0)])
    losses, counts = [], []
    for example in examples:
        ids = example.model_inputs["x"]
        with torch.inference_mode(), hw.patch(net, means):
            logits = net(ids)[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")))
        counts.append(ids.shape[1] - 1)
    assert rows_by_name(found)["loss"]["after"]["value"] == pytest.approx(
        sum(losses) / sum(counts), rel=1e-5
    )


@pytest.mark.parametrize(("arguments", "message"), refused_cases(__file__, "checks", globals()))
def test_what_cannot_be_evaluated_is_refused(model_of_lines, arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate_texts(model_of_lines[0], arguments, progress())
