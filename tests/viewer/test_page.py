"""The page in a browser: its numbers are the model's, and everything can be reached by labels and
by the keyboard.
"""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import headwise as hw
from headwise.observe.bundled_sample import load_sample_table
from headwise.observe.traces import trace_from_weights
from headwise.viewer.lab_actions import compute_effect
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view import render_export
from viewer.page_browser import sample_model, served, settled_box, wait_until
from viewer.page_models import GPT

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "a\u202eb",
    "\u200b",
    "\x00",
    "&lt;",
]


@pytest.fixture
def gpt() -> OpenModel:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, 21), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net)


# --- numbers --------------------------------------------------------------------------------------


def test_the_map_shows_every_head_of_the_sample(page: Any):
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        assert page.get_by_role("gridcell").count() == 54
        assert page.get_by_role("heading", name="Map").is_visible()
        assert "token=" not in page.url


def test_a_pointed_cell_has_the_exact_weight(page: Any, gpt: OpenModel):
    expected = gpt.get_trace().head_weights(gpt.heads[4][0], 1)
    with served(gpt) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/head?site=1&head=1&scale=lin'")
        matrix = page.get_by_role("application")
        matrix.wait_for()
        wait_until(page, "document.querySelector('.matrix-canvas canvas').width > 1")
        box = settled_box(page.locator(".matrix-canvas canvas"))
        cell = box["width"] / 21
        page.mouse.move(box["x"] + 3.5 * cell, box["y"] + 9.5 * cell)
        exact = page.get_by_test_id("exact")
        wait_until(
            page, "/\\d\\.\\d/.test(document.querySelector('[data-testid=exact]').textContent)"
        )
        shown = float(re.findall(r"[\d.]+(?:e-\d+)?$", exact.inner_text().strip())[0])
        assert shown == pytest.approx(float(expected[9, 3]), rel=1e-5)
        page.mouse.move(box["x"] + 12.5 * cell, box["y"] + 9.5 * cell)
        wait_until(
            page,
            "document.querySelector('[data-testid=exact]').textContent.includes('not allowed')",
        )


def test_pixels_of_the_matrix_are_the_weights(page: Any, gpt: OpenModel):
    """On a linear ramp the darkness of a pixel grows with the weight; masked cells are hatched."""
    expected = gpt.get_trace().head_weights(gpt.heads[0][0], 0)
    with served(gpt) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/head?site=0&head=0&scale=lin&theme=light'")
        page.get_by_role("application").wait_for()
        wait_until(page, "document.querySelector('.matrix-canvas canvas').width > 1")
        png = page.evaluate(
            "document.querySelector('.matrix-canvas canvas').toDataURL()"
        ).partition(",")[2]
        stops = page.evaluate(
            """() => { const style = getComputedStyle(document.documentElement);
            return [...Array(9)].map((_, i) => style.getPropertyValue(`--seq-${i}`).trim()); }"""
        )
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))
    colours = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops], float)
    zoom = image.shape[1] // 21
    for query, key in [(0, 0), (5, 2), (20, 20), (20, 0), (9, 9)]:
        step = round(expected[query, key] * 255) / 255 * 8
        low = min(int(step), 7)
        colour = colours[low] + (colours[low + 1] - colours[low]) * (step - low)
        assert np.abs(image[query * zoom, key * zoom, :3] - colour).max() <= 3
    masked = image[2 * zoom : 3 * zoom, 9 * zoom : 10 * zoom, :3].reshape(-1, 3)
    assert len({tuple(pixel) for pixel in masked.tolist()}) == 2


def test_the_lab_shows_what_the_model_gives(page: Any, gpt: OpenModel):
    expected = compute_effect(gpt, {"heads": [[1, 2]]}, JobProgress(Job("test", {})))
    with served(gpt) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.get_by_role("link", name="Lab").click()
        page.get_by_role("switch", name="L1 H2").click()
        page.get_by_role("switch", name="L1 H2", checked=False).wait_for()
        page.get_by_text("1 head is off: before → after").wait_for()
        effect = page.get_by_test_id("effect")
        after = f"{expected['loss']['after']:.2f}"
        effect.get_by_text(after).first.wait_for()
        assert after in effect.inner_text()
        page.get_by_role("link", name="Cost").click()
        page.get_by_text("1 head is off", exact=True).wait_for()
        page.get_by_role("button", name="Switch on").click()
        page.get_by_text("1 head is off", exact=True).wait_for(state="detached")


