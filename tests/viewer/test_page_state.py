"""What the address of the page holds, what a step back restores, what keys release, and that
nothing moves.
"""

from __future__ import annotations

from typing import Any

import pytest

from headwise.traces import map_queries_and_keys
from headwise.viewer import bundled_sample
from support.page_browser import sample_model, served, wait_until

# An address with every field that a screen writes, and the values that it must show.
ADDRESSES = [
    "#/map?cells=entropy&sort=sink&x=sink&y=entropy&color=importance&only=k&chosen=3-9%2C12&site=2&head=1",
    "#/map?table=1&pins=0.1%2C2.3&off=0.1%2C4.2.mean.0",
    "#/head?site=4&head=3&form=lines&scale=log&theme=dark&least=0.1",
    "#/head?site=3&head=2&lens=value&rows=maximum&part=2.14.3.15&cell=4.5.3.4",
    "#/text?site=3&position=4&heads=two&second=3.5&add=2%2C6",
    "#/lab?off=1.2.zero.0.5&factor=0.5&random=2&tokens=source.2-4.7",
    "#/lab?mode=mean&off=1.2.mean.0&curve=once&range=one",
    "#/prune?by=share&share=70&per=model&fold=mean",
    "#/prune?task=convert&align=both&grouping=similar&where=self",
    "#/steps?site=3&head=2&position=5&step=3&key=2",
    "#/diff?with=ablated&off=0.0",
    # the last, because the server keeps own classes
    "#/classify?limits=p.0.35&certain=1&letter=p&classes=0.1%3Dsink",
]


def open_address(page: Any, address: str) -> None:
    page.evaluate(f"location.hash = {address!r}")
    page.get_by_role("heading", level=1).first.wait_for()
    page.wait_for_timeout(300)


def hash_of(page: Any) -> str:
    return page.evaluate("location.hash")


def fields_of(address: str) -> set[str]:
    return set(address.partition("?")[2].split("&"))


def test_an_address_holds_all_state_and_restores_it(page: Any):
    """Each address is kept as it is, read by its screen, and is the same after the page is loaded
    again.
    """
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.wait_for_timeout(300)
        for address in ADDRESSES:
            page.goto("about:blank")
            page.goto(url.partition("#")[0] + address)
            page.get_by_role("heading", level=1).first.wait_for()
            page.wait_for_timeout(300)
            assert fields_of(hash_of(page)) == fields_of(address)
            page.reload()
            page.get_by_role("heading", level=1).first.wait_for()
            page.wait_for_timeout(300)
            assert fields_of(hash_of(page)) == fields_of(address)
            assert hash_of(page).partition("?")[0] == address.partition("?")[0]


def test_the_fields_of_an_address_are_shown(page: Any):
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        open_address(page, ADDRESSES[0])
        page.get_by_text("8 heads chosen").wait_for()
        legend = page.get_by_role("group", name="Classes: choose one")
        assert legend.get_by_role("button", name="sink").get_attribute("aria-pressed") == "true"
        open_address(page, ADDRESSES[1])
        page.get_by_role("table").first.wait_for()
        open_address(page, ADDRESSES[3])
        page.locator(".crosshair.locked .cell-mark").first.wait_for()
        wait_until(page, "/\\d$/.test(document.querySelector('[data-testid=exact]').textContent)")
        open_address(page, ADDRESSES[-1])
        assert page.get_by_label("score, 0–1 ≥, positional").input_value() == "0.35"
        assert page.get_by_role("checkbox").is_checked()
        open_address(page, ADDRESSES[5])
        assert page.get_by_role("switch", name="E1 H2").get_attribute("aria-checked") == "false"
        assert page.get_by_label("scale").input_value() == "0.5"
        assert page.get_by_text("At 4 tokens").is_visible()
        open_address(page, ADDRESSES[7])
        page.get_by_text("keep 70 %").wait_for()


