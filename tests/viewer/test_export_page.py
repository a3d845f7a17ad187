"""The drawer of exports in a browser: figures, numbers, names, sizes, and lines that make the
figure again.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from headwise.cli.heads import main as run_heads
from headwise.cli.view import main as run_view
from headwise.observe import bundled_sample
from headwise.observe.traces import trace_from_weights
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view import render_export
from support.page_browser import served, wait_until

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</text><script>alert(2)</script>",
    "a\u202eb",
    "\u200b",
    "\x00",
    "&lt;",
    "\ud800",
    "]]>",
]
SITE = "decoder.1.attention"


def sample() -> OpenModel:
    return OpenModel(bundled_sample.load_sample_trace(), table=bundled_sample.load_sample_table())


def hostile_trace() -> OpenModel:
    count = len(HOSTILE)
    weights = np.tril(np.ones((1, 2, count, count))) / np.arange(1, count + 1)[:, None]
    return OpenModel(trace_from_weights([weights], HOSTILE))


def show(page: Any, address: str, screen: str) -> None:
    """Open a screen and then the drawer, by its key."""
    page.goto(address)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '#/{screen}'")
    page.wait_for_timeout(200)
    page.keyboard.press("e")
    page.locator(".figure-preview img").wait_for()


def save(page: Any, label: str, folder: Path) -> Path:
    """Press the button of a file, and save what the browser is given."""
    button = page.get_by_role("dialog").get_by_role(
        "button", name=re.compile(rf"^{re.escape(label)} ")
    )
    button.wait_for()
    wait_until(page, "!document.querySelector('.drawer .btn:not([title])[aria-disabled=true]')")
    with page.expect_download() as download:
        button.click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def cells(svg: ElementTree.Element) -> dict[tuple[int, int], str]:
    """The colour of every cell of a matrix by (query, key), from the paths of its figure."""
    group = next(
        part for part in svg.iter(f"{SVG}g") if part.get("shape-rendering") == "crispEdges"
    )
    found: dict[tuple[int, int], str] = {}
    for path in group.iter(f"{SVG}path"):
        for column, row, width in re.findall(r"M(\d+) (\d+)h(\d+)v1", path.get("d", "")):
            found |= {(int(row), int(column) + n): path.get("fill", "") for n in range(int(width))}
    return found


# --- figures --------------------------------------------------------------------------------------


def test_the_figure_of_a_head_has_its_weights_tokens_axes_and_title(page: Any, tmp_path: Path):
    opened = sample()
    with served(opened) as url:
        show(page, url, "head?site=4&head=3&scale=lin&theme=light")
        path = save(page, "SVG", tmp_path)
        png = save(page, "PNG", tmp_path).read_bytes()
        stops = page.evaluate(
            "[0, 8].map((n) => "
            "getComputedStyle(document.documentElement).getPropertyValue(`--seq-${n}`).trim())"
        )
    assert path.name == "headwise-dates-X0H3.svg"
    svg = ElementTree.fromstring(path.read_text("utf-8"))
    texts = [part.text for part in svg.iter(f"{SVG}text")]
    layer = opened.get_trace().layers[4]
    words = opened.get_trace().streams["text"][0].words
    assert texts[:2] == ["dates · Head X0 H3", f"{layer.name} · weight"]
    assert {"key (source)", "query (text)", "weight (linear)", "0.5", "1"} <= set(texts)
    assert set(words) - {" "} <= set(texts)
    weights, colours = opened.get_trace().head_weights(layer.name, 3), cells(svg)
    assert len(colours) == weights.size
    keys = weights.shape[1]
    darkest, lightest = (divmod(int(cell), keys) for cell in (weights.argmax(), weights.argmin()))
    assert weights.max() > 0.99
    assert (colours[darkest], colours[lightest]) == (stops[1], stops[0])
    width, height = (int(svg.get(name, "0")) for name in ("width", "height"))
    assert png.startswith(b"\x89PNG")
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (2 * width, 2 * height)


@pytest.mark.parametrize("screen", ["head", "head?form=lines", "head?form=arcs"])
def test_hostile_tokens_stay_text_in_a_figure(page: Any, tmp_path: Path, screen: str):
    with served(hostile_trace()) as url:
        show(page, url, screen)
        text = save(page, "SVG", tmp_path).read_text("utf-8")
    svg = ElementTree.fromstring(text)
    assert {part.tag.removeprefix(SVG) for part in svg.iter()} <= {
        *(
            "svg",
            "title",
            "desc",
            "g",
            "rect",
            "path",
            "text",
            "defs",
            "pattern",
            "linearGradient",
            "stop",
        )
    }
    assert not [
        name
        for part in svg.iter()
        for name in part.attrib
        if name.startswith("on") or "href" in name
    ]
    shown = [part.text or "" for part in svg.iter(f"{SVG}text")]
    assert [text for text in shown if text.startswith("<img")]
    assert "a⟨202e⟩b" in shown
    assert "⟨d800⟩" in shown
    assert "\u202e" not in text


# --- numbers --------------------------------------------------------------------------------------


def test_the_lines_and_the_command_make_the_figure_again(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = sample()
    expected = opened.get_trace().head_weights(SITE, 2)[2:12, 1:15]
    with served(opened) as url:
        show(page, url, "head?site=5&head=2&part=2.12.1.15")
        save(page, "Trace", tmp_path)
        python, shell, link = page.locator(".code-block code").all_inner_texts()
        assert link == page.url
        page.get_by_role("button", name="All heads").click()
        wait_until(
            page, "document.querySelector('.code-block code').textContent.includes('thumbnail')"
        )
        map_python, map_shell = page.locator(".code-block code").all_inner_texts()[:2]
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(python, namespace)
    np.testing.assert_allclose(namespace["weights"], expected, rtol=1e-6)
    assert list(namespace["keys"]) == list(opened.get_trace().streams["text"][0].words[1:15])
    assert (tmp_path / "figure.svg").is_file()
    command = shlex.split(shell)
    assert command[:2] == ["headwise", "heads"]
    assert run_heads(command[2:]) == 0
    assert (tmp_path / "figures").is_dir()
    exec(map_python, namespace)
    assert len(namespace["pictures"]) == 9
    command = shlex.split(map_shell)
    (tmp_path / "headwise-dates.html").unlink()
    assert run_view(command[2:]) == 0
    assert (tmp_path / "headwise-dates.html").is_file()


# --- without a server -----------------------------------------------------------------------------


def test_an_exported_file_saves_what_it_holds_and_says_what_it_cannot(page: Any, tmp_path: Path):
    opened = sample()
    expected = opened.get_trace().head_weights(SITE, 2)
    file = tmp_path / "page.html"
    file.write_text(render_export(opened), "utf-8")
    page.context.set_offline(True)
    show(page, file.as_uri(), "head?site=5&head=2")
    assert save(page, "SVG", tmp_path).read_text("utf-8").startswith("<svg")
    assert save(page, "PNG", tmp_path).read_bytes().startswith(b"\x89PNG")
    text = save(page, "CSV", tmp_path).read_text("utf-8")
    records = json.loads(save(page, "JSON", tmp_path).read_text("utf-8"))["weights"]
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert list(rows[0]) == list(records[0])
    for pairs in (rows, records):
        found = np.zeros_like(expected)
        for pair in pairs:
            found[int(pair["query"]), int(pair["key"])] = float(pair["weight"])
        np.testing.assert_array_equal(found, expected)
    measures = save(page, "Measures (CSV)", tmp_path).read_bytes()
    assert opened.table is not None
    assert measures.decode() == opened.table.to_csv()
    dialog = page.get_by_role("dialog")
    for label in ("NPZ", "Trace", "Page (HTML)"):
        assert dialog.get_by_role("button", name=label).get_attribute("aria-disabled") == "true"
    assert "cannot write NPZ files or traces" in dialog.inner_text()
    dialog.get_by_role("button", name="All heads").click()
    dialog.get_by_text("saves the weights of one head at a time").wait_for()


def test_the_drawer_opens_from_every_screen_and_gives_the_focus_back(page: Any):
    with served(sample()) as url:
        page.goto(url.replace("/#", "/?lang=en#"))
        page.get_by_role("gridcell").first.wait_for()
        for screen in (
            "open",
            "map",
            "head",
            "text",
            "classify",
            "similarity",
            "lab",
            "prune",
            "steps",
            "cost",
        ):
            page.evaluate(f"location.hash = '#/{screen}'")
            page.wait_for_timeout(150)
            button = page.get_by_role("button", name="Export")
            button.click()
            page.get_by_role("dialog", name="Export").wait_for()
            page.locator(".figure-preview img").wait_for()
            own = page.get_by_text("no figure of its own").count() == 0
            assert own == (screen in ("map", "head")), screen
            page.keyboard.press("Escape")
            page.get_by_role("dialog").wait_for(state="detached")
            wait_until(page, "document.activeElement.textContent.includes('Export')")
