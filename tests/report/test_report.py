"""The report room: numbers, tables, figures and pages in every form."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from headwise.report.data import (
    Axis,
    Bars,
    Column,
    Dendrogram,
    Estimate,
    Figure,
    HeatMap,
    Links,
    Plot,
    Reference,
    Series,
    Table,
)
from headwise.report.plots import THEMES, draw, figure_style, save_figure, to_svg
from headwise.report.render import (
    colour_text,
    make_page,
    to_csv,
    to_html,
    to_json,
    to_markdown,
    to_plain,
    to_text,
)
from headwise.report.text import (
    cut,
    format_bytes,
    format_p,
    format_seconds,
    pad,
    pad_left,
    rule,
    spread_labels,
    text_width,
    wrap,
)
from headwise.util.errors import SpecError

HOSTILE = "</td><script>alert(1)</script>\x1b[2J\u202e|&\"'"


TABLE = Table(
    "Scores",
    ("model", Column("memory", format_bytes), "tokens", "loss", "change"),
    [
        ("点积 model", 31104, 12000, 0.5, Estimate(0.25, 0.125, 0.5)),
        (HOSTILE, None, 7, 12.345, Estimate(-0.5)),
    ],
    notes=("a note",),
    bold=frozenset({(0, 3)}),
)


PLOT = Plot(
    [
        Series("first <b>", [1, 10, 100], [1, 2, 3], [0.5, 1, 2], [2, 3, 4], marker="o"),
        Series("chance", [1, 10, 100], [2, 2, 2.5], line="--", colour="muted"),
    ],
    Axis("tokens", log=True, reverse=True),
    Axis("loss", low=0.0, format=format_seconds),
    references=[Reference("y", 1.5, "limit 1.5"), Reference("x", 10, "step")],
    names="ends",
)


FIGURES = {
    "plot": Figure("Loss", [PLOT], {"K sink": "#999999"}, "classes", "a note"),
    "scatter": Figure(
        "Heads",
        [
            Plot(
                [
                    Series(
                        *("heads", [1, 2], [3, 1], [2, 0], [4, 2]),
                        line="",
                        labels=["0.1", "1.1"],
                        colours=["#999999", "empty"],
                        sizes=[8, 9],
                        band=False,
                    )
                ]
            )
        ],
    ),
    "bars": Figure(
        "Kept",
        [Bars(["8", "4"], {"sink": [4, 1], "rare": [4, 0]}, marks=[(1, "× rare", "muted")])],
    ),
    "heat map": Figure(
        "Weights",
        [HeatMap([[0.0, 1.0], [0.5, 0.5]], ["x", "y"], ["\x07", "中"], marked=[(0, 1)])],
        scale_label="weight",
    ),
    "links": Figure("Lines", [Links(["a"], ["b"], {"one": [[0.9]], "two": [[0.01]]})]),
    "tree": Figure("Tree", [Dendrogram(np.array([[0, 1, 0.5, 2.0]]), ["left", "right"])]),
}


PAGE = make_page(
    "A page of <i>results</i>",
    ("Scores", ["text " + HOSTILE, ["one", "two"], TABLE]),
    ("Figures", list(FIGURES.values())),
    summary="in short",
)


class Structure(HTMLParser):
    """Collects the tags and the texts of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_text_table_is_aligned_by_terminal_width() -> None:
    lines = to_text(TABLE, width=200).splitlines()
    assert lines[0] == "Scores"
    assert lines[-1] == "note: a note"
    header, first, second = lines[2:5]
    assert "31.10 kB" in first
    assert "12,000" in first
    for name, value, missing in (("memory", "31.10 kB", "-"), ("loss", "0.50", "12.35")):
        end = text_width(header[: header.index(name) + len(name)])
        assert text_width(first[: first.index(value) + len(value)]) == end
        assert second[:end].endswith(missing)
    assert all(text_width(line) <= 80 for line in to_text(TABLE).splitlines())


def test_hostile_text_stays_text() -> None:
    assert "\x1b" not in to_text(PAGE)
    assert "\u202e" not in to_text(PAGE)
    html = to_html(PAGE)
    assert "\x1b" not in html
    assert "\u202e" not in html
    structure = Structure()
    structure.feed(html)
    assert "script" not in structure.tags
    assert any("<script>alert(1)</script>\\x1b[2J\\u202e|&\"'" in text for text in structure.texts)
    markdown = to_markdown(TABLE)
    assert "<script" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {6}


def test_page_needs_no_network_and_has_both_themes() -> None:
    html = to_html(PAGE)
    assert "default-src 'none'" in html
    for address in ("src=", 'href="http', "url(http"):
        assert address not in html.replace('xlink:href="http', "") or "data:" in html
    structure = Structure()
    structure.feed(html)
    assert structure.tags.count("svg") == 2 * len(FIGURES)
    assert structure.tags.count("figure") == len(FIGURES)
    assert "<b>0.50</b>" in html


def test_markdown_has_bold_cells_and_pictures() -> None:
    text = to_markdown(PAGE, {"Loss": "loss.svg"})
    assert "| **0.50** |" in text
    assert "![Loss](loss.svg)" in text
    assert "## Scores" in text


