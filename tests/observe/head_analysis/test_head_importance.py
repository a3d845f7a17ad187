"""Importance of heads, against zeroed weights, explicit masks and differences of losses."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.head_importance import (
    IMPORTANCE_METHODS,
    ImportanceOptions,
    estimate_importance,
)
from headwise.observe.head_analysis.importance_methods import (
    HeadAblationHook,
    RepeatedForward,
    shapley_method,
)
from headwise.observe.head_analysis.objectives import MaskedTokenLoss, OutputDrift
from headwise.observe.inspect.attention_sites import find_attention
from headwise.observe.inspect.hooks import run_observed
from headwise.observe.inspect.model_inputs import prepare_inputs
from support.importance_examples import (
    BERT as OUR_BERT,
    GPT2,
    LLAMA,
    build_model,
    make_examples,
    random_ids,
    translator,
)
from support.refusals import refused_cases
from support.transformers_models import BART, BERT, GPT, TransformersModel, without_columns

MASK = 3
THEIRS = {
    "gpt2": TransformersModel("GPT2LMHeadModel", "GPT2Config", GPT, "c_proj"),
    "bert": TransformersModel("BertForMaskedLM", "BertConfig", BERT, "output.dense"),
}
SMALL = MaskedTokenLoss(mask_id=MASK)


def theirs(name: str) -> nn.Module:
    return THEIRS[name].build().double()


def asked_of(name: str) -> Any:
    return SMALL if name == "bert" else "next-token"


def loss_of(model: nn.Module, example: Example, objective: Any, number: int) -> Tensor:
    """The loss of a text, by the definition."""
    if objective == "next-token":
        text = next(iter(example.inputs.values()))
        outputs = model(text)
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return -logits[0, :-1].log_softmax(-1)[range(text.shape[1] - 1), text[0, 1:]].mean()
    question = SMALL.prepare_input(model, example, number)
    logits = model(**question.inputs.kwargs).logits[0]
    places = (question.labels != -100).nonzero().flatten()
    return -logits.log_softmax(-1)[places, question.labels[places]].mean()


def mean_of(value: Sequence[Tensor]) -> float:
    return float(torch.stack(list(value)).detach().mean())


def values(result: Any) -> np.ndarray:
    return np.array([one.value for one in result.heads])


def projections(model: nn.Module, name: str) -> list[nn.Module]:
    end = {"gpt2": "attn.c_proj", "bert": "attention.output.dense"}[name]
    return [module for path, module in model.named_modules() if path.endswith(end)]


# --- leave-one-out --------------------------------------------------------------------------------


def test_ablation_reaches_two_stacks_of_a_transformers_model():
    one = TransformersModel("BartForConditionalGeneration", "BartConfig", BART, "out_proj", "both")
    model = one.build().double()
    texts = [
        Example(
            {"input_ids": random_ids(n, 6, 67), "decoder_input_ids": random_ids(9 + n, 5, 67)}, {}
        )
        for n in range(3)
    ]
    result = estimate_importance(model, texts)
    assert result.objective == "translation"
    assert len(result.heads) == 6 * 4
    for path in ("model.encoder.layers.0.self_attn", "model.decoder.layers.1.encoder_attn"):
        other, (site,) = (
            copy.deepcopy(model),
            (site.name for site in hw.sites(model) if site.path == path),
        )
        without_columns(other, path, one.out, 2, 8)
        expected = []
        for text in texts:
            target = text.inputs["decoder_input_ids"]
            both = [each(**text.inputs).logits[0, :-1].log_softmax(-1) for each in (other, model)]
            lost = [-value[range(4), target[0, 1:]].mean() for value in both]
            expected.append(lost[0] - lost[1])
        assert result.head(site, 2).value == pytest.approx(mean_of(expected), abs=1e-12)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_leaving_out_is_a_copy_without_the_columns_in_a_model_of_ours(config: dict[str, Any]):
    net = build_model(config)
    texts = make_examples(net)
    result = estimate_importance(net, texts)
    for layer, head in itertools.product(range(2), range(3)):
        other = copy.deepcopy(net)
        with torch.no_grad():
            other.get_parameter(f"decoder.{layer}.attention.output.o")[
                :, 4 * head : 4 * head + 4
            ] = 0
        more = [
            loss_of(other, one, "next-token", 0) - loss_of(net, one, "next-token", 0)
            for one in texts
        ]
        found_ = result.head(f"decoder.{layer}.attention", head)
        assert found_.value == pytest.approx(mean_of(more), abs=1e-12)


@pytest.mark.parametrize(
    "net",
    [build_model(GPT2), build_model(OUR_BERT), translator()],
    ids=["decoder", "encoder", "both"],
)
def test_beginning_again_midway_is_the_whole_run(net: Any):
    site_modules, inputs = find_attention(net), prepare_inputs(net, make_examples(net)[0].inputs, 0)
    again = RepeatedForward(net, site_modules, inputs)
    whole = partial(run_observed, net, inputs, site_modules)
    assert torch.equal(again.baseline_outputs, whole({}))
    for one in site_modules:
        for head in range(one.site.heads):
            silent = {one.site.name: HeadAblationHook([[head]])}
            assert torch.equal(again.run_with_hooks(silent), whole(silent))
    everywhere = {one.site.name: HeadAblationHook([[0]]) for one in site_modules}
    assert torch.equal(again.run_with_hooks(everywhere), whole(everywhere))
    assert not torch.equal(again.run_with_hooks(everywhere), again.baseline_outputs)


def count_calls(model: nn.Module, end: str) -> tuple[list[str], list[Any]]:
    """Paths of modules as they run, and the handles of the hooks that record them."""
    ran, handles = list[str](), []
    for path, module in model.named_modules():
        if path.endswith(end):

            def record(*_: Any, path: str = path) -> None:
                ran.append(path)

            handles.append(module.register_forward_pre_hook(record))
    return ran, handles


def test_a_run_that_begins_midway_runs_no_layer_before():
    net = build_model(GPT2)
    again = RepeatedForward(net, find_attention(net), prepare_inputs(net, {"x": random_ids(0)}, 0))
    assert again.head_counts == {"decoder.0.attention": 3, "decoder.1.attention": 3}
    ran, _ = count_calls(net, "attention")
    again.run_with_hooks({"decoder.1.attention": HeadAblationHook([[0]])})
    assert ran == ["decoder.1.attention"]


def zero_a_head(module: nn.Module, inputs: tuple[Tensor, ...], head: int) -> tuple[Tensor]:
    z = inputs[0].clone()
    z[..., 8 * head : 8 * head + 8] = 0
    return (z,)


@pytest.mark.parametrize("name", list(THEIRS))
def test_heads_in_one_batch_are_heads_in_a_loop(name: str):
    """All heads of a layer run at once, from that layer on; a loop of hooks says what is right."""
    model, request = theirs(name), asked_of(name)
    texts = make_examples(model, 3)
    ran, handles = count_calls(model, {"gpt2": "c_attn", "bert": "query"}[name])
    result = estimate_importance(model, texts, objective=request)
    for handle in handles:
        handle.remove()
    # The unedited run, the comparison of the first and of the last layer with single runs (the
    # batch of the last one runs one layer), then each layer with those behind it.
    assert len(ran) == len(texts) * (2 + 2 * 2 + 2 + 1 + 2 + 1)
    assert not any("full forward pass" in note for note in result.notes)
    expected = []
    for projection in projections(model, name):
        for head in range(4):
            handle = projection.register_forward_pre_hook(partial(zero_a_head, head=head))
            ablated = [loss_of(model, text, request, n) for n, text in enumerate(texts)]
            handle.remove()
            whole = [loss_of(model, text, request, n) for n, text in enumerate(texts)]
            expected.append(mean_of(ablated) - mean_of(whole))
    assert values(result) == pytest.approx(np.array(expected), abs=1e-12)


class NormOverRows(nn.Module):
    """Divides by the largest value of the batch, as layers with statistics of a batch do."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max()


