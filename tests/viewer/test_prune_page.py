"""The Prune & convert screen in a browser: its labels lead to a new folder, and its verification report is that
of the folder.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from headwise.hub.pretrained_models import load
from headwise.observe import bundled_sample
from headwise.viewer import surgery_actions
from headwise.viewer.view import Target, open_target
from viewer.page_browser import served


@pytest.fixture(autouse=True)
def brief_timings(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs measure speed only briefly, but have more time on a busy machine."""
    monkeypatch.setattr(surgery_actions, "TIMING_SECONDS", 0.05)
    page.set_default_timeout(60_000)


def read_row(page: Any, test_id: str, name: str) -> list[str]:
    """The cells of the first row that begins with a name."""
    row = page.get_by_test_id(test_id).get_by_role("row").filter(has_text=name).first
    return [cell.inner_text() for cell in row.get_by_role("cell").all()]


def count_parameters(folder: Path) -> int:
    return sum(parameter.numel() for parameter in load(folder).parameters())


def test_heads_that_are_off_in_the_lab_are_pruned_and_verified(page: Any, tmp_path: Path):
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
        page.get_by_role("button", name="Prune and verify").click()
        verification = page.get_by_test_id("verification")
        verification.wait_for()
        assert (
            "Verified: outputs equal up to rounding in 3 of 3 checks" in verification.inner_text()
        )
        assert page.get_by_test_id("folder").inner_text() == str(tmp_path / "pruned")
        shown = read_row(page, "verification", "parameters")
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
