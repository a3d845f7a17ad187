"""The drawer of exports in a browser: files with their names, and the link to what is shown."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from headwise.viewer.view import render_export
from support.page_browser import sample_model, served, wait_until

SITE = "decoder.1.attention"


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
    assert files["SVG"].name == f"headwise-dates-{SITE}-2.svg"
    texts = [part.text for part in ElementTree.fromstring(files["SVG"].read_text("utf-8")).iter()]
    assert f"dates: {SITE} head 2" in texts
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(files["CSV"].read_text("utf-8"), newline="")))
    assert {(row["site"], row["head"]) for row in rows} == {(SITE, "2")}
    assert opened.table is not None
    assert files["Measures (CSV)"].read_bytes().decode() == opened.table.to_csv()


def test_an_exported_file_says_that_it_is_one(page: Any, tmp_path: Path):
    file = tmp_path / "page.html"
    file.write_text(render_export(sample_model(with_model=False)), "utf-8")
    page.context.set_offline(True)
    dialog = show(page, file.as_uri(), "head?site=5&head=2")
    assert "already one file" in dialog.inner_text()
    assert "site=5" in dialog.get_by_test_id("link").inner_text()
