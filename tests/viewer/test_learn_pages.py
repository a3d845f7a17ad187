"""Pages of `headwise learn` in a browser: sliders by keyboard, texts that cannot be read, reading
marks, and pages without a script or without storage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwise.learn.catalogue import Document, load_documents
from headwise.learn.document_page import DocumentPages
from headwise.learn.kernel_lookup import gaussian_weights, look_up
from headwise.learn.sliders import format_output, load_sliders, read_script

ENTRIES = ("004-1c", "004-2", "004-2b")
DENY_STORAGE = """
Object.defineProperty(window, "localStorage", { get() { throw new DOMException("denied"); } });
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of a course of one document with three entries, and of all sliders on one page."""
    if not read_script():
        pytest.skip("needs the script of the pages: make web")
    folder = tmp_path_factory.mktemp("course")
    (document,) = load_documents(["004"])
    entries = tuple(entry for entry in document.entries if entry.id in ENTRIES)
    list(DocumentPages([Document("004", document.title, entries)], "en").write(folder, True))
    text = (folder / "004.html").read_text()
    pages = DocumentPages([document], "zh")
    shown = [pages._show_sliders(id) for id in {slider.entry for slider in load_sliders()}]
    start, _, rest = text.partition("<main>")
    _, _, end = rest.partition("</main>")
    (folder / "all.html").write_text(f"{start}<main>{''.join(shown)}</main>{end}")
    return folder


def test_a_slider_moves_by_keyboard(folder: Path, page: Any):
    page.goto(f"{folder.as_uri()}/004.html")
    slider = page.locator("#slider-kernel_width")
    query = slider.get_by_role("slider", name="query q")
    assert slider.locator("[data-output=estimate]").inner_text() == "45.4"
    query.focus()
    page.keyboard.press("End")
    assert query.get_attribute("aria-valuetext") == "60"
    assert slider.locator("[data-output=estimate]").inner_text() == "47.09"
    assert format_output(look_up(gaussian_weights(2.0), 60.0)) == "47.09"
    assert slider.locator("svg[role=img]").count() == 2
    assert slider.locator(".start-note").is_hidden()


def test_pairs_that_cannot_be_read_are_named(folder: Path, page: Any):
    page.goto(f"{folder.as_uri()}/004.html")
    slider = page.locator("#slider-own_lookup")
    pairs = slider.get_by_role("textbox")
    for text in ("", "51", "51=x", "51=40=3"):
        pairs.fill(text)
        assert (
            slider.get_by_role("alert").inner_text() == "Write pairs of numbers, as 51=40, 56=43."
        )
    assert slider.locator("[data-output=estimate]").inner_text() == "–"
    assert slider.locator("[data-picture] svg").count() == 0
    assert pairs.get_attribute("aria-invalid") == "true"
    error = pairs.get_attribute("aria-describedby")
    assert slider.get_by_role("alert").get_attribute("id") == error
    pairs.fill("200=1")
    assert slider.get_by_role("alert").inner_text() == "Write keys from 0 to 100."
    pairs.fill("<b>=1")
    assert slider.locator("b").count() == 0
    pairs.fill("10=3, 20=5")
    assert slider.get_by_role("alert").is_hidden()
    assert slider.locator("[data-output=estimate]").inner_text() == "5"


def test_sections_that_were_read_are_marked_in_both_languages(folder: Path, page: Any):
    page.goto(f"{folder.as_uri()}/004.html")
    page.get_by_label("I have read this section").first.check()
    assert page.locator(".is-read:visible").all_inner_texts() == ["✓ read"]
    page.goto(f"{folder.as_uri()}/index.html")
    assert page.locator("[data-progress='004']").inner_text() == "1 of 6 sections read"
    page.get_by_role("link", name="中文").click()
    assert page.locator("[data-progress='004']").inner_text() == "已读 1 节\uff0c共 6 节"
    page.get_by_role("link", name="注意力就是查表").click()
    page.locator("input[data-read]").first.uncheck()
    assert page.locator(".is-read:visible").count() == 0


def test_the_other_language_opens_at_the_same_place(folder: Path, page: Any):
    page.goto(f"{folder.as_uri()}/004.html#004-2b")
    page.get_by_role("link", name="中文").click()
    assert page.url.endswith("/004.zh.html#004-2b")


def test_numbers_of_a_matrix_are_a_table(folder: Path, page: Any):
    page.goto(f"{folder.as_uri()}/all.html")
    slider = page.locator("#slider-own_sentence")
    slider.get_by_role("textbox").fill("山 上 山")
    slider.locator("summary").click()
    cells = [row.split() for row in slider.locator("tr").all_inner_texts()]
    assert cells[0] == ["山", "上", "山"]
    assert [row[0] for row in cells[1:]] == cells[0]
    assert cells[1][1] == cells[1][3] != cells[1][2]


def test_a_page_works_where_storage_is_denied(folder: Path, page: Any):
    page.add_init_script(DENY_STORAGE)
    page.goto(f"{folder.as_uri()}/004.html")
    assert page.locator("#slider-kernel_width svg").count() == 2
    assert page.get_by_label("I have read this section").first.is_hidden()


def test_commands_and_sources_have_a_button_that_copies(folder: Path, page: Any):
    page.goto(f"{folder.as_uri()}/004.html")
    command = page.locator("#\\30 04-2b .command")
    command.get_by_role("button", name="Copy").click()
    command.get_by_role("button", name="Copied").wait_for()
    page.locator("#\\30 04-2b summary", has_text="Source").click()
    assert page.locator("#\\30 04-2b details").get_by_role("button", name="Copy").is_visible()


def test_a_source_that_scrolls_on_a_phone_is_reached_by_keyboard(folder: Path, page: Any):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{folder.as_uri()}/004.html")
    page.locator("#\\30 04-2b summary", has_text="Source").click()
    source = page.locator("#\\30 04-2b pre[tabindex='0']")
    source.focus()
    assert source.evaluate("box => box === document.activeElement")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_sliders_draw_and_fit_a_phone(folder: Path, page: Any, scheme: str):
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{folder.as_uri()}/all.html")
    assert page.locator("[data-slider]").count() == len(load_sliders())
    pictures = page.locator("[data-picture]")
    assert pictures.count() == page.locator("[data-picture]:has(svg[role=img])").count()
    assert page.locator("text=NaN").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for box in page.get_by_role("slider").all():
        box.press("End")
        box.press("Home")
    assert page.locator("[data-picture] [d*=NaN], [data-picture] [y*=NaN]").count() == 0


def test_without_a_script_a_page_shows_the_start(folder: Path, browser: Any):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{folder.as_uri()}/004.html")
    slider = page.locator("#slider-kernel_width")
    assert slider.get_by_role("slider").count() == 0
    assert "To change them, enable JavaScript." in slider.inner_text()
    assert "Start values: query q: 56.9; width w: 2." in slider.inner_text()
    assert "45.4" in slider.inner_text()
    rows = slider.locator("tr").all_inner_texts()
    weights = format_output(gaussian_weights(2.0)(56.9, [51, 56, 58])).split()
    assert [row.split() for row in rows] == [
        ["51", "56", "58"],
        ["weights", "of", "the", "keys", *weights],
    ]
    assert page.get_by_label("I have read this section").first.is_hidden()
    context.close()
