"""The Diff screen in a browser: heads behind an ablated one, another text, and another model, with
exact numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwise as hw
from headwise.observe.traces import save_trace
from headwise.viewer.open_model import OpenModel
from support.tiny_configs import model_config
from viewer.page_browser import sample_model, served, wait_until


def open_diff(page: Any, url: str, kind: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '#/diff?with={kind}&scale=lin'")
    page.get_by_role("heading", name="Compare two runs").wait_for()


def compare(page: Any) -> None:
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_test_id("diff-change").wait_for(timeout=60_000)


def test_the_pictures_have_a_table_with_the_exact_weights(page: Any):
    model = sample_model()
    with served(model) as url:
        open_diff(page, url, "ablated")
        page.keyboard.press("k")
        compare(page)
        page.get_by_role("gridcell", name=re.compile("^E1 H4")).click()
        page.get_by_role("heading", name="Head E1 H4").wait_for()
        page.get_by_role("button", name="Table").click()
        table = page.get_by_role("table", name="Pairs of tokens whose weights differ most")
        table.wait_for()
        assert page.locator("main canvas[role=img]").count() == 0
        one, other = model.get_comparison().weights("encoder.1.attention", 4)
        query, key = np.unravel_index(np.abs(other - one).argmax(), one.shape)
        cells = table.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
        assert [cells[0].split()[0], cells[1].split()[0]] == [str(query), str(key)]
        shown = [float(text.replace("−", "-")) for text in cells[2:]]
        expected = [one[query, key], other[query, key], other[query, key] - one[query, key]]
        np.testing.assert_allclose(shown, expected, atol=6e-3)
        table.get_by_role("button", name="difference").click()
        wait_until(
            page, "document.querySelectorAll('th[aria-sort=descending]').length === 2"
        )  # and the list of heads


def test_another_text_is_aligned_and_the_map_shows_the_divergence(page: Any):
    with served(sample_model()) as url:
        open_diff(page, url, "text")
        page.get_by_role("main").get_by_role("textbox").first.fill("<zh>12,345,678.95 dollars")
        compare(page)
        page.get_by_text("16 aligned tokens, of 16 in the open text and 16 in the other").wait_for()
        replaced = page.locator(".pair-row .replaced")
        assert replaced.first.inner_text().split() == ["0", "5"]
        page.get_by_role("link", name="Map").click()
        wait_until(
            page,
            "[...document.querySelectorAll('select')].some((one) => one.value === 'divergence')",
        )
        page.get_by_role("link", name="Diff").click()
        page.keyboard.press("ArrowDown")
        page.get_by_test_id("diff-change").wait_for()
        assert page.locator(".diff-tiles canvas").count() == 3


def test_another_model_is_compared_by_its_name(page: Any, tmp_path: Path):
    gpt = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=40, n_positions=64)
    one, other = (hw.build(hw.families.read_model_spec(gpt), seed=seed).eval() for seed in (0, 1))
    ids = torch.arange(9)[None]
    save_trace(hw.trace(other, ids), tmp_path / "tuned.trace")
    opened = OpenModel(
        hw.trace(one, ids, capture=hw.Capture(extra=("v",))),
        one,
        other=str(tmp_path / "tuned.trace"),
    )
    with served(opened) as url:
        open_diff(page, url, "text")
        page.get_by_role("button", name="tuned.trace").click()
        compare(page)
        page.get_by_text("9 aligned tokens").wait_for()
        assert page.locator("table.data tbody tr").count() == 6
        wait_until(page, "location.hash.includes('with=other')")
