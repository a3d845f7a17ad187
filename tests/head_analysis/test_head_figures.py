"""Figures of heads: text is inside and apart, scales and names are there, examples show what they
claim.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

import headwise as hw
from headwise import cli
from headwise.head_analysis import head_figures
from headwise.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.head_analysis.attention_figures import (
    SCALE_LABEL,
    HeadPicture,
    PictureMaker,
    draw_gallery,
    draw_head,
    draw_head_overlay,
    find_cells,
    score_cells,
)
from headwise.head_analysis.head_classes import classify_heads
from headwise.head_analysis.head_figures import (
    FIGURE_THEMES,
    FigureTheme,
    figure_style,
    text_colour_on,
)
from headwise.head_analysis.head_measurement import measure_heads
from headwise.head_analysis.head_similarity import PlaneEmbedding
from headwise.head_analysis.head_table import (
    HeadClass,
    HeadMeasures,
    HeadTable,
    Measure,
    locate_head,
)
from headwise.inspect.trace_capture import trace
from headwise.traces import save_trace
from support import handset_heads as handmade
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
            "encoder",
            "attention",
            layer,
            head,
            head,
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
    query_tokens, key_tokens = (
        [words[n % len(words)] for n in range(count)] for count in (queries, keys)
    )
    return HeadPicture(
        title, name, draw.dirichlet(np.ones(keys), queries), query_tokens, key_tokens, [(2, 1)]
    )


def embedding(count: int) -> PlaneEmbedding:
    """Half of the heads close together, the others apart."""
    scale = np.where(np.arange(count) < count // 2, 0.02, 0.3)
    return PlaneEmbedding(np.random.default_rng(3).normal(size=(count, 2)) * scale[:, None], 0.21)


RELATIONS = "the top head of each dependency relation", "the dependencies of the relation"
LONG_TITLE = "alignment 0.53: model.decoder.layers.11.encoder_attn 11"
FIGURES: dict[str, Callable[[FigureTheme], Figure]] = {
    "grid": lambda theme: head_figures.draw_head_grid(table(), theme),
    "small grid": lambda theme: head_figures.draw_head_grid(table(1, 2, "a"), theme),
    "wide grid": lambda theme: head_figures.draw_head_grid(table(24, 32), theme),
    "layers": lambda theme: head_figures.draw_measure_by_layer(table(), theme),
    "few layers": lambda theme: head_figures.draw_measure_by_layer(table(2, 3, "l{}"), theme),
    "importance": lambda theme: head_figures.draw_importance_curve(
        [f"{head.site} {head.head}" for head in table().heads],
        [(1e-6 * n, 1e-6 * (n - 5), 1e-6 * (n + 5)) for n in range(72)],
        f"{MODEL}: importance of every head for translation, 9 texts",
        theme,
        axis_label="importance by leave-one-out",
    ),
    "map": lambda theme: head_figures.draw_head_map(table(), embedding(72), theme),
    "small map": lambda theme: head_figures.draw_head_map(table(1, 3, "a"), embedding(3), theme),
    "gallery": lambda theme: draw_gallery(
        [picture(LONG_TITLE)] * 7, f"{MODEL}: {RELATIONS[0]}", theme, RELATIONS[1]
    ),
    "one picture": lambda theme: draw_gallery(
        [picture(LONG_TITLE, 6, 6)], f"{MODEL}: {RELATIONS[0]}", theme
    ),
    "head": lambda theme: draw_head(
        picture(LONG_TITLE, 40, 90), f"{MODEL}: decoder.1.cross 3", theme
    ),
    "small head": lambda theme: draw_head(
        picture("", 3, 2, ""), f"{MODEL}: decoder.1.cross 3", theme
    ),
    "pair": lambda theme: draw_head_overlay(
        *[picture(LONG_TITLE)] * 2, f"{MODEL}: attention of two heads", theme
    ),
}
DARK_FIGURES = set([*FIGURES][::2])


def visible_texts(figure: Figure) -> Iterator[Text]:
    """All texts that are drawn: of ticks, only those inside the view."""
    ticks: set[Text] = set()
    for axes in figure.findobj(Axes):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                ticks |= {tick.label1, tick.label2}
                if low - 1e-9 <= tick.get_loc() <= high + 1e-9 and axes.axison:
                    labels = (tick.label1, tick.label2)
                    yield from (
                        label for label in labels if label.get_visible() and label.get_text()
                    )
        if not axes.axison:
            ticks |= {axes.xaxis.label, axes.yaxis.label}
    for text in figure.findobj(Text):
        if text not in ticks and text.get_visible() and text.get_text().strip():
            yield text


def draw_figure(name: str) -> Figure:
    theme = FIGURE_THEMES["dark" if name in DARK_FIGURES else "light"]
    with figure_style(theme):
        figure = FIGURES[name](theme)
        head_figures.note_missing_font(figure)
        FigureCanvasAgg(figure).draw()
    return figure


@functools.cache
def english_figure(name: str) -> Figure:
    """A figure that several tests read and none changes."""
    return draw_figure(name)


# --- Chinese --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def square_font(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A font with the name of a common one, whose every Chinese character is a square."""
    from matplotlib.font_manager import fontManager

    path = tmp_path_factory.mktemp("font") / "square.ttf"
    name = write_square_font(path)
    installed = list(fontManager.ttflist)
    fontManager.addfont(path)
    yield name
    fontManager.ttflist[:] = installed
    fontManager._findfont_cached.cache_clear()