def test_a_head_stays_off_when_measures_come_after_the_click(page: Any, gpt: OpenModel):
    asked: list[Any] = []

    def answer_first(route: Any) -> None:
        asked.append(route)
        if len(asked) != 2:
            route.continue_()

    page.route("**/api/measures", answer_first)
    with served(gpt) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        while len(asked) < 2:  # what the page asks when the heads have been measured
            page.wait_for_timeout(20)
        page.get_by_role("link", name="Lab").click()
        page.get_by_role("switch", name="L1 H2").click()
        page.get_by_role("switch", name="L1 H2", checked=False).wait_for()
        with page.expect_response("**/api/thumbnails"):
            asked[1].continue_()
        page.wait_for_timeout(200)
        assert page.get_by_role("switch", name="L1 H2", checked=False).count() == 1
        page.unroute_all(behavior="ignoreErrors")


def test_a_screen_says_that_the_server_has_stopped(page: Any, gpt: OpenModel):
    with served(gpt) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.wait_for_load_state("networkidle")
    page.get_by_role("link", name="Lab").click()
    page.get_by_role("alert").wait_for()
    assert "The server does not answer" in page.get_by_role("alert").inner_text()


# --- hands ----------------------------------------------------------------------------------------


def test_the_keyboard_alone_walks_through_the_screens(page: Any):
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        for digit, heading in [
            *(("1", "What is open"), ("3", "Head E0 H0"), ("4", "Text"), ("5", "Class")),
            ("6", "Similar heads"),
            ("7", "Lab"),
            ("8", "Prune & convert"),
            *(("9", "Steps E0 H0"), ("0", "Compare two runs"), ("-", "Cost"), ("2", "Map")),
        ]:
            page.keyboard.press(digit)
            page.get_by_role("heading", name=heading, exact=True).wait_for()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        wait_until(page, "document.querySelector('.head-name').textContent === 'E1 H1'")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Head E1 H1", exact=True).wait_for()
        page.keyboard.press("2")
        page.keyboard.press("t")
        page.get_by_role("table").first.wait_for()
        page.keyboard.press("t")
        page.keyboard.press("?")
        page.get_by_role("dialog", name="Keys").wait_for()
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        commands = page.get_by_role("combobox", name="Commands")
        commands.wait_for()
        wait_until(page, "document.activeElement.getAttribute('role') === 'combobox'")
        page.keyboard.type("X2 H5")
        page.get_by_role("option", name="X2 H5").wait_for()
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelector('.head-name').textContent === 'X2 H5'")
        assert page.get_by_role("dialog").count() == 0


def test_an_address_restores_what_it_shows(page: Any):
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/head?site=4&head=3&form=lines&scale=log&theme=dark'")
        page.get_by_role("heading", name="Head X0 H3").wait_for()
        address = page.url
        page.reload()
        page.get_by_role("heading", name="Head X0 H3").wait_for()
        assert page.url == address
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.get_by_role("button", name="Lines").get_attribute("aria-pressed") == "true"
        page.get_by_role("link", name="Map").click()
        page.get_by_role("heading", name="Map").wait_for()
        page.go_back()
        page.get_by_role("heading", name="Head X0 H3").wait_for()


def test_a_newcomer_finds_ablates_and_exports_the_most_sink_like_head_by_labels_alone(
    page: Any, tmp_path: Path
):
    """Every step names a label that is to be seen; nothing is known about the page beforehand."""
    opened = sample_model()
    assert opened.table is not None
    best = opened.table.sorted_by("sink")[0]
    with served(opened) as url:
        page.goto(url)
        page.get_by_role("button", name="Table").click()
        page.get_by_role("button", name="sink", exact=True).last.click()
        page.get_by_role("row").nth(1).click()
        name = page.locator(".head-name").inner_text()
        assert page.get_by_text(best.site, exact=True).is_visible()
        assert name.endswith(f" H{best.head}")
        page.get_by_role("button", name="Show this head", exact=True).click()
        page.get_by_role("heading", name=f"Head {name}").wait_for()
        page.get_by_role("button", name="Ablate").click()
        page.get_by_role("button", name="Restore").wait_for()
        page.get_by_role("link", name="Lab").click()
        page.get_by_text("1 of 54 heads off").wait_for()
        page.get_by_test_id("effect").wait_for(timeout=60_000)
        effect = page.get_by_test_id("effect").inner_text()
        page.get_by_role("link", name="Head", exact=True).click()
        page.get_by_role("button", name="Export").click()
        figure = page.get_by_role("dialog", name="Export").get_by_role("button", name="SVG")
        with page.expect_download(timeout=60_000) as download:
            figure.click()
        download.value.save_as(tmp_path / "figure.svg")
    loss = re.search(r"loss, nats per token\s+([\d.e-]+) → ([\d.e-]+)", effect)
    assert loss is not None
    assert loss[1] != loss[2]
    assert re.search(r"KL.*\s+[1-9][\d.]*(e-\d+)?|KL.*\s+0\.\d*[1-9]", effect)
    assert download.value.suggested_filename == f"headwise-dates-{best.site}-{best.head}.svg"
    title = f">dates: {name.replace(' ', '')}, {best.site} head {best.head}<"
    assert title in (tmp_path / "figure.svg").read_text("utf-8")


