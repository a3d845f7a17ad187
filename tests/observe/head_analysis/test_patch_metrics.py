"""Measures of heads over image patches, against float64 loops, and the classes of heads built by
hand.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.head_measurement import MeasureOptions
from headwise.observe.head_analysis.head_metrics import IMAGE_METRICS, PATCH_METRICS
from headwise.observe.head_analysis.image_examples import PatchLayout
from headwise.observe.head_analysis.weight_bands import WeightBand

ROWS, COLUMNS, OTHERS = 3, 5, 2
COUNT = ROWS * COLUMNS + OTHERS
TOKENS = PatchLayout(ROWS, COLUMNS, (12, 20), 3).annotate(OTHERS)


def place(token: int) -> tuple[int, int] | None:
    """Row and column of a token, or None if it is no patch."""
    return None if token < OTHERS else divmod(token - OTHERS, COLUMNS)


RELATIONS = {
    "same_patch": lambda rows, columns: rows == columns == 0,
    "neighbours": lambda rows, columns: max(abs(rows), abs(columns)) == 1,
    "same_row": lambda rows, columns: rows == 0 and columns != 0,
    "same_column": lambda rows, columns: columns == 0 and rows != 0,
}


def reference(name: str, weights: Tensor, allowed: Tensor) -> tuple[float, int]:
    """Sum of a measure over the rows of one head, and the number of rows, one pair at a time."""
    total, count = 0.0, 0
    for t in range(COUNT):
        patches = [s for s in range(COUNT) if place(t) and place(s)]
        differences = {s: [b - a for a, b in zip(place(t), place(s), strict=True)] for s in patches}
        if name == "patch_distance":
            values = {s: math.hypot(*difference) for s, difference in differences.items()}
            selected = patches
        else:
            selected = [s for s in patches if RELATIONS[name](*differences[s])]
            values = dict.fromkeys(selected, 1.0)
        if any(bool(allowed[t, s]) for s in selected):
            total += sum(float(weights[t, s]) * values[s] for s in selected)
            count += 1
    return total, count


@pytest.mark.parametrize("name", PATCH_METRICS)
def test_measures_equal_a_loop_over_pairs(name: str):
    generator = torch.Generator().manual_seed(1)
    allowed = (torch.rand(COUNT, COUNT, generator=generator) < 0.3).fill_diagonal_(True)
    allowed[7] = False
    allowed[7, :OTHERS] = True  # a patch that may read no patch
    scores = torch.randn(4, COUNT, COUNT, generator=generator, dtype=torch.float64) * 2
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    sums, counts = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for rows in (slice(0, 6), slice(6, COUNT)):
        band = WeightBand(weights[:, rows], allowed[rows], rows.start, TOKENS, TOKENS)
        added = PATCH_METRICS[name].compute_sums(band)
        sums, counts = sums + added[0], counts + added[1]
    for head in range(4):
        total, count = reference(name, weights[head], allowed)
        assert float(sums[head]) == pytest.approx(total, rel=1e-9)
        assert int(counts[head]) == count
        assert 5 < count < COUNT - OTHERS + 1


def test_texts_have_no_patches():
    tokens = hw.head_analysis.annotated_examples.TokenAnnotations(*[torch.zeros(2)] * 7)
    band = WeightBand(torch.ones(1, 2, 2) / 2, torch.ones(2, 2).bool(), 0, tokens, tokens)
    for (
        metric
    ) in PATCH_METRICS.values():  # so the measure is NaN, as for a text without a rarest token
        assert [tensor.tolist() for tensor in metric.compute_sums(band)] == [[0.0], [0.0]]


def test_words_that_read_patches_have_no_distance_to_them():
    words = hw.head_analysis.annotated_examples.TokenAnnotations(*[torch.zeros(COUNT)] * 7)
    weights, allowed = torch.ones(1, 2, COUNT) / COUNT, torch.ones(2, COUNT).bool()
    for queries, keys in ((words, TOKENS), (TOKENS, words)):
        band = WeightBand(weights, allowed, OTHERS, queries, keys)
        for metric in PATCH_METRICS.values():
            assert [tensor.tolist() for tensor in metric.compute_sums(band)] == [[0.0], [0.0]]


class FixedHeads(nn.Module):
    """Attention with scores that depend on the places of patches alone, and a
    little on the image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.values = nn.Parameter(make_scores()), nn.Linear(3, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v = self.values(x).unflatten(-1, (6, 2)).transpose(1, 2)
        scores = self.scores + 0.01 * x[:, None, :, :1] * x[:, None, :, 1].unsqueeze(2)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def make_scores() -> Tensor:
    """Scores of heads for the same row, the same column, neighbours, the patch itself, a sink, and
    random scores.
    """
    scores = torch.full((6, COUNT, COUNT), -4.0)
    for head, name in enumerate(("same_row", "same_column", "neighbours", "same_patch")):
        for t in range(OTHERS, COUNT):
            for s in range(OTHERS, COUNT):
                if RELATIONS[name](*[b - a for a, b in zip(place(t), place(s), strict=True)]):
                    scores[head, t, s] = 4.0
    scores[4, :, 0] = 6.0
    scores[5] = torch.randn(COUNT, COUNT, generator=torch.Generator().manual_seed(0))
    return scores


@torch.no_grad()
def test_heads_built_by_hand_get_their_classes():
    torch.manual_seed(0)
    model = nn.Sequential(FixedHeads()).eval()
    images = torch.randn(8, COUNT, 3)
    hw.sites(model, images[:2])
    examples = [Example(image[None], {"text": TOKENS}) for image in images]
    options = MeasureOptions(metrics=IMAGE_METRICS)
    table = hw.head_analysis.classify_heads(hw.measure_heads(model, examples, options=options))
    names = [{one.name for one in head.classes} for head in table.heads]
    for head, name in enumerate(("row", "column", "neighbour", "self", "sink")):
        assert name in names[head]
    patch_classes = {"row", "column", "neighbour", "self", "sink"}
    assert names[3] & patch_classes == {"self"}
    assert names[4] & patch_classes == {"sink"}
    assert not names[5] & patch_classes
    assert (
        "puts 1.00 on the patch itself; chance 0.07"
        in next(one for one in table.heads[3].classes if one.name == "self").evidence
    )


@torch.no_grad()
def test_measures_of_chosen_sites_only():
    model, images = (
        nn.Sequential(FixedHeads(), nn.Linear(12, 3), FixedHeads()).eval(),
        torch.randn(3, COUNT, 3),
    )
    hw.sites(model, images)
    examples = [Example(image[None], {"text": TOKENS}) for image in images]
    options = MeasureOptions(metrics=IMAGE_METRICS, sites=("model.2.attention",))
    table = hw.measure_heads(model, examples, options=options)
    assert table.sites == ("model.2.attention",)
    both = hw.measure_heads(model, examples, options=options._replace(sites=()))
    assert both.sites == ("model.0.attention", "model.2.attention")
    measures = [str(one.head("model.2.attention", 3).measures) for one in (both, table)]
    assert measures[0] == measures[1]