def write_square_font(path: Path) -> str:
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    name, pen = head_figures.FALLBACK_FONTS[0], TTGlyphPen(None)
    pen.moveTo((50, 0))
    for corner in ((950, 0), (950, 850), (50, 850)):
        pen.lineTo(corner)
    pen.closePath()
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", "square"])
    characters = [*range(0x2E80, 0xA000), *range(0xFF00, 0xFFF0)]
    font.setupCharacterMap(dict.fromkeys(characters, "square"))
    font.setupGlyf(dict.fromkeys((".notdef", "square"), pen.glyph()))
    font.setupHorizontalMetrics(dict.fromkeys((".notdef", "square"), (1000, 50)))
    font.setupHorizontalHeader(ascent=880, descent=-120)
    font.setupNameTable({"familyName": name, "styleName": "Regular"})
    font.setupOS2(sTypoAscender=880, sTypoDescender=-120)
    font.setupPost()
    font.save(path)
    return name


def test_a_font_that_was_installed_after_matplotlib_made_its_list_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from matplotlib import font_manager

    older = [
        font
        for font in font_manager.fontManager.ttflist
        if font.name not in head_figures.FALLBACK_FONTS
    ]
    name = write_square_font(tmp_path / "square.ttf")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    monkeypatch.setattr(font_manager.fontManager, "ttflist", older)
    monkeypatch.setattr(head_figures, "_known_files", set())
    files = [str(tmp_path / "broken.ttf"), str(tmp_path / "square.ttf")]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: files)
    assert head_figures.list_fonts() == [head_figures.DEFAULT_FONT, name]
    monkeypatch.setattr(
        font_manager, "findSystemFonts", lambda: pytest.fail("it looks for fonts again")
    )
    assert head_figures.find_undrawable("字") == []


@pytest.fixture
def no_chinese_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_figures, "FALLBACK_FONTS", ())


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in visible_texts(figure)]


PROSE = re.compile(r"[a-z]{2,} [a-z]{2,}")


@pytest.mark.parametrize("name", ["gallery", "pair"])
def test_chinese_tokens_are_drawn_or_named_with_one_note(name: str, request: pytest.FixtureRequest):
    request.getfixturevalue("square_font")
    assert "字" in texts_of(draw_figure(name))
    request.getfixturevalue("no_chinese_font")
    texts = texts_of(draw_figure(name))
    assert "U+5B57" in texts
    assert texts.count(head_figures.FONT_NOTE) == 1
    assert not any("□" in text or re.search("[\u4e00-\u9fff]", text) for text in texts)
    assert head_figures.FONT_NOTE not in texts_of(draw_figure("layers"))


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_clipped_or_overlaps_another(name: str):
    figure = english_figure(name)
    texts = list(visible_texts(figure))
    boxes = [text.get_window_extent() for text in texts]
    page = figure.bbox
    for text, box in zip(texts, boxes, strict=True):
        inside = box.x0 > -1 and box.y0 > -1 and box.x1 < page.x1 + 1 and box.y1 < page.y1 + 1
        assert inside, (text.get_text(), box)
    for n, one in enumerate(boxes):
        for m, other in enumerate(boxes[:n]):
            wide = min(one.x1, other.x1) - max(one.x0, other.x0)
            high = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(wide, high) < 1.5, (texts[n].get_text(), texts[m].get_text())


