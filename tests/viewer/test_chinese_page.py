"""The Chinese interface: no screen, error or progress line of the page has an English sentence."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headwise.viewer import server
from headwise.viewer.model_worker import JobProgress, describe_error
from headwise.viewer.open_model import OpenModel
from support.page_browser import sample_model, served, wait_until

FAILED = describe_error(ValueError("there is no site 9: the trace has 3; give 0 to 2"))

# Texts of the page that are neither code nor tokens, in which two English words stand together.
ENGLISH_TEXTS = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const holder = node.parentElement;
    if (holder.closest('code, .mono, .chip, .tok, .pair-row, script, style, noscript')) continue;
    if (holder.closest('[lang=en], textarea, option, svg')) continue;
    const text = node.data.replace(/`[^`]*`/g, '');
    if (/[a-z]{2,} [a-z]{2,}/.test(text)) found.add(text);
  }
  return [...found];
}"""


def open_chinese(page: Any, url: str) -> None:
    page.goto(url.replace("/#", "/?lang=zh#"))
    page.get_by_role("gridcell").first.wait_for()


def wait_for_chinese(page: Any, address: str) -> None:
    page.evaluate(f"location.hash = '{address}'")
    page.get_by_role("heading", level=1).first.wait_for()
    wait_until(page, "!document.querySelector('.jobs .note:not(.bad)')")
    wait_until(page, f"({ENGLISH_TEXTS})().length === 0")


@pytest.mark.parametrize("with_model", [True, False])
def test_no_screen_has_an_english_sentence_in_chinese(page: Any, with_model: bool):
    with served(sample_model(with_model=with_model)) as url:
        open_chinese(page, url)
        screens = (
            page.get_by_role("navigation")
            .get_by_role("link")
            .evaluate_all("all => all.map((a) => a.hash)")
        )
        assert len(screens) >= 11
        for address in (
            *screens,
            "#/classify?table=1",
            "#/map?table=1",
            "#/head?table=1",
            "#/steps?table=1",
        ):
            wait_for_chinese(page, address)


def test_an_error_is_chinese(page: Any):
    with served(sample_model()) as url:
        open_chinese(page, url)
        events = f"data: {json.dumps({'state': 'failed', 'error': FAILED})}\n\n"
        page.route(
            "**/api/jobs/*/events",
            lambda route: route.fulfill(content_type="text/event-stream", body=events),
        )
        page.evaluate("location.hash = '#/cost'")
        page.get_by_role("button", name="计算开销").click()
        alert = page.get_by_role("alert")
        alert.get_by_text("没有编号为 9 的层").wait_for()
        assert alert.inner_text().splitlines()[-1] == "请给出 0 到 2"


def test_progress_is_chinese(page: Any, monkeypatch: pytest.MonkeyPatch):
    is_seen = threading.Event()

    def slow_cost(model: OpenModel, arguments: Any, progress: JobProgress) -> dict[str, Any]:
        progress(1, 3, "3 heads ablated")
        is_seen.wait(30)
        return {"rows": [], "notes": [], "workload": {}}

    monkeypatch.setitem(server.ALL_JOBS, "cost", slow_cost)
    with served(sample_model()) as url:
        open_chinese(page, url)
        page.evaluate("location.hash = '#/cost'")
        page.get_by_role("button", name="计算开销").click()
        page.get_by_text("1 / 3 已消融 3 个头").wait_for()
        assert page.get_by_text("heads ablated").count() == 0
        is_seen.set()


@pytest.mark.parametrize("language", ["", "zh"])
def test_an_exported_file_holds_its_translations(language: str, page: Any, tmp_path: Path):
    """The address or the file says that it opens in Chinese."""
    from headwise.viewer.view import render_export

    (tmp_path / "page.html").write_text(
        render_export(sample_model(with_model=False), language), encoding="utf-8"
    )
    page.goto((tmp_path / "page.html").as_uri() + ("" if language else "?lang=zh"))
    page.get_by_role("gridcell").first.wait_for()
    wait_for_chinese(page, "#/open")
    page.get_by_text("查询和键").first.wait_for()
    assert page.get_by_text("queries and keys").count() == 0
    wait_for_chinese(page, "#/classify")
