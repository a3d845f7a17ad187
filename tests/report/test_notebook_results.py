"""Results in a notebook: short reprs, HTML with tables and pictures, and pandas tables."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.observe.head_analysis.head_redundancy import measure_redundancy
from headwise.report.data import Estimate, Table
from headwise.report.notebook import MAX_ROWS, NotebookResult, TableResult
from headwise.surgery.verification.efficiency import TimingOptions
from headwise.surgery.verification.verify import VerificationOptions
from headwise.util.errors import SpecError
from support.number_examples import make_examples, small_gpt2

SPEC = hw.design(model=8, heads=2, pattern="causal")
OPTIONS = VerificationOptions("half of the heads", timing=TimingOptions(seconds=0.01))
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def results() -> dict[str, Any]:
    """One result of every function that returns one."""
    net = small_gpt2()
    examples = make_examples(4)
    traced = hw.trace(net, IDS)
    pruned = hw.prune(net, 0.5, examples)
    return {
        "heads": hw.heads(net, examples),
        "importance": hw.importance(net, examples),
        "redundancy": measure_redundancy(net, examples),
        "logit": hw.attribute_logit(net, IDS),
        "cost": hw.cost(SPEC),
        "why": hw.why(SPEC),
        "walk": hw.walk(SPEC),
        "trace": traced,
        "comparison": hw.compare_traces(traced, traced),
        "sites": hw.sites(net),
        "prune": pruned,
        "convert": hw.convert(net, 2),
        "verify": hw.verify(pruned.before, pruned.after, examples, OPTIONS),
    }


class Tags(HTMLParser):
    """The tags of a document, each as often as it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


def test_a_notebook_shows_every_result():
    for name, result in results().items():
        assert isinstance(result, NotebookResult), name
        assert len(repr(result)) < 200, name
        assert repr(result).startswith(f"<{type(result).__name__}: "), name
        assert ": ;" not in repr(result), name
        page = Tags()
        page.feed(result._repr_html_())
        assert "table" in page.tags, name
        assert page.tags.count("tr") <= 1 + MAX_ROWS or name == "cost", name
        assert ("svg" in page.tags) == (name in ("heads", "importance", "trace")), name
        assert "script" not in page.tags


def test_one_head_of_a_trace_is_drawn():
    trace = hw.trace(small_gpt2(), IDS.repeat(2, 1).index_put((torch.tensor(1),), torch.tensor(7)))
    drawn = trace.draw("L1H0", row=1)
    [cells] = drawn.panels
    assert cells.title == "text 2 of 2"
    assert np.array_equal(cells.values, trace.head_weights(1, 0, row=1))
    assert not np.array_equal(cells.values, trace["L1H0"])
    assert repr(drawn) == "<Figure: gpt2: L1H0>"
    page = Tags()
    page.feed(drawn._repr_html_())
    assert "svg" in page.tags
    with pytest.raises(ValueError, match="L7"):
        trace.draw("L7H0")


def test_a_head_of_a_model_without_tokens_is_drawn_by_positions():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    [cells] = hw.trace(model, torch.randn(1, 3, 16)).draw("L0H1").panels
    assert cells.rows == cells.columns == ("0", "1", "2")


class Rows(TableResult):
    """Rows with text that is no HTML, and an estimate."""

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def table(self) -> Table:
        rows = [("<script>", Estimate(n, n - 0.5, n + 0.5)) for n in range(self.count)]
        return Table("some <b>rows</b>", ("name", "value"), rows)


def test_texts_are_escaped_and_long_tables_are_cut():
    html = Rows(MAX_ROWS + 1230)._repr_html_()
    assert "<script>" not in html
    assert "<b>" not in html
    assert html.count("&lt;script&gt;") == MAX_ROWS
    assert "and 1,230 more rows" in html
    assert "more rows" not in Rows(MAX_ROWS)._repr_html_()


def test_rows_become_a_data_frame(monkeypatch: pytest.MonkeyPatch):
    frame = SimpleNamespace(DataFrame=lambda rows, columns: (columns, rows))
    monkeypatch.setitem(sys.modules, "pandas", frame)
    columns, rows = Rows(30).to_pandas()
    assert columns == ["name", "value", "value low", "value high"]
    assert len(rows) == 30
    assert rows[2] == ["<script>", 2, 1.5, 2.5]
    table = hw.heads(small_gpt2(), make_examples(4))
    columns, rows = table.to_pandas()
    assert columns[:5] == ["site", "head", "class", "score", "entropy"]
    assert [row[:2] for row in rows] == [[head.site, head.head] for head in table.heads]
    assert [row[4] for row in rows] == [head.measures["entropy"].value for head in table.heads]


def test_without_pandas_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SpecError, match=r"cannot make a DataFrame without pandas; pip install pa"):
        Rows(1).to_pandas()