def test_layers_that_mix_rows_run_head_by_head():
    model: Any = theirs("gpt2")
    model.transformer.h[1].ln_1 = nn.Sequential(model.transformer.h[1].ln_1, NormOverRows())
    texts = make_examples(model, 3)
    result = estimate_importance(model, texts)
    assert any(
        note.startswith("each ablation ran alone") and "mix the rows" in note
        for note in result.notes
    )
    other = copy.deepcopy(model)
    without_columns(other, hw.sites(model)[0].path, THEIRS["gpt2"].out, 1, 8)
    lost = [
        loss_of(other, text, "next-token", n) - loss_of(model, text, "next-token", n)
        for n, text in enumerate(texts)
    ]
    assert result.head(hw.sites(model)[0].name, 1).value == pytest.approx(mean_of(lost), abs=1e-12)


# --- gradients ------------------------------------------------------------------------------------


def by_masks(model: nn.Module, name: str, text: Example, number: int, request: Any) -> list[Tensor]:
    """dL/dxi of masks xi [T, heads] written out before every projection."""
    count = next(iter(text.inputs.values())).shape[1]
    masks = [torch.ones(count, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def masked(xi: Tensor):
        return lambda _, value: (value[0] * xi.repeat_interleave(8, 1), *value[1:])

    pairs = zip(projections(model, name), masks, strict=True)
    hooks = [module.register_forward_pre_hook(masked(xi)) for module, xi in pairs]
    grads = torch.autograd.grad(loss_of(model, text, request, number), masks)
    for hook in hooks:
        hook.remove()
    return list(grads)


@pytest.mark.parametrize("name", list(THEIRS))
def test_gradient_methods_equal_explicit_masks(name: str):
    """Michel's score takes the absolute value per text, per token, or per batch."""
    model, request = theirs(name), asked_of(name)
    texts = make_examples(model, 4)
    masks = [by_masks(model, name, text, n, request) for n, text in enumerate(texts)]
    slopes = torch.stack([torch.stack([xi.sum(0) for xi in one]) for one in masks])
    sizes = torch.stack([torch.stack([xi.abs().sum(0) for xi in one]) for one in masks])
    lengths = [next(iter(text.inputs.values())).shape[1] for text in texts]
    targets = [length - 1 for length in lengths]
    if name == "bert":
        targets = [SMALL.prepare_input(model, text, n).num_targets for n, text in enumerate(texts)]
    batches = torch.zeros_like(slopes[0])
    for a, b in ((0, 1), (2, 3)):
        mean = (targets[a] * slopes[a] + targets[b] * slopes[b]) / (targets[a] + targets[b])
        batches += mean.abs()
    pairs = replace(IMPORTANCE_METHODS["michel-bertology"], batch_size=2)
    for method, expected in (
        ("michel", slopes.abs().mean(0)),
        ("taylor", -slopes.mean(0)),
        ("michel-code", sizes.sum(0) / sum(lengths)),
        (pairs, batches / sum(lengths)),
    ):
        result = estimate_importance(model, texts, method=method, objective=request)
        np.testing.assert_allclose(
            values(result), expected.flatten().numpy(), rtol=1e-9, atol=1e-14
        )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("net", [build_model(GPT2), translator()], ids=["decoder", "both"])
def test_taylor_is_the_slope_of_a_loss(net: Any):
    texts, step = make_examples(net, 2), 1e-5
    for parameter in net.parameters():
        parameter.requires_grad_(
            False
        )  # nothing of a model has to be learned for its heads to be weighed
    result = estimate_importance(net, texts, method="taylor")

    def loss(text: Example) -> float:
        target = text.inputs["x"]
        logits = net(**text.inputs)[0, :-1]
        return float(F.cross_entropy(logits, target[0, 1:]))

    for one in result.heads[::2]:
        sides = []
        for scale in (1 - step, 1 + step):
            with hw.ablate(net, [(one.site, one.head)], scale=scale):
                sides.append(np.mean([loss(text) for text in texts]))
        assert one.value == pytest.approx(-(sides[1] - sides[0]) / (2 * step), rel=1e-5, abs=1e-8)


def test_a_layers_worth_has_length_one_when_normalised():
    net = build_model(GPT2)
    plain = estimate_importance(net, make_examples(net), method="michel")
    result = estimate_importance(
        net, make_examples(net), method="michel", options=ImportanceOptions(normalisation="layer")
    )
    for layer in range(2):
        own, second = (
            [one.value for one in each.heads if one.layer == layer] for each in (plain, result)
        )
        np.testing.assert_allclose(second, np.array(own) / np.linalg.norm(own))


# --- every method ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(IMPORTANCE_METHODS))
def test_a_zero_head_scores_zero_and_the_only_active_head_most(method: str):
    net = build_model(GPT2)
    with torch.no_grad():
        for layer in range(2):
            o = net.get_parameter(f"decoder.{layer}.attention.output.o")
            o[:, : 8 if layer else 12] = 0
    texts = make_examples(net, 16 if method == "michel-bertology" else 5)
    result = estimate_importance(net, texts, method=method)
    for rated in result.heads:
        alone = (rated.layer, rated.head) == (1, 2)
        if (
            method.startswith("lrp") and not rated.layer
        ):  # a site that nothing went through has nothing to share
            assert math.isnan(rated.value)
            continue
        assert (abs(rated.value) > 1e-6) == alone, rated
        has_spread = alone and not method.startswith(
            "lrp"
        )  # its only head always has all relevance
        assert (
            math.isnan(rated.low) != has_spread
        )  # fewer than 6 texts without spread have no interval
    largest = max(result.heads[3:], key=lambda one: abs(one.value))
    assert largest.head == 2
    assert result.by_importance[-1].value <= largest.value or math.isnan(
        result.by_importance[-1].value
    )


def test_shapley_values_sum_to_the_total():
    net = build_model(GPT2)
    texts = make_examples(net)
    result = estimate_importance(net, texts, method=shapley_method(num_permutations=2))
    every = [(layer, head) for layer in range(2) for head in range(3)]
    before = mean_of([loss_of(net, one, "next-token", 0) for one in texts])
    with hw.ablate(net, every):
        after = mean_of([loss_of(net, one, "next-token", 0) for one in texts])
    assert values(result).sum() == pytest.approx(after - before, abs=1e-12)
    again = estimate_importance(net, texts, method=shapley_method(num_permutations=2))
    assert again == result
    assert (
        estimate_importance(net, texts, method=shapley_method(num_permutations=2, seed=1)) != result
    )


def test_shapley_of_many_orders_is_its_definition():
    net, texts = build_model(GPT2 | {"n_layer": 1}), make_examples(build_model(GPT2), 2)
    worth: dict[frozenset[int], float] = {}
    for count in range(4):
        for options in itertools.combinations(range(3), count):
            with hw.ablate(net, [(0, head) for head in options]):
                worth[frozenset(options)] = mean_of(
                    [loss_of(net, one, "next-token", 0) for one in texts]
                )
    expected = np.zeros(3)
    for order in itertools.permutations(range(3)):
        for place, head in enumerate(order):
            options = frozenset(order[:place])
            expected[head] += (worth[options | {head}] - worth[options]) / 6
    result = estimate_importance(net, texts, method=shapley_method(num_permutations=150))
    np.testing.assert_allclose(values(result), expected, atol=0.2 * np.abs(expected).max())


# --- intervals, chance, time ----------------------------------------------------------------------


def test_the_interval_and_the_test_are_those_of_students_t():
    net = build_model(GPT2)
    texts = make_examples(net, 7)
    result = estimate_importance(net, texts)
    means_of_two = [
        estimate_importance(net, [text, texts[n - 1]]).heads[0].value
        for n, text in enumerate(texts)
    ]
    one = np.linalg.solve(np.eye(7) + np.roll(np.eye(7), -1, 1), 2 * np.array(means_of_two))
    expected = scipy.stats.ttest_1samp(one, 0)
    interval = expected.confidence_interval(0.95)
    assert (result.heads[0].low, result.heads[0].high) == pytest.approx(
        (interval.low, interval.high), abs=1e-12
    )
    assert result.heads[0].p == pytest.approx(expected.pvalue)


class Clock:
    """A clock on which each ablation of a layer takes a second."""

    seconds = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.monotonic", lambda: self.seconds)
        run = RepeatedForward.run_ablations

        def run_ablations(*args: Any) -> Any:
            self.seconds += 1
            return run(*args)

        monkeypatch.setattr(RepeatedForward, "run_ablations", run_ablations)


def test_an_exhausted_time_limit_returns_what_was_finished(monkeypatch: pytest.MonkeyPatch):
    net, clock = build_model(GPT2), Clock(monkeypatch)
    recorded, logged = list[int](), list[str]()

    def rate(seconds: float) -> Any:
        clock.seconds = 0
        options = ImportanceOptions(max_seconds=seconds)
        texts = make_examples(net, 9)
        return estimate_importance(
            net, texts, options=options, progress=recorded.append, log=logged.append
        )

    def exact(count: int) -> list[float]:
        return values(estimate_importance(net, make_examples(net, count))).tolist()

    result = rate(6.5)  # a text takes two seconds, so the fourth is finished
    assert (result.texts, recorded) == (3, [1, 2, 3])
    limit = "at the time limit of 6.5 seconds, 2.00 s for each text"
    assert f"stopped after 3 texts {limit}" in result.notes
    assert logged[0].startswith("leave-one-out: at most ")
    assert values(result).tolist() == exact(3)
    single = rate(2.5)
    assert single.texts == 1
    assert "no confidence intervals, which need two texts" in single.notes
    assert all(math.isnan(head.low) and math.isnan(head.p) for head in single.heads)
    part = rate(0.5)
    assert {head.site for head in part.heads} == {"decoder.0.attention"}
    assert "not rated because the time was over: decoder.1.attention" in part.notes
    assert any(note.startswith("stopped in text 1 at the time limit") for note in part.notes)
    assert str(part).startswith("Transformer, a part of the heads on 1 text: importance by leave")
    assert values(part).tolist() == values(single).tolist()[:3]
    clock.seconds = 5
    monkeypatch.setattr("time.monotonic", itertools.count().__next__)
    with pytest.raises(ValueError, match="cannot rate a head within the time limit of 1 seconds"):
        estimate_importance(net, make_examples(net), options=ImportanceOptions(max_seconds=1))


def test_sampling_is_reported():
    net = build_model(GPT2)
    result = estimate_importance(
        net, make_examples(net, 9), options=ImportanceOptions(num_examples=4)
    )
    assert result.texts == 4
    assert "4 of 9 texts, sampled with seed 0" in result.notes
    assert (
        estimate_importance(net, make_examples(net, 9), options=ImportanceOptions(num_examples=4))
        == result
    )
    assert (
        estimate_importance(
            net, make_examples(net, 9), options=ImportanceOptions(num_examples=4, seed=1)
        ).heads
        != result.heads
    )


def test_texts_without_labels_are_skipped_and_counted():
    net = build_model(GPT2)
    texts = [*make_examples(net, 3), Example({"x": random_ids(0, 1)}, {})]
    result = estimate_importance(net, texts)
    assert result.texts == 3
    assert "left out 1 text without any target" in result.notes


def test_a_result_is_plain_values():
    net = build_model(GPT2)
    result = estimate_importance(net, make_examples(net), method="michel")
    assert result.data["heads"][0]["p"] is None
    assert (result.data["method"], result.data["objective"], result.data["texts"]) == (
        "michel",
        "next-token",
        5,
    )
    assert result.by_importance[0].value == values(result).max()
    assert result.heads[0].measure.value == result.heads[0].value
    with pytest.raises(
        ValueError,
        match=r"there is no head 7 of 'decoder.0.attention' here; the sites are decoder.0",
    ):
        result.head("decoder.0.attention", 7)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "reason"), refused_cases(__file__, "importance", globals()))
def test_unsupported_models_are_refused(options: dict[str, Any], reason: str):
    net = build_model(GPT2)
    with pytest.raises(ValueError, match=reason):
        estimate_importance(net, make_examples(net), **options)


def test_bad_input_is_refused():
    net = build_model(GPT2)
    for texts, reason in [
        ([], "cannot estimate importance without texts"),
        (make_examples(net, 1), "confidence intervals from 1 texts"),
        (
            [Example({"x": torch.cat([random_ids(0), random_ids(1)])}, {})] * 2,
            "an example is one text, but its inputs have 2 rows",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            estimate_importance(net, texts)
    with pytest.raises(ValueError, match="has no attention that headwise finds"):
        estimate_importance(nn.Linear(2, 2), [Example(torch.zeros(1, 2), {})])
    with pytest.raises(ValueError, match="in train mode"):
        estimate_importance(net.train(), make_examples(net))
    with pytest.raises(ValueError, match="unknown representation 'token'; did you mean"):
        OutputDrift("token")
    with pytest.raises(ValueError, match="num_examples must be an integer >= 2"):
        ImportanceOptions(num_examples=1)
    assert IMPORTANCE_METHODS["leave-one-out"].unsupported_reason(net) == ""