@pytest.mark.parametrize("name", FIGURES)
def test_titles_name_the_model_and_axes_have_names(name: str):
    figure = english_figure(name)
    assert MODEL in figure.get_suptitle().replace("\n", "")
    message = " ".join(text.get_text() for text in visible_texts(figure))
    expected = {
        "grid": ("head", "attention layer", "a stronger colour is a higher score"),
        "layers": ("entropy (nats)", "attention layer", "95 % intervals"),
        "importance": (
            "importance by leave-one-out",
            "heads by decreasing importance",
            "95 % interval",
        ),
        "map": ("nats of Jensen-Shannon divergence", "stress of the map 0.21"),
        "pair": ("query", "key", "thicker, stronger lines are larger weights"),
    }
    words = next(
        (words for end, words in expected.items() if name.endswith(end)),
        ("query", "key", SCALE_LABEL),
    )
    for word in words:
        assert word in message.replace("\n", " "), word


def test_colour_and_scale_show_the_square_root_of_the_weight():
    theme = FIGURE_THEMES["light"]
    shown = HeadPicture(
        "a head", "sink", np.array([[0.25, 0.75], [1.0, 0.0]]), ["a", "b"], ["a", "b"]
    )
    with figure_style(theme):
        figure = draw_gallery([shown], "model", theme)
        FigureCanvasAgg(figure).draw()
    assert "strength of colour: its square root" in SCALE_LABEL
    heat_map, scale = figure.axes
    np.testing.assert_allclose(np.asarray(heat_map.images[0].get_array()), np.sqrt(shown.weights))
    labels = {
        float(tick.get_loc()): tick.label1.get_text() for tick in scale.xaxis.get_major_ticks()
    }
    assert all(place == pytest.approx(float(label) ** 0.5) for place, label in labels.items())
    assert len(labels) >= 5


@pytest.mark.parametrize("theme", FIGURE_THEMES.values(), ids=str)
def test_letters_are_legible_on_their_cells(theme: FigureTheme):
    """At least the contrast 4.5 of WCAG 2, on every colour at every strength."""

    def luminance(colour: Any) -> float:
        parts = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    from matplotlib.colors import to_rgb

    for name in head_figures.CLASS_STYLES:
        colour = head_figures.class_style(name, theme)[1]
        for alpha in np.linspace(0.35, 1, 14):
            cell = [
                alpha * own + (1 - alpha) * below
                for own, below in zip(to_rgb(colour), to_rgb(theme.background), strict=True)
            ]
            light, dark = sorted(
                (luminance(cell), luminance(to_rgb(text_colour_on(colour, alpha, theme)))),
                reverse=True,
            )
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, alpha)


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
def test_gold_links_are_marked_in_the_rows_that_align_best(
    better: str, cells: list[tuple[int, int]]
):
    words = {"source": example([5, 6, 7]).streams["text"], "text": example([7, 5]).streams["text"]}
    linked = Example(torch.zeros(1), words, (), [(2, 0, True), (0, 1, True)])
    names = ("alignment input", "alignment target")
    values = {name: Measure(0.8 if name.endswith(better) else 0.2, 0, 1, 0) for name in names}
    head = HeadMeasures("decoder", "cross", 0, 0, 0, "decoder.0.cross", values)
    traced = trace(
        handmade.translator(), handmade.translation_pairs(1)[0].inputs, log=lambda _: None
    )
    layer = traced.get_layer(head.site)
    assert find_cells("alignment", linked, layer, head) == cells


# --- heads drawn from the command line ------------------------------------------------------------


class Layer:
    def __init__(self, name: str, stack: str, kind: str, layer: int) -> None:
        self.name, self.stack, self.kind, self.layer = name, stack, kind, layer


