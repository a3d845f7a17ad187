"""Pictures of the entries of `headwise learn`: how many there are, that none is empty, and that
their texts are in both languages.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import headwise.learn.matrix_figures as matrix_figures
from headwise.learn.catalogue import load_entries
from headwise.learn.language import localise, use_language
from headwise.report.data import Bars, HeatMap, Links, Panel, Plot
from learn import learn_entries as learn

ENTRIES = load_entries()
PICTURED = [entry for entry in ENTRIES if entry.picture]
CHINESE = re.compile("[\u4e00-\u9fff]")
# Words of a label that are alike in both languages: names, symbols and relations of dependencies.
NAMES = re.compile(
    r"\b(softmax|entmax|sparsemax|alpha|head|sqrt|attention|encoder|decoder|cross"
    r"|aux|amod|appos|det|nsubj|obj|d_k|int\d|Longformer|BigBird)\b"
)


def numbers_of(panel: Panel) -> np.ndarray:
    """All numbers that a panel shows."""
    if isinstance(panel, HeatMap):
        return np.asarray(panel.values, float).ravel()
    if isinstance(panel, Bars):
        return np.asarray(list(panel.groups.values()), float).ravel()
    if isinstance(panel, Links):
        return np.asarray([np.asarray(weights) for weights in panel.weights.values()]).ravel()
    assert isinstance(panel, Plot)
    return np.concatenate([np.asarray(series.ys, float) for series in panel.series])


def test_at_least_sixty_entries_have_a_picture_with_a_title_in_both_languages():
    assert len(PICTURED) >= 60
    assert len({entry.document for entry in PICTURED}) == 5
    for entry in PICTURED:
        title = entry.picture["title"]
        assert set(title) == {"en", "zh"}
        assert CHINESE.search(title["zh"]), entry.id
        assert not CHINESE.search(title["en"]), entry.id


@pytest.mark.parametrize("entry", PICTURED, ids=lambda entry: entry.id)
def test_a_picture_shows_numbers_below_its_title(entry):
    figure = learn.checked(entry).figure
    assert figure is not None
    assert figure.title == entry.picture["title"]["en"]
    assert figure.panels
    for panel in figure.panels:
        numbers = numbers_of(panel)
        assert numbers.size > 1
        assert np.isfinite(numbers).all()
    assert any(np.abs(numbers_of(panel)).max() > 0 for panel in figure.panels)
    if "columns" in entry.picture:  # independent of the code that draws: the numbers by their names
        shown = {**learn.checked(entry).numbers, **entry.picture.get("values", {})}
        names = entry.picture["columns"].values()
        groups = entry.picture.get("groups", {"": "{}"}).values()
        expected = [float(shown[group.replace("{}", name)]) for group in groups for name in names]
        positive = [number for number in expected if number > 0]
        drawn = [number for panel in figure.panels for number in numbers_of(panel)]
        assert drawn in (expected, positive)


def test_no_picture_is_without_an_entry_and_no_label_without_a_translation(monkeypatch):
    untranslated = set[str]()

    def record(text: str) -> str:
        shown = localise(text)
        if shown == text and re.search("[a-z]{3}", NAMES.sub("", text)):
            untranslated.add(text)
        return shown

    fast = [entry for entry in PICTURED if learn.checked(entry).figure and entry.id not in SLOW]
    monkeypatch.setattr(matrix_figures, "localise", record)
    with use_language("zh"):
        for entry in fast:
            figure = entry.check().figure
            assert figure is not None
            assert figure.title == entry.picture["title"]["zh"]
    assert untranslated == set()


# Their runs take seconds; their labels are those of other entries.
SLOW = {"000-1f", "002-FF.2", "002-FF.3", "002-FF.8", "002-3.2j", "000-1g", "001-3e"}


def test_bars_beside_each_other_and_points_of_a_logarithmic_axis():
    table = {"columns": {"a": "x", "b": "y"}, "groups": {"one": "{}_1", "two": "{}_2"}}
    numbers = {"x_1": 1.0, "y_1": 2.0, "x_2": 0.5, "y_2": 4.0, "limit": 3.0}
    (bars,) = matrix_figures.draw_numbers({**table, "levels": {"most": "limit"}}, numbers)().panels
    assert isinstance(bars, Bars)
    assert (dict(bars.groups), bars.stacked) == ({"one": [1.0, 2.0], "two": [0.5, 4.0]}, False)
    assert [(one.at, one.label) for one in bars.references] == [(3.0, "most")]
    (points,) = matrix_figures.draw_numbers({**table, "log": "y"}, numbers)().panels
    assert isinstance(points, Plot)
    assert points.y.log
    assert [list(series.ys) for series in points.series] == [[1.0, 2.0], [0.5, 4.0]]
    assert points.y.ticks == {0.5: "0.5", 1.0: "1", 2.0: "2"}
