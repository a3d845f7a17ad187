"""Quality metrics against double-precision implementations written here, and bootstrap intervals by
hand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.objectives import MaskedTokenLoss, OutputDrift
from headwise.surgery.attention_replacement import remove_heads
from headwise.surgery.verification.quality_metrics import (
    SCORING_BATCH_SIZE,
    IntervalEstimate,
    MetricRow,
    TextCounts,
    TranslationPair,
    _jackknife_bleu,
    build_metric_row,
    compare_task_scores,
    compare_translated_texts,
    describe_change,
    measure_quality,
)
from headwise.training.data import make_task
from headwise.training.data.translation import make_bleu, score_translations
from support.pruned_models import KEEP, KINDS, build_model, make_examples, make_model_spec


def rendered(net, ids):
    """log p of every next token of one text, by the definition, of a decoder of
    plain attentions.
    """
    tensors = {name: tensor.double() for name, tensor in net.state_dict().items()}
    x = tensors["decoder.embedding.tokens"][ids]
    count = len(ids)
    for depth in range(2):
        own = {name.removeprefix(f"decoder.{depth}."): t for name, t in tensors.items()}
        z = F.layer_norm(x, (24,), own["attention_norm.weight"], own["attention_norm.bias"])
        q, k, v = (own[f"attention.project.{name}"].reshape(-1, 6, 24) for name in "qkv")
        y = torch.zeros_like(x)
        for head in range(4):
            result, keys, values = z @ q[head].T, z @ k[head // 2].T, z @ v[head // 2].T
            for t in range(count):
                scores = result[t] @ keys[: t + 1].T / math.sqrt(6)
                actual = scores.softmax(0) @ values[: t + 1]
                y[t] += own["attention.output.o"].reshape(24, 4, 6)[:, head] @ actual
        x = x + y
        z = F.layer_norm(x, (24,), own["feed_norm.weight"], own["feed_norm.bias"])
        x = x + F.gelu(z @ own["feed.up"].T) @ own["feed.down"].T
    x = F.layer_norm(x, (24,), tensors["decoder.norm.weight"], tensors["decoder.norm.bias"])
    return (x @ tensors["head.tokens.weight"].T).log_softmax(-1)[:-1]


def test_perplexity_is_that_of_the_definition_over_all_places_together():
    net, texts = build_model(make_model_spec("decoder", modifiers=())), make_examples("decoder", 5)
    losses, right = [], []
    for one in texts:
        ids = one.inputs["x"][0]
        result = rendered(net, ids)
        losses += (-result[torch.arange(len(ids) - 1), ids[1:]]).tolist()
        right += (result.argmax(-1) == ids[1:]).tolist()
    found = measure_quality(net, texts)
    assert found.num_positions == len(losses)
    assert found.row("loss").after.value == pytest.approx(sum(losses) / len(losses), abs=2e-6)
    assert found.row("perplexity").after.value == pytest.approx(
        math.exp(sum(losses) / len(losses)), rel=2e-6
    )
    assert found.row("accuracy").after.value == sum(right) / len(right)
    assert (
        found.row("loss").after.low < found.row("loss").after.value < found.row("loss").after.high
    )


def test_an_interval_is_students_t_over_texts():
    totals = np.array([5.0, 9.0, 6.0, 8.0])
    expected = scipy.stats.ttest_1samp(totals / 2, 0).confidence_interval(0.95)
    row = build_metric_row(
        "loss", "loss", ([TextCounts({"loss": total}, 2) for total in totals], None)
    )
    assert row.after == pytest.approx((3.5, expected.low, expected.high))
    curved = build_metric_row(
        "perplexity", "loss", ([TextCounts({"loss": total}, 2) for total in totals], None), np.exp
    )
    assert curved.after == pytest.approx(np.exp(row.after))


def test_a_difference_is_that_of_the_same_texts():
    totals = (3.0, 9.0, 1.0, 8.0, 2.0, 5.0)
    before = [TextCounts({"loss": total * 2}, 2) for total in totals]
    after = [TextCounts({"loss": total * 2 + 1 + total / 50}, 2) for total in totals]
    row = build_metric_row("loss", "loss", (after, before))
    assert row.change.value == pytest.approx(0.5 + sum(totals) / 600)
    assert row.before.high - row.before.low > 1  # each alone is uncertain, their difference is not
    assert describe_change(row) == "worse"
    assert describe_change(row._replace(better="higher")) == "better"
    assert describe_change(row._replace(change=None)) == "not compared"


@pytest.mark.parametrize(
    ("shift", "count", "verdict"),
    [
        (0.5, 5, "undecided, too few texts"),
        (0.5, 6, "worse"),
        (1e-8, 5, "no difference shown"),
        (1e-8, 9, "no difference shown"),
    ],
)
def test_equal_changes_of_few_texts_decide_nothing(shift: float, count: int, verdict: str):
    before = [TextCounts({"loss": 2.0 + n}, 1) for n in range(count)]
    after = [TextCounts({"loss": 2.0 + n + shift}, 1) for n in range(count)]
    assert describe_change(build_metric_row("loss", "loss", (after, before))) == verdict


def estimate(value: float) -> IntervalEstimate:
    return IntervalEstimate(value, value, value)


@pytest.mark.parametrize(
    ("before", "after", "change", "verdict"),
    [
        (69.0, 0.0, (-69.0, -100.0, 0.0), "undecided, too few texts"),
        (69.0, 0.0, (-69.0, -90.0, -40.0), "worse"),
        (69.0, 68.0, (-1.0, -4.0, 2.0), "no difference shown"),
        (69.0, 68.0, (-1.0, -9.0, 2.0), "undecided, too few texts"),
        (0.0, 0.0, (0.0, 0.0, 0.0), "no difference shown"),
        (0.0, 0.4, (0.4, 0.0, 0.8), "undecided, too few texts"),
        (math.nan, 0.4, (math.nan,) * 3, "not compared"),
    ],
)
def test_no_difference_is_shown_by_narrow_intervals_alone(before, after, change, verdict):
    row = MetricRow("BLEU", "higher", estimate(after), estimate(before), IntervalEstimate(*change))
    assert describe_change(row) == verdict


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_a_fall_to_nothing_is_never_no_difference(count: int):
    """Half of the texts are right before, none is after: at any number of texts."""
    right = [TextCounts({"exact_match": float(n % 2)}, 1) for n in range(count)]
    none = [TextCounts({"exact_match": 0.0}, 1) for _ in range(count)]
    row = build_metric_row("exact_match", "exact_match", (none, right))
    assert row.change is not None
    assert describe_change(row) == ("worse" if row.change.high < 0 else "undecided, too few texts")


def test_masked_tokens_are_predicted_one_at_a_time():
    net, texts = build_model(make_model_spec("encoder")), make_examples("encoder", 6)
    chosen = MaskedTokenLoss(mask_id=1, mask_fraction=0.4)
    right = request = 0
    for number, one in enumerate(texts):
        question = chosen.prepare_input(net, one, number)
        outputs = net(question.inputs.kwargs["x"])[0]
        for place, label in enumerate(question.labels.tolist()):
            if label >= 0:
                request += 1
                right += int(outputs[place].argmax()) == label
    found = measure_quality(net, texts, chosen)
    assert (found.num_positions, found.row("accuracy").after.value) == (request, right / request)
    assert request > len(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_measured_by_its_own_head_before_and_after(kind):
    net = build_model(make_model_spec(kind))
    net.usage = hw.ProcessorSpec(mask=1) if kind == "encoder" else net.usage
    found = measure_quality(remove_heads(net, KEEP[kind]), make_examples(kind), baseline=net)
    names = {
        "decoder": "next-token",
        "encoder": "masked-token",
        "encoder-decoder": "translation",
        "vision": "label",
    }
    assert found.objective == names[kind]
    assert [row.name for row in found.rows] == [
        "loss",
        *(["perplexity"] if kind != "vision" else []),
        "accuracy",
    ]
    for row in found.rows:
        assert row.change.value == pytest.approx(row.after.value - row.before.value)
        assert row.change.low <= row.change.value <= row.change.high
    alone = measure_quality(net, make_examples(kind))
    assert [row.after for row in alone.rows] == [row.before for row in found.rows]


def test_a_model_without_a_known_head_is_measured_by_drift():
    net = build_model(replace(make_model_spec("encoder"), heads=()))
    after = remove_heads(net, KEEP["encoder"])
    found = measure_quality(after, make_examples("encoder"), baseline=net)
    (row,) = found.rows
    assert (found.objective, row.name, row.before) == ("drift", "drift", None)
    assert row.after.value > 0.001
    assert "drift" in found.notes[0]
    far = [
        1 - F.cosine_similarity(after(one.inputs["x"]).mean(1), net(one.inputs["x"]).mean(1)).item()
        for one in make_examples("encoder")
    ]
    assert row.after.value == pytest.approx(sum(far) / len(far), abs=1e-5)
    with pytest.raises(
        ValueError, match="drift is the distance from another model; give baseline="
    ):
        measure_quality(net, make_examples("encoder"), OutputDrift())


def test_too_few_texts_give_no_interval_and_skipped_texts_are_counted():
    net, texts = build_model(make_model_spec("decoder")), make_examples("decoder")
    for few in ([], texts[:1]):
        with pytest.raises(ValueError, match="at least 2"):
            measure_quality(net, few)
    short = Example({"x": torch.tensor([[3]])}, {})
    with pytest.raises(
        ValueError, match="cannot compute a confidence interval over 1 texts with targets"
    ):
        measure_quality(net, [texts[0], short])
    found = measure_quality(net, [*texts, short])
    assert found.texts == len(texts)
    assert "left out 1 text without targets" in found.notes


def test_numbers_that_are_not_finite_are_refused():
    net = build_model(make_model_spec("decoder"))
    with torch.no_grad():
        net.get_parameter("head.tokens.weight")[3] = math.inf
    with pytest.raises(ValueError, match="produced NaN or inf"):
        measure_quality(net, make_examples("decoder"))


def test_bleu_is_that_of_sacrebleu_with_all_pairs_and_without_each():
    result = [
        "the cat sat on the mat",
        "a dog ran in the big park",
        "he likes green tea very much",
        "it is a cold day",
    ]
    expected = [
        "the cat sat on a mat",
        "a dog ran in the park",
        "she likes black tea very much",
        "it was a cold day",
    ]
    found = _jackknife_bleu(make_bleu("13a", effective_order=True), result, expected)
    assert found.value == pytest.approx(score_translations(result, expected).bleu)
    for number, one in enumerate(found.without):
        some = [n for n in range(4) if n != number]
        assert one == pytest.approx(
            score_translations([result[n] for n in some], [expected[n] for n in some]).bleu
        )


def translation_pairs(*references: str) -> list[TranslationPair]:
    return [TranslationPair((), reference) for reference in references]


def test_answers_of_one_word_have_no_bleu():
    pairs = translation_pairs("yes", "no", "two words", "no")
    before, after = [pair.target for pair in pairs], ["yes", "", "two", "yes"]
    row, note = compare_translated_texts(before, after, pairs)
    assert (row.name, row.after.value) == ("exact_match", 0.25)
    assert row.before is not None
    assert row.before.value == 1
    assert 0 <= row.after.low <= row.after.high <= 1
    assert note == "BLEU is not computed: only 0 of 4 references have 4 tokens"


def test_bleu_of_chinese_counts_characters():
    """Without spaces, a sentence would be one token, and BLEU of all but equal sentences 0."""
    pairs = translation_pairs("一个男人在街上走路", "一只狗在草地上奔跑", "两个孩子在玩足球")
    texts = ["一个男人在路上走路", "一只狗在草地上跑", "两个孩子在踢足球"]
    row, note = compare_translated_texts([pair.target for pair in pairs], texts, pairs)
    assert (row.name, note) == ("BLEU", "")
    assert row.before is not None
    assert row.before.value == pytest.approx(100)
    assert 30 < row.after.value < 90
    assert 0 <= row.after.low <= row.after.value <= row.after.high <= 100
    assert row.after.value == pytest.approx(
        score_translations(texts, [pair.target for pair in pairs], "zh").bleu
    )


def test_a_task_scores_every_example_as_it_scores_all():
    recall = make_task("recall")
    net = hw.build(recall.model(), seed=0).eval()
    batch = recall.batch(0, SCORING_BATCH_SIZE, "valid").rows(slice(0, 9))
    with torch.no_grad():
        outputs = net(batch.x, sequence=batch.tokens)
    total, count = recall.measure(outputs, batch)["accuracy"]
    row: Any = next(
        row for row in compare_task_scores(net, net, recall, 9) if row.name == "accuracy"
    )
    assert row.after.value == total / count
    assert row.change == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="interval over 1 examples of recall"):
        compare_task_scores(net, net, recall, 1)