def test_csv_and_json_hold_plain_values() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows[0] == ["model", "memory", "tokens", "loss", "change", "change low", "change high"]
    assert rows[1][1:] == ["31104", "12000", "0.5", "0.25", "0.125", "0.5"]
    assert rows[2][0] == HOSTILE
    assert rows[2][-2:] == ["", ""]
    data = json.loads(to_json(TABLE))
    assert data["rows"][1][4]["low"] is None
    assert to_plain(np.array([1.0, math.nan])) == [1.0, None]


def test_empty_columns_are_left_out() -> None:
    table = Table(
        "", ("a", "b", "c"), [(1, None, "x"), (2, math.nan, "y")], bold=frozenset({(1, 2)})
    )
    kept = table.without_empty_columns()
    assert list(kept.columns) == ["a", "c"]
    assert kept.bold == {(1, 1)}
    assert to_text(Table("heads", ("a",), [(None,)]).without_empty_columns()).split() == ["heads"]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_alike_each_time(name: str, tmp_path: Path) -> None:
    number = list(FIGURES).index(name)
    theme = list(THEMES)[number % 2]
    suffix = (".svg", ".png", ".pdf")[number % 3]
    for file in ("first", "second"):
        save_figure(FIGURES[name], tmp_path / f"{file}{suffix}", theme)
    drawn = (tmp_path / f"first{suffix}").read_bytes()
    assert drawn == (tmp_path / f"second{suffix}").read_bytes()
    save_figure(FIGURES[name], tmp_path / f"first{suffix}", theme, overwrite=True)


def test_plot_has_the_values_and_the_scales() -> None:
    with figure_style(THEMES["light"]):
        drawing = draw(FIGURES["plot"], THEMES["light"])
    axes = drawing.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert np.asarray(lines["first <b>"].get_ydata()).tolist() == [1, 2, 3]
    assert axes.get_xscale() == "log"
    assert axes.get_xlim()[0] > axes.get_xlim()[1]
    assert axes.get_ylim()[0] == 0.0
    texts = {text.get_text() for text in axes.texts}
    assert {"first <b>", "chance", "limit 1.5", "step"} <= texts


def test_heat_map_names_what_no_font_can_draw() -> None:
    with figure_style(THEMES["dark"]):
        drawing = draw(FIGURES["heat map"], THEMES["dark"])
    labels = [label.get_text() for label in drawing.axes[0].get_xticklabels()]
    assert labels[0] == "U+0007"
    image = np.asarray(drawing.axes[0].images[0].get_array())
    np.testing.assert_allclose(image**2, [[0, 1], [0.5, 0.5]])


def test_class_grid_as_text_wraps_and_colours() -> None:
    letters = [["K", "p", " "], ["S", "·", "K"]]
    colours = [["#999999", "#56B4E9", ""], ["#009E73", "", "#999999"]]
    values = [[1.0] * 3] * 2
    grid = HeatMap(
        values, ["L0", "L1"], list("012"), x_label="head", texts=letters, colours=colours
    )
    plain = to_text(Figure("", [grid]))
    assert plain.splitlines() == ["head   0  1  2", "L0     K  p", "L1     S  ·  K"]
    coloured = to_text(Figure("", [grid]), colour=True)
    assert colour_text("K", "#999999") in coloured
    assert len(to_text(Figure("", [grid]), width=11).splitlines()) == 6


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: save_figure(FIGURES["bars"], "a.jpg"), "'.jpg' is not supported; use .svg"),
        (lambda: save_figure(FIGURES["bars"], "a.svg", "blue"), "unknown theme 'blue'"),
        (lambda: save_figure(FIGURES["bars"], "/dev/null/a.svg"), "cannot write to"),
    ],
)
def test_refusals(action: object, message: str) -> None:
    assert callable(action)
    with pytest.raises(SpecError, match=message.replace(".", "\\.")):
        action()


def test_labels_are_spread_evenly_within_bounds() -> None:
    spread = spread_labels([0.5] * 5, 0.1)
    assert spread == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7])
    assert spread_labels([0.9] * 30, 0.1) == pytest.approx(list(np.arange(30) / 29), abs=1e-8)


def test_quantities_that_were_not_measured() -> None:
    assert {form(math.nan) for form in (format_p, format_bytes, format_seconds)} == {"-"}


# --- the width of chinese text in columns of a terminal ---


def test_chinese_takes_two_columns():
    assert [text_width(pad(text, 20) + pad_left(text, 8)) for text in ("x", "正确")] == [28, 28]
    assert text_width(pad("键值缓存", 11)) == text_width(rule("键 ", 11)) == 11
    assert cut("注意力分数", 7) == "注意力…"
    text = "多头注意力 multi-head attention 的每个头读取整个向量而不是其中的一段。"
    lines = wrap(text * 3, 40, "  ", "    ")
    assert max(map(text_width, lines)) <= 40 + 2  # a closing mark may stand beyond the margin
    assert [line[:4].strip() for line in lines[1:]] == ["" for _ in lines[1:]]
    assert wrap("one two three", 8, "  ", "   ") == ["  one", "   two", "   three"]


def test_titles_of_figures_break_between_chinese_characters():
    """A title is no wider than its figure, also without spaces."""
    figure = Figure("注意力" * 20, [HeatMap([[0.5]], ["a"], ["b"], size=(3.0, 1.0))])
    svg = to_svg(figure, "light", inline=True)
    lines = [
        text for text in re.findall(r"<text[^>]*>([^<]*)<", svg) if "注" in text or "意" in text
    ]
    assert "".join(lines) == "注意力" * 20
    assert len(lines) > 2
    assert max(map(len, lines)) < 20
