"""axe-core finds no violation on any screen, in both themes, and in the dialogs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.observe import bundled_sample
from headwise.viewer.open_model import OpenModel
from viewer.page_browser import MUST_RUN, served, wait_until

AXE = Path(hw.__file__).parent / "viewer" / "web" / "node_modules" / "axe-core" / "axe.min.js"
VARIANTS = (  # of screens, beside those that the rail names
    *(
        "#/map?cells=class",
        "#/map?cells=entropy",
        "#/head?site=4&head=3&form=lines",
        "#/head?site=3&head=2&form=arcs",
    ),
    "#/head?table=1",
    *("#/text?token=3", "#/steps?site=3&head=2&token=5"),
)
DIALOGS = ("e", "?", "/")  # export, keys, commands
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
EXTRA_RULES = ["target-size", "label-content-name-mismatch"]  # off by default
COLOR_RULES = ["color-contrast", "link-in-text-block"]  # the dark theme changes colours alone
RUN = """async ([tags, extra]) => {
    const rules = Object.fromEntries(extra.map((rule) => [rule, {enabled: true}]));
    const found = await axe.run(document, {runOnly: tags, rules});
    return found.violations.flatMap((rule) => rule.nodes.map((node) =>
        `${rule.id}: ${node.target.join(" ")}: ${node.any.concat(node.all, node.none)[0]?.message ?? rule.help}`));
}"""


@pytest.fixture
def axe() -> str:
    if not AXE.is_file():
        reason = f"there is no {AXE.name}: run `npm ci` in src/headwise/viewer/web"
        if MUST_RUN:
            pytest.fail(f"REQUIRE_BROWSER is set, but {reason}")
        pytest.skip(reason)
    return AXE.read_text(encoding="utf-8")


def sample() -> OpenModel:
    return OpenModel(
        bundled_sample.load_sample_trace(),
        load_model=bundled_sample.load_sample_model,
        table=bundled_sample.load_sample_table(),
    )


def find_violations(page: Any, theme: str) -> list[str]:
    """What axe finds on the page, as rule: element: reason; the policy of the page forbids script
    elements.
    """
    wait_until(page, "!document.querySelector('.jobs .note:not(.bad)')")
    page.wait_for_timeout(200)
    return page.evaluate(RUN, [COLOR_RULES, []] if theme == "dark" else [TAGS, EXTRA_RULES])


@pytest.mark.parametrize(
    ("theme", "width"),
    [("light", 1280), ("dark", 1280), pytest.param("light", 390, marks=pytest.mark.slow)],
)
def test_no_screen_has_a_violation(page: Any, axe: str, theme: str, width: int):
    found: dict[str, list[str]] = {}
    page.set_viewport_size({"width": width, "height": 900})
    with served(sample()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate(axe)
        screens = (
            page.get_by_role("navigation")
            .get_by_role("link")
            .evaluate_all("all => all.map((a) => a.hash)")
        )
        assert len(screens) >= 10
        for address in (*screens, *(VARIANTS if theme == "light" else ())):
            page.evaluate(
                f"location.hash = '{address}{'&' if '?' in address else '?'}theme={theme}'"
            )
            page.get_by_role("heading", level=1).first.wait_for()
            page.wait_for_timeout(300)
            found[address] = find_violations(page, theme)
    assert {name: violations for name, violations in found.items() if violations} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_dialog_has_a_violation(page: Any, axe: str, theme: str):
    with served(sample()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate(axe)
        page.evaluate(f"location.hash = '#/map?theme={theme}'")
        page.wait_for_timeout(200)
        for key in DIALOGS:
            page.keyboard.press(key)
            page.get_by_role("dialog").wait_for()
            assert find_violations(page, theme) == [], key
            page.keyboard.press("Escape")
            page.get_by_role("dialog").wait_for(state="detached")


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_results_have_no_violation(page: Any, axe: str, theme: str):
    """Tables that appear when something was computed or asked for: the effect in the Lab, two runs,
    the measures.
    """
    found: dict[str, list[str]] = {}
    with served(sample()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate(axe)
        page.evaluate(f"location.hash = '#/lab?theme={theme}'")
        page.get_by_role("switch", name="E0 H1").click()
        page.get_by_test_id("effect").wait_for(timeout=60_000)
        found["lab"] = find_violations(page, theme)
        page.evaluate("location.hash = '#/diff?with=ablated'")
        page.get_by_role("button", name="Compare", exact=True).click()
        page.get_by_test_id("diff-change").wait_for(timeout=60_000)
        found["diff"] = find_violations(page, theme)
        page.evaluate("location.hash = '#/map'")
        page.get_by_role("button", name="Table").click()
        page.get_by_role("table").first.wait_for()
        found["table"] = find_violations(page, theme)
    assert {name: violations for name, violations in found.items() if violations} == {}
