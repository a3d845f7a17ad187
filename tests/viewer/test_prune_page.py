"""The Prune & convert screen in a browser: its labels lead to a new folder, and its proof is that
of the folder.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from headwise.hub.pretrained_models import load
from headwise.viewer import bundled_sample, surgery_actions
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view import Target, open_target
from support.page_browser import served


@pytest.fixture(autouse=True)
def brief_timings(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs measure speed only briefly, but have more time on a busy machine."""
    monkeypatch.setattr(surgery_actions, "TIMING_SECONDS", 0.05)
    page.set_default_timeout(60_000)


def show_screen(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.get_by_role("link", name="Prune").click()
    page.get_by_role("heading", name="Prune & convert").wait_for()


def read_row(page: Any, test_id: str, name: str) -> list[str]:
    """The cells of the first row that begins with a name."""
    row = page.get_by_test_id(test_id).get_by_role("row").filter(has_text=name).first
    return [cell.inner_text() for cell in row.get_by_role("cell").all()]


def count_parameters(folder: Path) -> int:
    return sum(parameter.numel() for parameter in load(folder).parameters())


def test_heads_that_are_off_in_the_lab_are_pruned_and_proved(page: Any, tmp_path: Path):
    with served(open_target(Target(out=tmp_path))) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.get_by_role("link", name="Lab").click()
        page.get_by_role("switch", name="X0 H3").click()
        page.get_by_role("link", name="Prune").click()
        page.get_by_role("switch", name="E0 H1").click()
        switches = page.get_by_role("switch", checked=False)
        assert [switch.get_attribute("aria-label") for switch in switches.all()] == [
            "E0 H1",
            "X0 H3",
        ]
        page.get_by_test_id("sizes-now").get_by_text("638,112").wait_for()
        page.get_by_role("button", name="Compute the plan").click()
        page.get_by_test_id("planned").wait_for()
        planned = read_row(page, "planned", "parameters")
        page.get_by_role("button", name="Prune and prove").click()
        proof = page.get_by_test_id("proof")
        proof.wait_for()
        assert "Proved: outputs equal up to rounding in 3 of 3 checks" in proof.inner_text()
        assert page.get_by_test_id("folder").inner_text() == str(tmp_path / "pruned")
        shown = read_row(page, "proof", "parameters")
        words = shlex.split(page.get_by_test_id("command").inner_text())
    assert planned == shown
    assert shown[1:3] == ["638,112", f"{count_parameters(tmp_path / 'pruned'):,}"]
    assert words[:3] == ["headwise", "prune", str(bundled_sample.MODEL)]
    assert words[words.index("--heads") + 1 : words.index("--data")] == [
        "decoder.0.cross:3",
        "encoder.0.attention:1",
    ]
    record = json.loads((tmp_path / "pruned" / "heads.json").read_text())
    assert record["change"]["keep"]["encoder.0.attention"] == [0, 2, 3, 4, 5]


def test_a_share_shows_which_heads_go_before_anything_is_written(page: Any, tmp_path: Path):
    with served(open_target(Target(out=tmp_path / "out"))) as url:
        show_screen(page, url)
        page.get_by_test_id("sizes-now").get_by_text("638,112").wait_for()
        page.get_by_role("button", name="Method and share").click()
        page.get_by_label("ranked by").select_option("random")
        page.get_by_text("Compute the plan to see which heads go.").wait_for()
        page.get_by_role("button", name="Compute the plan").click()
        page.get_by_text("27 of 54 heads stay").wait_for()
        assert page.get_by_role("switch", checked=False).count() == 27
        page.get_by_role("switch", checked=True).first.click()
        page.get_by_text("26 of 54 heads stay").wait_for()
        assert (
            page.get_by_role("button", name="Off in the Lab").get_attribute("aria-pressed")
            == "true"
        )
    assert not (tmp_path / "out").exists()


def test_heads_are_pooled_to_the_number_that_is_chosen(page: Any, tmp_path: Path):
    with served(open_target(Target(out=tmp_path))) as url:
        show_screen(page, url)
        page.get_by_test_id("sizes-now").get_by_text("638,112").wait_for()
        page.get_by_role("button", name="Convert", exact=True).click()
        assert (
            "its own key-value head already"
            in page.get_by_text("one for each query head").last.inner_text()
        )
        page.get_by_role("button", name="2", exact=True).click()
        page.get_by_role("button", name="Convert and prove").click()
        page.get_by_test_id("proof").wait_for()
        assert read_row(page, "proof", "decoder.1.cross")[1:] == ["6", "6 → 2", "0 1 2 | 3 4 5"]
    assert {spec.heads.kv for _, spec in load(tmp_path / "converted").spec.attention_specs()} == {2}


def test_a_folder_that_exists_is_refused_with_a_remedy(page: Any, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    with served(open_target(Target(out=tmp_path))) as url:
        show_screen(page, url)
        page.get_by_role("switch", name="D1 H4").click()
        page.get_by_test_id("sizes-now").get_by_text("638,112").wait_for()
        page.get_by_label("Folder").fill("mine")
        page.get_by_role("button", name="Prune and prove").click()
        alert = page.get_by_role("alert")
        alert.wait_for()
        assert "the folder mine exists" in alert.inner_text()
        assert "choose another name" in alert.inner_text()
        assert page.get_by_test_id("proof").count() == 0


def test_a_page_that_may_not_write_still_plans(page: Any):
    with served(open_target(Target(out=None))) as url:
        show_screen(page, url)
        page.get_by_role("switch", name="D1 H4").click()
        page.get_by_text("--read-only").wait_for()
        assert (
            page.get_by_role("button", name="Prune and prove").get_attribute("aria-disabled")
            == "true"
        )
        page.get_by_test_id("sizes-now").get_by_text("638,112").wait_for()
        page.get_by_role("button", name="Compute the plan").click()
        page.get_by_test_id("planned").wait_for()
        assert read_row(page, "planned", "parameters")[1] == "638,112"


def test_a_trace_says_that_it_needs_the_model(page: Any):
    with served(OpenModel(bundled_sample.load_sample_trace())) as url:
        show_screen(page, url)
        page.get_by_text("This needs the model.").wait_for()
        assert (
            page.get_by_role("button", name="Compute the plan").get_attribute("aria-disabled")
            == "true"
        )


@pytest.mark.parametrize("width", [390, 1280])
def test_the_screen_fits_its_window_in_both_languages(page: Any, width: int):
    page.set_viewport_size({"width": width, "height": 844})
    with served(open_target(Target(out=None))) as url:
        show_screen(page, url)
        page.get_by_test_id("sizes-now").get_by_text("638,112").wait_for()
        page.get_by_role("switch", name="D1 H4").click()
        page.get_by_role("button", name="Compute the plan").click()
        page.get_by_test_id("planned").wait_for()
        for language in ("en", "zh"):
            assert page.evaluate("document.documentElement.scrollWidth") <= width, language
            page.get_by_role("button", name="中文" if language == "en" else "English").click()
