"""Objectives: losses against other implementations, drift by its definition, and the choice of
objective.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import model_spec as bp
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.observe.head_analysis.head_importance import estimate_importance
from headwise.observe.head_analysis.objectives import (
    IGNORE_INDEX,
    OBJECTIVES,
    MaskedTokenLoss,
    OutputDrift,
    TargetLoss,
    choose_objective,
    detect_head_objective,
    get_output_tensor,
)
from support.importance_examples import (
    BERT as OUR_BERT,
    GPT2,
    build_model,
    random_ids,
    translator,
    with_uneven_attention,
)
from support.refusals import refused_cases
from support.transformers_models import BART, BERT, GPT, LLAMA, T5, WORDS, TransformersModel

THEIRS = {
    "next-token": TransformersModel("GPT2LMHeadModel", "GPT2Config", GPT, ""),
    "masked-token": TransformersModel("BertForMaskedLM", "BertConfig", BERT, ""),
    "label": TransformersModel(
        "BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 5}, ""
    ),
    "translation": TransformersModel("BartForConditionalGeneration", "BartConfig", BART, ""),
}


def text(number: int, count: int = 7, **more: Any) -> dict[str, Any]:
    return {"input_ids": random_ids(number, count, WORDS)} | more


def value(model: nn.Module, objective: Any, example: Example, number: int = 0) -> float:
    """What an objective says of a model that nobody edits."""
    question = objective.prepare_input(model, example, number)
    with torch.no_grad():
        outputs = model(*question.inputs.args, **question.inputs.kwargs)
    return float(objective.value(outputs, outputs, question))


def stream(count: int, *special: int) -> TokenAnnotations:
    """The tokens of a text, some of them special."""
    marks = torch.zeros(count, dtype=torch.bool)
    marks[list(special)] = True
    none = torch.zeros(count, dtype=torch.bool)
    return TokenAnnotations(
        torch.arange(count),
        *(("a",) * count, marks, none, none),
        torch.arange(count),
        torch.ones(count),
    )


# --- losses ---------------------------------------------------------------------------------------


def test_next_token_loss_is_transformers_own():
    model = THEIRS["next-token"].build()
    example = text(0)
    expected = float(model(**example, labels=example["input_ids"]).loss.detach())
    assert value(model, TargetLoss("next-token"), Example(example, {})) == pytest.approx(
        expected, rel=1e-5
    )


def test_masked_loss_is_transformers_own():
    model, example = (
        THEIRS["masked-token"].build(),
        Example(text(0, 20), {"text": stream(20, 0, 19)}),
    )
    objective = MaskedTokenLoss(mask_id=1)
    question = objective.prepare_input(model, example, 3)
    masked, labels = question.inputs.kwargs["input_ids"], question.labels
    assert labels is not None
    places = (labels != IGNORE_INDEX).nonzero().flatten().tolist()
    assert len(places) == 3  # 15 % of 18, special tokens aside
    assert not {0, 19} & set(places)
    assert masked[0, places].tolist() == [1, 1, 1]
    assert torch.equal(
        torch.where(labels == IGNORE_INDEX, masked[0], labels), example.inputs["input_ids"][0]
    )
    expected = float(model(input_ids=masked, labels=labels[None]).loss.detach())
    assert value(model, objective, example, 3) == pytest.approx(expected, rel=1e-5)
    again = objective.prepare_input(model, example, 3).labels
    assert again is not None
    assert torch.equal(again, labels)
    assert not torch.equal(
        objective.prepare_input(model, example, 4).inputs.kwargs["input_ids"], masked
    )


def test_label_loss_is_transformers_own():
    model, result = THEIRS["label"].build(), torch.tensor([3])
    expected = float(model(**text(0), labels=result).loss.detach())
    assert value(model, TargetLoss("label"), Example(text(0, labels=result), {})) == pytest.approx(
        expected, rel=1e-5
    )


def test_translation_loss_is_transformers_own():
    model = THEIRS["translation"].build()
    options = text(0) | {"decoder_input_ids": random_ids(1, 5, WORDS)}
    labels = torch.cat([options["decoder_input_ids"][:, 1:], torch.tensor([[IGNORE_INDEX]])], 1)
    expected = float(model(**options, labels=labels).loss.detach())
    assert value(model, TargetLoss("translation"), Example(options, {})) == pytest.approx(
        expected, rel=1e-5
    )
    ended = torch.cat([options["decoder_input_ids"][:, 1:], torch.tensor([[2]])], 1)
    expected = float(model(**options, labels=ended).loss.detach())
    assert value(
        model, TargetLoss("translation"), Example(options | {"labels": ended}, {})
    ) == pytest.approx(expected, rel=1e-5)


def test_losses_of_models_of_ours_are_their_definition():
    for net, name in ((build_model(GPT2), "next-token"), (translator(), "translation")):
        options = {"x": random_ids(0)} | (
            {"source": random_ids(1)} if name == "translation" else {}
        )
        logits = net(**options)[0].detach()
        expected = -logits[:-1].log_softmax(-1)[range(6), options["x"][0, 1:]].mean()
        assert value(net, OBJECTIVES[name], Example(options, {})) == pytest.approx(float(expected))


# --- drift ----------------------------------------------------------------------------------------


def test_drift_is_its_definition():
    draw = np.random.default_rng(0)
    new, old = draw.normal(size=(1, 5, 3)), draw.normal(size=(1, 5, 3))

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    def l2(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    expected = {
        "drift": cosine(new[0].mean(0), old[0].mean(0)),
        "drift-l2": l2(new[0].mean(0), old[0].mean(0)),
        "token-drift": np.mean([cosine(a, b) for a, b in zip(new[0], old[0], strict=True)]),
        "token-drift-l2": np.mean([l2(a, b) for a, b in zip(new[0], old[0], strict=True)]),
    }
    question = OutputDrift().prepare_input(build_model(GPT2), Example({"x": random_ids(0)}, {}), 0)
    for name, own in expected.items():
        result = OBJECTIVES[name].value(torch.from_numpy(new), torch.from_numpy(old), question)
        assert float(result) == pytest.approx(own, rel=1e-12)
        assert OBJECTIVES[name].value(
            torch.from_numpy(old), torch.from_numpy(old), question
        ) == pytest.approx(0)


def test_the_output_is_found_in_the_returned_value():
    one = torch.ones(1, 2, 3)
    model = TransformersModel("BertModel", "BertConfig", BERT, "").build()
    assert get_output_tensor(model(**text(0))).shape == (1, 7, 32)
    assert get_output_tensor(one) is one
    assert get_output_tensor((one, None)) is one
    with pytest.raises(ValueError, match="cannot find the output tensor in a int"):
        get_output_tensor(3)


# --- which is chosen ------------------------------------------------------------------------------


def test_the_objective_is_that_of_the_models_head():
    for name, one in THEIRS.items():
        assert detect_head_objective(one.build()) == name
    assert (
        detect_head_objective(
            TransformersModel("LlamaForCausalLM", "LlamaConfig", LLAMA, "").build()
        )
        == "next-token"
    )
    assert (
        detect_head_objective(
            TransformersModel("T5ForConditionalGeneration", "T5Config", T5, "").build()
        )
        == "translation"
    )
    assert (
        detect_head_objective(TransformersModel("BertModel", "BertConfig", BERT, "").build()) == ""
    )
    assert [
        detect_head_objective(net)
        for net in (build_model(GPT2), build_model(OUR_BERT), translator())
    ] == [
        "next-token",
        "masked-token",
        "translation",
    ]
    assert (
        detect_head_objective(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 1, None, False)
        )
        == ""
    )


def classifier(at: str = "mean", outputs: int = 5) -> Any:
    block = bp.BlockSpec(hw.design(model=12, heads=3), feed=bp.FeedForwardSpec(20))
    stack = bp.StackSpec.from_blocks("encoder", 12, [block], embedding=bp.EmbeddingSpec(13))
    heads = (bp.OutputHeadSpec("class", outputs, at=at),) if outputs else ()
    return with_uneven_attention(
        hw.build(bp.ModelSpec("small", "encoder", (stack,), heads), seed=0)
    )


def test_the_chosen_objective_is_reported():
    def example_with(**more: Tensor) -> Example:
        return Example({"x": random_ids(0)} | more, {})

    chosen, reason = choose_objective(build_model(GPT2), None, example_with())
    assert (chosen.name, reason) == (
        "next-token",
        "the objective is next-token loss, by the model's own head",
    )
    chosen, reason = choose_objective(classifier(), None, example_with(labels=torch.tensor([2])))
    assert chosen.name == "label"
    chosen, reason = choose_objective(classifier(), None, example_with())
    assert (chosen.name, reason) == (
        "drift",
        "the objective is drift (1 - cosine similarity of the outputs, means over tokens): "
        "the texts come without labels",
    )
    chosen, reason = choose_objective(classifier(outputs=0), None, example_with())
    assert (chosen.name, "has no head whose loss is known" in reason) == ("drift", True)
    chosen, reason = choose_objective(build_model(OUR_BERT), None, example_with())
    assert (chosen.name, "set it, as in MaskedTokenLoss(mask_id=103)" in reason) == ("drift", True)
    net = build_model(OUR_BERT)
    net.usage = hw.ProcessorSpec(mask=3)
    assert choose_objective(net, None, example_with())[0].name == "masked-token"
    assert choose_objective(net, "token-drift", example_with()) == (OutputDrift("tokens"), "")


def test_labels_of_each_token_are_a_loss():
    net = classifier("each")
    labels = torch.tensor([[0, 1, IGNORE_INDEX, 2, 4, 3, 0]])
    example = Example({"x": random_ids(0), "labels": labels}, {})
    logits = net(random_ids(0))[0].detach().log_softmax(-1)
    expected = -np.mean(
        [float(logits[t, one]) for t, one in enumerate(labels[0].tolist()) if one != IGNORE_INDEX]
    )
    assert value(net, TargetLoss("label"), example) == pytest.approx(expected)
    examples = [example, *(Example({**example.inputs, "x": random_ids(n)}, {}) for n in (1, 2))]
    result = estimate_importance(net, examples, method="michel")
    assert result.objective == "label"


@pytest.mark.parametrize(("objective", "reason"), refused_cases(__file__, "objectives", globals()))
def test_a_model_without_the_head_is_refused(objective: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        choose_objective(classifier(), objective, Example({"x": random_ids(0)}, {}))


def test_labels_that_do_not_fit_are_refused():
    net = classifier("each")
    first = Example({"x": random_ids(0), "labels": torch.tensor([[0] * 7])}, {})
    wrong = Example({"x": random_ids(0), "labels": torch.tensor([[0] * 6])}, {})
    with pytest.raises(
        ValueError, match="the model has 7 output positions but the text has 6 labels"
    ):
        estimate_importance(net, [first, wrong])
    with pytest.raises(ValueError, match="text 1 has no labels"):
        estimate_importance(net, [first, Example({"x": random_ids(0)}, {})])
    with pytest.raises(ValueError, match="label 5 is out of range: the model has 5 outputs"):
        estimate_importance(
            net, [Example({"x": random_ids(0), "labels": torch.tensor([[5] * 7])}, {})] * 2
        )
    for built in (lambda: TargetLoss("tokn"), lambda: MaskedTokenLoss(mask_fraction=0.0)):
        with pytest.raises(
            ValueError, match=r"unknown loss 'tokn'; use one of|mask_fraction must be"
        ):
            built()
