"""Files that the page saves: the library's numbers, names that are safe, limits that hold."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from starlette.testclient import TestClient

from headwise.observe import bundled_sample
from headwise.observe.head_analysis.head_table import CLASS_STYLES
from headwise.observe.traces import load_trace, trace_from_weights
from headwise.viewer import export_files
from headwise.viewer.export_files import ExportScope, FileTooLarge, draw_head, make_file
from headwise.viewer.open_model import OpenModel, TileRange
from headwise.viewer.server import SecurityMiddleware, ViewServer, allowed_hosts
from headwise.viewer.view import render_export
from headwise.viewer.weight_summaries import make_file_stem
from support.refusals import refused_cases
from viewer.page_browser import exported_data, sample_model, served, wait_until

HOST, TOKEN = "127.0.0.1:8000", "a-secret"


STATIC = {"/index.html": (b"<!doctype html>", "text/html")}


SITE = "encoder.0.attention"


ALL_HEADS = ExportScope()


@pytest.fixture(scope="module")
def sample() -> OpenModel:
    return OpenModel(bundled_sample.load_sample_trace(), table=bundled_sample.load_sample_table())


def connect(opened: OpenModel) -> TestClient:
    app = SecurityMiddleware(
        ViewServer(opened, STATIC).app(), allowed_hosts("127.0.0.1", 8000), TOKEN
    )
    return TestClient(app, base_url=f"http://{HOST}", headers={"X-Session-Token": TOKEN})


def contents(opened: OpenModel, kind: str, scope: ExportScope = ALL_HEADS) -> bytes:
    return b"".join(make_file(opened, kind, scope).pieces)


def test_csv_and_json_have_the_weights_of_one_head(sample: OpenModel):
    expected = sample.get_trace().head_weights(SITE, 3)
    scope = ExportScope(SITE, 3)
    rows = list(csv.DictReader(io.StringIO(contents(sample, "csv", scope).decode(), newline="")))
    records = json.loads(contents(sample, "json", scope))["weights"]
    for pairs in (rows, records):
        found = np.zeros_like(expected)
        for pair in pairs:
            assert (pair["site"], int(pair["head"])) == (SITE, 3)
            found[int(pair["query"]), int(pair["key"])] = float(pair["weight"])
        np.testing.assert_array_equal(found, expected)
    words = sample.get_trace().streams["source"][0].words
    assert rows[5]["key_token"] == words[int(rows[5]["key"])]


def test_npz_has_the_weights_of_one_head_and_of_all(sample: OpenModel):
    trace = sample.get_trace()
    one = np.load(io.BytesIO(contents(sample, "npz", ExportScope(SITE, 3))))
    assert list(one) == [SITE]
    np.testing.assert_array_equal(one[SITE][0, 0], trace.head_weights(SITE, 3))
    every = np.load(io.BytesIO(contents(sample, "npz")))
    assert list(every) == [layer.name for layer in trace.layers]
    np.testing.assert_array_equal(
        every["decoder.1.cross"][0, 4], trace.head_weights("decoder.1.cross", 4)
    )


def test_small_weights_are_left_out(sample: OpenModel):
    scope = ExportScope(SITE, 3, 0.25)
    rows = list(csv.DictReader(io.StringIO(contents(sample, "csv", scope).decode(), newline="")))
    assert len(rows) == (sample.get_trace().head_weights(SITE, 3) >= 0.25).sum() > 0


def test_the_trace_opens_again(sample: OpenModel, tmp_path: Path):
    (tmp_path / "a.trace").write_bytes(contents(sample, "trace"))
    again = load_trace(tmp_path / "a.trace")
    np.testing.assert_array_equal(
        again.head_weights(SITE, 1), sample.get_trace().head_weights(SITE, 1)
    )


def test_the_table_of_measures(sample: OpenModel):
    rows = list(csv.DictReader(io.StringIO(contents(sample, "measures").decode(), newline="")))
    assert sample.table is not None
    head = sample.table.head(SITE, 2)
    found = {row["measure"]: row for row in rows if (row["site"], row["head"]) == (SITE, "2")}
    assert set(found) == set(head.measures)
    assert float(found["entropy"]["value"]) == head.measures["entropy"].value
    assert float(found["entropy"]["low"]) == head.measures["entropy"].low
    assert found["entropy"]["class"] == head.classes[0].name
    assert not [row for row in rows if "nan" in row.values()]


def test_the_page_is_one_file(sample: OpenModel):
    page = contents(sample, "html").decode()
    assert page.startswith("<!doctype html>")
    assert "/api/measures" in exported_data(page)["answers"]


def test_the_figure_of_a_head_has_its_tokens_axes_and_weights(sample: OpenModel):
    trace = sample.get_trace()
    layer = trace.layers[4]
    part = TileRange(slice(2, 12), slice(0, layer.num_keys))
    figure = draw_head(sample, ExportScope(layer.name, 3, part=part))
    (panel,) = figure.panels
    assert figure.title == "dates: X0H3, decoder.0.cross head 3"
    assert (panel.x_label, panel.y_label) == ("key (source)", "query (text)")
    assert list(panel.rows) == list(trace.streams["text"][0].words[2:12])
    assert list(panel.columns) == list(trace.streams["source"][0].words)
    np.testing.assert_allclose(
        panel.values, trace.head_weights(layer.name, 3)[2:12], rtol=0, atol=1 / 255
    )
    lines = draw_head(sample, ExportScope(layer.name, 3, lens="value", form="lines"))
    values = sample.weights(layer.name, 3, slice(None), lens="value")
    drawn = lines.panels[0].weights["value"]
    np.testing.assert_allclose(drawn, values / values.max(), rtol=0, atol=1 / 255)


@pytest.mark.parametrize("scope", [ExportScope(), ExportScope(SITE, 3, theme="dark")])
def test_figures_are_pictures_in_the_theme(sample: OpenModel, scope: ExportScope):
    svg = ElementTree.fromstring(contents(sample, "svg", scope))
    assert svg.tag.endswith("svg")
    assert any(part.text == "encoder.0.attention  E0" for part in svg.iter()) == (not scope.site)
    png = contents(sample, "png", scope)
    assert png.startswith(b"\x89PNG")


def test_the_page_shows_classes_with_the_letters_names_and_colours_of_figures():
    """Of a class, the page, a figure and a table show one letter, one name and one colour."""
    web = Path(export_files.__file__).with_name("web") / "src"
    css = (web / "styles" / "tokens.css").read_text("utf-8")
    badges = (web / "components" / "class_badge.tsx").read_text("utf-8")
    colours = dict(re.findall(r"--c-(\w):(#\w+);", css))
    shown = dict(re.findall(r'\b(\w): "([a-z-]+)"[,\n ]', badges))
    outlines = re.findall(r'^  (\w): "M', badges, re.MULTILINE)
    styles = {
        letter.replace("·", "u").lower(): (name, colour.lower())
        for name, (letter, colour) in CLASS_STYLES.items()
    }
    assert {letter: (name, colours.get(letter, "")) for letter, name in shown.items()} == styles
    assert outlines == list(styles)


def test_hostile_tokens_stay_text_in_a_figure():
    words = ["<img src=x onerror=alert(1)>", "</text><script>", "a\u202eb", "\x00", "\ud800", "]]>"]
    weights = np.tril(np.ones((1, 1, 6, 6))) / np.arange(1, 7)[:, None]
    opened = OpenModel(trace_from_weights([weights], words))
    site = opened.get_trace().layers[0].name
    for form in ("matrix", "lines"):
        text = contents(opened, "svg", ExportScope(site, 0, form=form)).decode()
        svg = ElementTree.fromstring(text)
        tags = {part.tag.rpartition("}")[2] for part in svg.iter()}
        assert not tags & {"script", "img", "foreignObject"}
        assert not [name for part in svg.iter() for name in part.attrib if name.startswith("on")]
        assert "\u202e" not in text


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "a/b\\c",
        'x"\r\nSet-Cookie: a=b',
        "日期",
        "",
        ".",
        "con",
        "a" * 500,
        "a\u202egnp.exe",
        "\ud800",
    ],
)
def test_names_of_files_are_safe(name: str):
    assert re.fullmatch(
        r"headwise-[A-Za-z0-9]([A-Za-z0-9.-]{0,58}[A-Za-z0-9])?", make_file_stem(name)
    )


def test_a_file_that_no_browser_can_hold_is_refused(sample, monkeypatch):
    monkeypatch.setattr(export_files, "MAX_EXPORT_BYTES", 1000)
    with pytest.raises(FileTooLarge, match="save one head"):
        make_file(sample, "csv", ExportScope())
    answer = connect(sample).get("/api/export?kind=csv")
    assert answer.status_code == 413
    assert "headwise trace" in answer.json()["error"]["remedy"]


def test_measures_that_were_not_made_are_refused():
    opened = OpenModel(trace_from_weights([np.eye(3)[None, None]]))
    for kind in ("measures", "svg"):
        answer = connect(opened).get(f"/api/export?kind={kind}")
        assert (answer.status_code, answer.json()["error"]["remedy"]) == (400, "measure them first")


def test_the_route_sends_a_file_to_save(sample: OpenModel):
    answer = connect(sample).get("/api/export?kind=csv&site=0&head=3")
    assert answer.status_code == 200
    assert answer.headers["content-disposition"] == (
        'attachment; filename="headwise-dates-encoder.0.attention-3.csv"'
    )
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.content == contents(sample, "csv", ExportScope(SITE, 3))
    html = connect(sample).get("/api/export?kind=html")
    assert html.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(("query", "fact"), refused_cases(__file__, "exports", globals()))
def test_bad_requests_are_explained(sample: OpenModel, query: str, fact: str):
    answer = connect(sample).get(f"/api/export?{query}")
    assert answer.status_code == 400
    assert fact in answer.json()["error"]["fact"]
    assert answer.json()["error"]["remedy"]


def test_hostile_tokens_are_fields_of_the_table():
    words = ['a"b', "c,d", "e\nf", "\ud800"]
    opened = OpenModel(trace_from_weights([np.full((1, 1, 4, 4), 0.25)], words))
    text = contents(opened, "csv").decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["key_token"] for row in rows[:4]] == ['a"b', "c,d", "e\nf", "\\ud800"]
    assert json.loads(contents(opened, "json"))["weights"][3]["key_token"] == "\ud800"


# --- the drawer of exports in a browser ---


PAGE_SITE = "decoder.1.attention"


def show(page: Any, address: str, screen: str) -> Any:
    """Open a screen and then the drawer, by its key."""
    page.goto(address)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '#/{screen}'")
    page.wait_for_timeout(200)
    page.keyboard.press("e")
    dialog = page.get_by_role("dialog", name="Export")
    dialog.wait_for()
    return dialog


def test_files_of_the_selected_head_are_saved(page: Any, tmp_path: Path):
    opened = sample_model(with_model=False)
    with served(opened) as url:
        dialog = show(page, url, "head?site=5&head=2&part=2.12.1.15&theme=dark")
        assert dialog.get_by_test_id("link").inner_text() == page.url
        files = {}
        for label in ("SVG", "PNG", "CSV", "NPZ", "Trace", "Measures (CSV)"):
            wait_until(page, "!document.querySelector('.drawer .btn[aria-disabled=true]')")
            with page.expect_download(timeout=60_000) as download:
                dialog.get_by_role("button", name=label, exact=True).click()
            download.value.save_as(tmp_path / download.value.suggested_filename)
            files[label] = tmp_path / download.value.suggested_filename
    assert files["SVG"].name == f"headwise-dates-{PAGE_SITE}-2.svg"
    texts = [part.text for part in ElementTree.fromstring(files["SVG"].read_text("utf-8")).iter()]
    assert f"dates: D1H2, {PAGE_SITE} head 2" in texts
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(files["CSV"].read_text("utf-8"), newline="")))
    assert {(row["site"], row["head"]) for row in rows} == {(PAGE_SITE, "2")}
    assert opened.table is not None
    assert files["Measures (CSV)"].read_bytes().decode() == opened.table.to_csv()


def test_an_exported_file_says_that_it_is_one(page: Any, tmp_path: Path):
    file = tmp_path / "page.html"
    file.write_text(render_export(sample_model(with_model=False)), "utf-8")
    page.context.set_offline(True)
    dialog = show(page, file.as_uri(), "head?site=5&head=2")
    assert "already one file" in dialog.inner_text()
    assert "site=5" in dialog.get_by_test_id("link").inner_text()
