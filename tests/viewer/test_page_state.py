"""What the address of the page holds, what a step back restores, what keys release, and that
nothing moves.
"""

from __future__ import annotations

from typing import Any

from headwise.observe import bundled_sample
from viewer.page_browser import sample_model, served

# An address with every field that a screen writes, and the values that it must show.
ADDRESSES = [
    "#/map?cells=entropy&sort=sink&x=sink&y=entropy&color=importance&only=k&chosen=3-9%2C12&site=2&head=1",
    "#/map?table=1&pins=0.1%2C2.3&off=0.1%2C4.2.mean.0",
    "#/head?site=4&head=3&form=lines&scale=log&theme=dark&least=0.1",
    "#/head?site=3&head=2&lens=value&rows=maximum&part=2.14.3.15&cell=4.5.3.4",
    "#/text?site=3&position=4&heads=two&second=3.5&add=2%2C6",
    "#/lab?off=1.2.zero.0.5&factor=0.5&random=2&tokens=source.2-4.7",
    "#/lab?mode=mean&off=1.2.mean.0",
    "#/prune?by=share&share=70&per=model&fold=mean",
    "#/prune?task=convert&align=both&grouping=similar&where=self",
    "#/steps?site=3&head=2&position=5&step=3&key=2",
    "#/diff?with=ablated&off=0.0&cells=divergence",  # the cells of a comparison
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
    """Each address is read by its screen when the page is loaded, and kept as it is."""
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
            assert hash_of(page).partition("?")[0] == address.partition("?")[0]


# --- charts have tables, and nothing moves --------------------------------------------------------


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
            page.locator("main table").first.wait_for()
            captions = page.locator("main table caption").all_text_contents()
            assert any(caption in text for text in captions), (address, captions)
            assert page.evaluate(CHARTS) == [], address
        open_address(page, "#/similarity?table=1")
        page.get_by_role("button", name="Compare the heads").click()
        page.get_by_role("table", name="Distances of all pairs").wait_for(timeout=90_000)
        page.get_by_role("table", name="Tree of clusters").wait_for()
        assert page.evaluate(CHARTS) == []
        open_address(page, "#/lab?table=1&off=2.1")
        page.get_by_role("table", name="Change by position").wait_for(timeout=60_000)
        assert page.evaluate(CHARTS) == []