def test_a_step_back_keeps_what_the_user_made(page: Any):
    """Back restores the screen and the head that were shown; ablated and pinned heads stay as they
    are.
    """
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").nth(2).click()
        page.get_by_role("link", name="Lab").click()
        page.get_by_role("switch", name="E1 H3").click()
        page.keyboard.press("p")
        wait_until(
            page, "location.hash.includes('pins=1.3')"
        )  # the address of a screen is written after a moment
        page.get_by_role("link", name="Text").click()
        page.get_by_role("heading", name="Text").wait_for()
        page.go_back()
        page.get_by_text("1 of 54 heads off").wait_for()
        page.go_back()
        page.get_by_role("heading", name="Map").wait_for()
        assert page.locator(".head-name").inner_text() == "E0 H2"
        wait_until(page, "location.hash.includes('off=1.3') && location.hash.includes('pins=1.3')")
        page.go_forward()
        page.get_by_role("switch", name="E1 H3").wait_for()
        assert page.get_by_role("switch", name="E1 H3").get_attribute("aria-checked") == "false"
        page.get_by_role("link", name="Text").click()
        page.get_by_role("heading", name="Text").wait_for()
        page.keyboard.press("k")  # restores the head
        wait_until(page, "!location.hash.includes('off=')")
        page.go_back()
        page.get_by_text("0 of 54 heads off").wait_for()
        page.get_by_role("switch", name="E1 H3").click()
        page.evaluate(
            "location.hash = '#/lab?site=2'"
        )  # an address that is typed undoes no work that it does not name
        wait_until(page, "location.hash.includes('off=1.3') && location.hash.includes('site=2')")
        page.evaluate("location.hash = '#/lab?off='")
        page.get_by_text("0 of 54 heads off").wait_for()


def test_a_held_key_does_not_exhaust_the_history_of_the_browser(page: Any):
    """Browsers ignore more than about 200 changes of the address in 10 s; the last selection is in
    it all the same.
    """
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        changes = page.evaluate(
            """async () => {
              const replace = history.replaceState.bind(history);
              let count = 0;
              history.replaceState = (...rest) => { count++; replace(...rest); };
              for (let n = 0; n < 120; n++) {
                dispatchEvent(new KeyboardEvent('keydown', { key: n % 2 ? 'ArrowLeft' : 'ArrowRight' }));
                if (n === 119) dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown' }));
                await new Promise(requestAnimationFrame);
              }
              await new Promise((done) => setTimeout(done, 400));
              return count;
            }"""
        )
        assert 2 <= changes <= 60
        assert hash_of(page) == "#/map?site=1"


def test_escape_releases_every_choice(page: Any):
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        open_address(page, "#/text?position=4&add=2&cell=4.5.3.4&only=k&chosen=3-9&pins=0.1")
        assert "chosen=3-9" in hash_of(page)
        page.keyboard.press("Escape")
        wait_until(page, "location.hash === '#/text?pins=0.1'")


# --- charts have tables, and nothing moves --------------------------------------------------------


@pytest.mark.parametrize(
    ("screen", "captions"),
    [("map", ["54 heads"]), ("head", ["Mean weight by distance", "By query", "By key"])],
)
def test_charts_have_sortable_tables(page: Any, screen: str, captions: list[str]):
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        open_address(page, f"#/{screen}?table=1")
        for caption in captions:
            table = page.get_by_role("table", name=caption)
            table.wait_for()
            header = table.get_by_role("columnheader").last
            header.get_by_role("button").focus()
            page.keyboard.press("Enter")
            wait_until(
                page, f"[...document.querySelectorAll('th[aria-sort=descending]')].length >= {1}"
            )
            assert header.get_attribute("aria-sort") == "descending"


# Charts of the main panel: pictures with a name of their own, without the letters that stand for
# classes.
CHARTS = "[...document.querySelectorAll('main [role=img]:not(.badge)')].map((one) => one.ariaLabel)"
TABLED = [  # addresses, and the table that takes the place of a chart there
    ("#/map", "54 heads"),
    ("#/head", "Strongest pairs"),
    ("#/head?form=lines", "Strongest pairs"),
    ("#/head?form=points", "Queries and keys as points"),
    ("#/head?form=channels&position=3", "Largest products of each key"),
    ("#/text?position=3", "Strongest pairs"),
    ("#/classify", "Class"),
    ("#/steps?position=3&step=2", ""),
]


