"""Figures of heads: scales and names are there, examples show what they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from headwise import cli
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.observe.head_analysis.head_classes import classify_heads
from headwise.observe.head_analysis.head_measurement import measure_heads
from headwise.observe.head_analysis.head_report import (
    SCALE_LABEL,
    HeadPicture,
    PictureMaker,
    find_cells,
    head_figure,
    head_gallery,
    plot_entropy_by_layer,
    plot_importance,
    plot_similar_heads,
    score_cells,
)
from headwise.observe.head_analysis.head_similarity import PlaneEmbedding
from headwise.observe.head_analysis.head_table import (
    HeadClass,
    HeadImportance,
    HeadMeasures,
    HeadTable,
    ImportanceResult,
    Measure,
)
from headwise.observe.inspect.trace_capture import trace
from headwise.observe.traces import save_trace
from headwise.report.data import Figure
from headwise.report.plots import THEMES, draw, figure_style
from observe.head_analysis import handset_heads as handmade
from support.number_examples import make_examples, small_gpt2

MODEL = "organisation/a-model-with-a-rather-long-name-finetuned-v2"
CLASSES = (
    "previous",
    "sink",
    "broad",
    "unclear",
    "syntactic nsubj to governor",
    "induction",
    "duplicate",
    "rare-token",
)


def table(
    layers: int = 6, heads: int = 12, site: str = "bert.encoder.layer.{}.attention.self"
) -> HeadTable:
    draw = np.random.default_rng(0)
    rows = [
        HeadMeasures(
            *("encoder", "attention", layer, head, head),
            site.format(layer),
            {"entropy": Measure(float(draw.uniform(0, 3)), 0.2, 2.7, 2.9)},
            (
                HeadClass(
                    CLASSES[(3 * layer + head) % len(CLASSES)], float(draw.random()), "it does"
                ),
            ),
        )
        for layer in range(layers)
        for head in range(heads)
    ]
    return HeadTable(MODEL, "500 texts", tuple(rows))


def picture(title: str, queries: int = 17, keys: int = 17, name: str = "previous") -> HeadPicture:
    draw = np.random.default_rng(queries)
    words = ["[CLS]", "extraordinarily", "a", "of", "字", "internationalisation"]
    query_tokens = [words[n % len(words)] for n in range(queries)]
    key_tokens = [words[n % len(words)] for n in range(keys)]
    weights = draw.dirichlet(np.ones(keys), queries)
    return HeadPicture(title, name, weights, query_tokens, key_tokens, [(2, 1)])


def importance() -> ImportanceResult:
    heads = [
        HeadImportance(*("a", "decoder", "attention", 0, n, n, 1e-6 * n, 1e-6 * (n - 5), 1e-5))
        for n in range(12)
    ]
    return ImportanceResult(MODEL, "leave-one-out", "translation", 9, tuple(heads))


def embedding(count: int) -> PlaneEmbedding:
    return PlaneEmbedding(np.random.default_rng(3).normal(size=(count, 2)), 0.21)


FIGURES: dict[str, tuple[Figure, tuple[str, ...]]] = {
    "grid": (table().class_grid(f"{MODEL}: classes"), ("head", "K sink")),
    "layers": (plot_entropy_by_layer(table()), ("entropy (nats)", "attention layer", "chance")),
    "importance": (
        plot_importance(importance()),
        ("importance by leave-one-out", "heads by decreasing importance"),
    ),
    "map": (plot_similar_heads(table(1, 3, "a"), embedding(3)), ("0.2", "P positional")),
    "gallery": (head_gallery([picture("a")] * 2, f"{MODEL}: heads", "pairs"), ("query", "key")),
    "head": (head_figure(picture("", 40, 90), f"{MODEL}: a 3"), ("query", "key", SCALE_LABEL)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_name_the_model_their_axes_and_marks(name: str):
    figure, expected = FIGURES[name]
    theme = THEMES["dark" if [*FIGURES].index(name) % 2 else "light"]
    with figure_style(theme):
        drawn = draw(figure, theme)
        for _ in range(2):
            drawn.draw_without_rendering()
    assert MODEL in drawn.get_suptitle().replace("\n", "")
    shown = {text.get_text().replace("\n", " ") for text in drawn.findobj(Text)}
    assert set(expected) <= shown
    page = drawn.bbox
    for axes in drawn.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert box.x0 > -8
        assert box.y0 > -8
        assert box.x1 < page.x1 + 8
        assert box.y1 < page.y1 + 8


def test_colour_and_scale_show_the_square_root_of_the_weight():
    weights = np.array([[0.25, 0.75], [1.0, 0.0]])
    shown = HeadPicture("a head", "sink", weights, ["a", "b"], ["a", "b"])
    with figure_style(THEMES["light"]):
        drawn = draw(head_gallery([shown], "model"), THEMES["light"])
        drawn.draw_without_rendering()
    assert "strength of colour: its square root" in SCALE_LABEL
    heat_map, scale = drawn.axes
    np.testing.assert_allclose(np.asarray(heat_map.images[0].get_array()), np.sqrt(weights))
    ticks = scale.xaxis.get_major_ticks()
    labels = {float(tick.get_loc()): tick.label1.get_text() for tick in ticks}
    assert all(place == pytest.approx(float(label) ** 0.5) for place, label in labels.items())
    assert len(labels) >= 5


# --- examples of classes --------------------------------------------------------------------------


def example(ids: list[int]) -> Example:
    none, count = torch.zeros(len(ids), dtype=torch.bool), torch.ones(len(ids))
    words = tuple(f"w{one}" for one in ids)
    tokens = TokenAnnotations(
        torch.tensor(ids), words, none, none, none, torch.arange(len(ids)), count
    )
    return Example(torch.tensor([ids]), {"text": tokens})


def test_an_induction_head_is_drawn_on_a_text_in_which_a_pair_repeats():
    net = handmade.decoder()
    heads = classify_heads(measure_heads(net, handmade.texts(40)))
    head = heads.head("decoder.1.attention", 0)
    assert head.classes[0].name == "induction"
    texts = [
        example([0, 3, 1, 4, 2, 5, 6, 7]),
        example([0, 3, 5, 8, 2, 3, 5, 8]),
        example([0, 9, 1, 9, 2, 4, 6, 7]),
    ]
    drawn_picture = PictureMaker(net, texts).picture(head, "induction", "induction")
    assert drawn_picture is not None
    assert list(drawn_picture.key_tokens) == [f"w{one}" for one in [0, 3, 5, 8, 2, 3, 5, 8]]
    assert list(drawn_picture.marked_cells) == [(5, 2), (6, 3), (7, 4)]
    assert all(drawn_picture.weights[cell] > 0.9 for cell in drawn_picture.marked_cells)
    assert PictureMaker(net, texts[:1]).picture(head, "induction", "induction") is None


def test_a_relation_is_drawn_where_the_head_finds_it():
    weights = np.array([[0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.9, 0.05, 0.05]])
    assert score_cells(weights, [(0, 1)]) == pytest.approx(0.8 / 3)
    assert score_cells(weights, [(0, 1), (1, 2), (2, 0)]) == pytest.approx(0.7)
    assert score_cells(weights, [(1, 0), (1, 1), (0, 1), (2, 0)]) == pytest.approx(
        (0.6 + 0.8 + 0.9) / 3
    )


@pytest.mark.parametrize(("better", "cells"), [("input", [(0, 2), (1, 0)]), ("target", [(0, 0)])])
def test_gold_links_are_marked_in_the_rows_that_align_best(better, cells):
    words = {"source": example([5, 6, 7]).streams["text"], "text": example([7, 5]).streams["text"]}
    linked = Example(torch.zeros(1), words, (), [(2, 0, True), (0, 1, True)])
    names = ("alignment input", "alignment target")
    values = {name: Measure(0.8 if name.endswith(better) else 0.2, 0, 1, 0) for name in names}
    head = HeadMeasures("decoder", "cross", 0, 0, 0, "decoder.0.cross", values)
    traced = trace(handmade.translator(), handmade.translation_pairs(1)[0].inputs)
    layer = traced.get_layer(head.site)
    assert find_cells("alignment", linked, layer, head) == cells


# --- heads drawn from the command line ------------------------------------------------------------


@pytest.mark.usefixtures("unrendered_figure")
def test_chosen_heads_are_drawn_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    net, text = small_gpt2(), make_examples(1)[0]
    path = tmp_path / "a.trace"
    save_trace(trace(net, text.model_inputs), path)
    assert (
        cli.main(["heads", str(path), "--draw", "L1H2", "L0H0", "--out", str(tmp_path / "drawn")])
        == 0
    )
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names == ["head-decoder.1.attention-2-light.svg", "head-decoder.0.attention-0-light.svg"]
    assert len(list((tmp_path / "drawn").iterdir())) == 8
    for argv, wrong in (
        (["--draw", "L1H9", "--out", "no"], "decoder.1.attention has no head 9"),
        (["--draw", "L1H2"], "--draw needs --out; add --out DIR"),
        (["--out", "no"], "is a trace, whose heads can only be drawn; add --draw HEAD --out DIR"),
        (["--draw", "L1H2", "--out", "no", "--redundancy"], "--redundancy needs a model"),
    ):
        assert cli.main(["heads", str(path), *argv]) == 2
        assert wrong in capsys.readouterr().err
    assert not Path("no").exists()