LAYERS = [
    Layer("encoder.1.attention", "encoder", "attention", 1),
    Layer("decoder.1.attention", "decoder", "attention", 1),
    Layer("decoder.1.cross", "decoder", "cross", 1),
    Layer("decoder.2.attention", "decoder", "attention", 2),
]


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("E1H3", "encoder.1.attention"),
        ("D1 H3", "decoder.1.attention"),
        ("X1H3", "decoder.1.cross"),
        ("L2H3", "decoder.2.attention"),
        ("decoder.1.cross:3", "decoder.1.cross"),
    ],
)
def test_heads_have_short_names(name: str, site: str):
    assert locate_head(name, LAYERS) == (site, 3)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("L1H3", "layer 1 is each of encoder.1.attention, decoder.1.attention, decoder.1.cross"),
        ("E2H0", "there is no layer E2"),
        ("3.2", "'3.2' is not a head; write L3H2"),
        ("H2", "is not a head"),
    ],
)
def test_wrong_names_of_heads(name: str, why: str):
    with pytest.raises(ValueError, match=why):
        locate_head(name, LAYERS)


def test_chosen_heads_are_drawn_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    net, text = small_gpt2(), make_examples(1)[0]
    path = tmp_path / "a.trace"
    save_trace(trace(net, text.model_inputs, log=lambda _: None), path)
    assert (
        cli.main(["heads", str(path), "--draw", "L1H2", "L0H0", "--out", str(tmp_path / "drawn")])
        == 0
    )
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names == ["head-decoder.1.attention-2-light.svg", "head-decoder.0.attention-0-light.svg"]
    assert len(list((tmp_path / "drawn").iterdir())) == 8
    for argv, wrong in (
        (["--draw", "L1H9", "--out", "no"], "decoder.1.attention has no head 9"),
        (["--draw", "L1H2"], "--draw needs a folder for the figures; add --out DIR"),
        (["--out", "no"], "is a trace, whose heads can only be drawn; add --draw HEAD --out DIR"),
        (["--draw", "L1H2", "--out", "no", "--redundancy"], "--redundancy needs a model"),
    ):
        assert cli.main(["heads", str(path), *argv]) == 2
        assert wrong in capsys.readouterr().err
    assert not Path("no").exists()


def test_chosen_heads_are_drawn_with_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from support.conllu_examples import ROWS, build_encoder, conllu_lines

    hw.save(build_encoder(), tmp_path / "net")
    text = ROWS.replace("The", "the").replace("# sent_id = two\n", "").replace("2 du", "2 b")
    (tmp_path / "a.conllu").write_text(
        "\n".join([*conllu_lines(text), "", *conllu_lines(text), ""])
    )
    base = [
        "heads",
        str(tmp_path / "net"),
        "--conllu",
        str(tmp_path / "a.conllu"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main([*base, "--draw", "L0H1"]) == 0
    assert (tmp_path / "out" / "head-encoder.0.attention-1-dark.png").exists()
    assert json.loads((tmp_path / "out" / "heads.json").read_text())["heads"]
    assert cli.main([*base[:-1], str(tmp_path / "no"), "--draw", "L7H1"]) == 2
    assert "there is no layer L7" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_ticks_are_values_and_not_differences():
    """Of heads that are almost alike, of which matplotlib would label differences from a common
    value.
    """
    heads = tuple(
        HeadMeasures(
            "decoder", "attention", 0, n, n, "decoder.0.attention", {"entropy": Measure(*values)}
        )
        for n, values in enumerate(
            ((2.83315, 2.83314, 2.83316, 2.83321), (2.83317, 2.83316, 2.83318, 2.83321))
        )
    )
    theme = head_figures.FIGURE_THEMES["light"]
    with head_figures.figure_style(theme):
        figure = head_figures.draw_measure_by_layer(HeadTable("small", "2 texts", heads), theme)
        figure.draw_without_rendering()
    axis = figure.axes[0].yaxis
    assert axis.get_offset_text().get_text() == ""
    low, high = figure.axes[0].get_ylim()
    shown = [float(label.get_text()) for label in axis.get_ticklabels()]
    assert all(2.8331 < value < 2.8333 for value in shown)
    assert len([value for value in shown if low <= value <= high]) >= 3