def test_every_chart_has_a_table_in_its_place(page: Any):
    """T shows tables only: on no screen is a chart left, and each shows the rows that are named for
    it.
    """
    opened = sample_model()
    opened.texts = tuple(bundled_sample.TEXTS[:3])
    with served(opened) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        for address, caption in TABLED:
            open_address(page, f"{address}{'&' if '?' in address else '?'}table=1")
            page.get_by_role("table").first.wait_for()
            captions = page.locator("main table caption").all_text_contents()
            assert any(caption in text for text in captions), (address, captions)
            assert page.evaluate(CHARTS) == [], address
        open_address(page, "#/similarity?table=1")
        page.get_by_role("table", name="Distances of all pairs").wait_for(timeout=90_000)
        page.get_by_role("table", name="Tree of clusters").wait_for()
        assert page.evaluate(CHARTS) == []
        open_address(page, "#/lab?table=1&off=2.1&curve=once&range=one")
        page.get_by_role("button", name="Compute the effect").click()
        page.get_by_role("table", name="KL by position").wait_for(timeout=60_000)
        page.get_by_role("button", name="Estimate the time").click()
        page.get_by_role("button", name="Start").click(timeout=60_000)
        page.get_by_test_id("curve").get_by_role("table").wait_for(timeout=60_000)
        assert page.evaluate(CHARTS) == []


def test_places_of_points_are_in_a_table(page: Any):
    opened = sample_model()
    places = map_queries_and_keys(opened.get_trace(), *opened.heads[0])
    with served(opened) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        open_address(page, "#/head?form=points&table=1")
        rows = page.get_by_role("table", name="Queries and keys as points").get_by_role("row")
        rows.nth(1).wait_for()
        count = len(places.queries)
        for number, place in ((1, places.queries[0]), (count + 3, places.keys[2])):
            shown = [
                float(text) for text in rows.nth(number).get_by_role("cell").all_inner_texts()[2:]
            ]
            assert shown == pytest.approx(place.tolist(), abs=0.06)


def test_the_table_of_the_head_screen_holds_its_bars(page: Any):
    opened = sample_model(with_model=False)
    site, head = opened.heads[13]
    found = opened.marginals(site, head)
    with served(opened) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        open_address(page, f"#/head?site=2&head={head}&table=1")
        cells = (
            page.get_by_role("table", name="By query").get_by_role("row").nth(3).get_by_role("cell")
        )
        cells.first.wait_for()
        shown = [float(text) for text in cells.all_inner_texts()[1:]]
        assert shown == pytest.approx([found.entropy[2], found.maximum[2]], abs=5e-3)


def test_rows_of_a_table_are_selected_by_the_keyboard(page: Any):
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        open_address(page, "#/classify")
        row = page.get_by_role("row").nth(5)
        name = row.get_by_role("cell").first.inner_text()
        row.get_by_role("button", name=name).focus()
        page.keyboard.press("Enter")
        wait_until(page, f"document.querySelector('.head-name').textContent === {name!r}")
        assert row.get_attribute("aria-selected") == "true"


SHIFTS = """() => {
  window.shifts = [];
  const name = (node) => node ? `${node.tagName ?? node.nodeName}.${node.className ?? ''}` : '';
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      window.shifts.push([entry.value, entry.sources.map((one) => name(one.node)).join(' ')]);
    }
  }).observe({ type: 'layout-shift', buffered: true });
}"""


def test_nothing_moves_while_a_screen_fills_or_the_pointer_does(page: Any):
    """The shifts that the browser counts: below 0.1 while the page opens, none while the pointer
    moves.
    """
    with served(sample_model()) as url:
        page.add_init_script(f"({SHIFTS})()")
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.wait_for_timeout(800)
        assert sum(value for value, _ in page.evaluate("shifts")) < 0.1
        for screen, target in [
            ("map", ".cell"),
            ("head", ".matrix-canvas canvas"),
            ("text", ".chip"),
            ("classify", "tr"),
        ]:
            open_address(page, f"#/{screen}")
            page.wait_for_timeout(400)
            page.evaluate("shifts.length = 0")
            boxes = page.locator(target)
            for place in (0, 3, 5):
                box = boxes.nth(min(place, boxes.count() - 1)).bounding_box()
                page.mouse.move(
                    box["x"] + box["width"] * (0.2 + place / 10), box["y"] + box["height"] / 2
                )
                page.wait_for_timeout(120)
            moved = [
                (value, names)
                for value, names in page.evaluate("shifts")
                if value > 0.0005 and "tip" not in names
            ]
            assert moved == [], screen  # the tip of the Map follows the pointer