# --- what is hostile, missing, or small -----------------------------------------------------------


def hostile_trace() -> OpenModel:
    count = len(HOSTILE)
    weights = np.tril(np.ones((1, 2, count, count))) / np.arange(1, count + 1)[:, None]
    return OpenModel(trace_from_weights([weights], HOSTILE))


def test_hostile_tokens_stay_text(page: Any):
    with served(hostile_trace()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        for screen in ("head", "head?form=lines", "head?form=arcs", "text", "open"):
            page.evaluate(f"location.hash = '#/{screen}'")
            page.wait_for_timeout(150)
        assert page.locator(".toks img").count() == 0
        tokens = page.locator(".tok").all_inner_texts()
        assert tokens[0].startswith("<img")
        assert "⟨202e⟩" in tokens[2]
        assert tokens[3] == "⟨200b⟩"


def test_an_export_opens_from_the_disk_without_a_network(page: Any, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(render_export(hostile_trace()), encoding="utf-8")
    page.context.set_offline(True)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.get_by_role("gridcell").first.wait_for()
    page.get_by_role("gridcell").first.dblclick()
    page.get_by_role("heading", name="Head L0 H0").wait_for()
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowDown")
    wait_until(page, "document.querySelector('[data-testid=exact]').textContent.includes('0.5')")
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_saved_page_of_a_real_model_opens(page: Any):
    """The file that the README and the site link to, as a visitor opens it."""
    path = Path(__file__).parents[2] / "docs/findings/smollm2-heads.html"
    assert path.stat().st_size <= 3_000_000
    page.context.set_offline(True)
    page.goto(path.as_uri())
    page.get_by_role("gridcell").first.wait_for()
    assert page.get_by_role("gridcell").count() == 270
    wait_until(page, "Number(/induction\\s+(\\d+)/.exec(document.body.innerText)[1]) > 10")


def test_no_screen_scrolls_sideways(page: Any):
    """From a small phone to a screen of 4k, on every screen that the rail names."""
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        screens = (
            page.get_by_role("navigation")
            .get_by_role("link")
            .evaluate_all("all => all.map((a) => a.hash)")
        )
        assert len(screens) >= 11
        for width in (320, 1280, 3840):
            page.set_viewport_size({"width": width, "height": 900})
            for screen in screens:
                page.evaluate(f"location.hash = '{screen}'")
                page.get_by_role("heading", level=1).first.wait_for()
                page.wait_for_timeout(60)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (
                    screen,
                    width,
                )


def test_the_page_in_chinese(page: Any):
    with served(sample_model(with_model=False)) as url:
        page.goto(url.replace("/#", "/?lang=zh#"))
        page.get_by_role("heading", name="总览").wait_for()
        assert page.evaluate("document.documentElement.lang") == "zh"
        page.reload()
        page.get_by_role("heading", name="总览").wait_for()


def test_the_page_in_chinese_says_why_a_head_has_its_class(page: Any):
    with served(sample_model()) as url:
        page.goto(url.replace("/#", "/?lang=zh#"))
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/head?site=6&head=1'")
        evidence = page.locator("p.evidence:visible").first
        evidence.get_by_text("随机水平").wait_for()
        assert "aligns words" not in evidence.inner_text()


def test_heads_are_shown_beside_their_sinks_or_as_sinks(page: Any):
    table = load_sample_table()
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("button", name="Sinks first").wait_for()
        legend = page.locator(".legend").first
        for shown in (table, table.with_sinks_first()):
            count = sum(head.classes[0].name == "sink" for head in shown.heads)
            legend.get_by_role("button", name=f"sink {count}").wait_for()
            assert page.get_by_role("button", name="Sinks first").get_attribute("aria-pressed") == (
                "true" if shown is not table else "false"
            )
            page.keyboard.press("s")
        wait_until(page, "!location.hash.includes('sinks=')")
