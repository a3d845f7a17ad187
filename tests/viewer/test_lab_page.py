"""The Lab in a browser: undo, recipes, curves, and a job that fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwise.viewer.lab_actions import remove_greedily
from headwise.viewer.model_worker import Job, JobProgress
from support.page_browser import sample_model, served, wait_until


def open_lab(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.get_by_role("link", name="Lab").click()
    page.get_by_role("heading", name="Lab").wait_for()


def heads_off(page: Any) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('.switch[aria-checked=false]')].map((one) => "
        "one.getAttribute('aria-label'))"
    )


def test_a_recipe_is_written_and_loaded(page: Any, tmp_path: Path):
    model = sample_model()
    with served(model) as url:
        open_lab(page, url)
        page.get_by_role("button", name="resample").click()
        for name in ("E0 H1", "D1 H2"):
            page.get_by_role("switch", name=name).click()
        page.get_by_text("At all tokens").click()
        page.get_by_role("group", name="Tokens to ablate at · text").get_by_role("button").nth(
            2
        ).click()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").click()
        download.value.save_as(tmp_path / "recipe.json")
        recipe = json.loads((tmp_path / "recipe.json").read_text())
        assert [(head["site"], head["head"], head["mode"]) for head in recipe["heads"]] == [
            ("encoder.0.attention", 1, "resample"),
            ("decoder.1.attention", 2, "resample"),
        ]
        assert recipe["tokens"] == {"text": [2]}
        page.get_by_role("button", name="Restore all").click()
        page.get_by_label("Load a recipe").set_input_files(tmp_path / "recipe.json")
        wait_until(page, "document.querySelectorAll('.switch[aria-checked=false]').length === 2")
        page.get_by_role("button", name="Compute the effect").click()
        page.get_by_test_id("effect").wait_for(timeout=60_000)
        assert [head.mode for head in model.ablated] == ["resample", "resample"]
        assert "hw.head_outputs(net, other" in (
            page.get_by_test_id("recipe-python").text_content() or ""
        )
        recipe["heads"][0]["head"] = 99
        (tmp_path / "wrong.json").write_text(json.dumps(recipe))
        page.get_by_label("Load a recipe").set_input_files(tmp_path / "wrong.json")
        assert "no head 99 of encoder.0.attention" in page.get_by_role("alert").inner_text()
        assert len(heads_off(page)) == 2


def test_a_cumulative_curve_says_its_time_first_and_shows_the_losses(page: Any):
    model = sample_model()
    expected = remove_greedily(model, {"sites": [0]}, JobProgress(Job("greedy", {})))
    with served(model) as url:
        open_lab(page, url)
        page.get_by_role("button", name="cumulative", exact=True).click()
        page.get_by_label("layers").select_option("one")
        page.get_by_role("button", name="Estimate the time").click()
        page.get_by_role("button", name="Start").wait_for(timeout=60_000)
        assert re.search(r"\d+ heads, about .* s\.", page.get_by_test_id("plan").inner_text())
        page.get_by_role("button", name="Start").click()
        curve = page.get_by_test_id("curve")
        curve.wait_for(timeout=60_000)
        shown = re.search(r"E0 H(\d+): translation loss, nats (\S+)$", curve.inner_text())
        assert shown is not None
        assert int(shown[1]) == expected["order"][0][1]
        assert float(shown[2]) == pytest.approx(expected["order"][0][2], rel=0.05)
        page.get_by_role("button", name="Choose these heads").click()
        assert heads_off(page) == [f"E0 H{expected['order'][0][1]}"]
