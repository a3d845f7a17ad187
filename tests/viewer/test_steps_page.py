"""The Steps screen in a browser: its numbers are the server's, and it is walked
with the keyboard.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from headwise.observe import bundled_sample
from headwise.observe.traces.head_steps import HeadPlace, HeadSteps
from headwise.viewer.answers import find_steps
from headwise.viewer.open_model import OpenModel
from viewer.page_browser import served

SITE, HEAD, QUERY = 7, 2, 9
ADDRESS = f"#/steps?site={SITE}&head={HEAD}&position={QUERY}"


def sample(*, with_model: bool = True) -> OpenModel:
    load_model = bundled_sample.load_sample_model if with_model else None
    return OpenModel(
        bundled_sample.load_sample_trace(),
        load_model=load_model,
        table=bundled_sample.load_sample_table(),
    )


def open_steps(page: Any, url: str, address: str = ADDRESS) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '{address}'")
    page.locator(".step").first.wait_for()


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("<.001", "0.0005"))


def place_of(opened: OpenModel, steps: HeadSteps, name: str) -> int:
    return [step.name for step in steps.steps].index(name)


def explanation(page: Any) -> str:
    return page.get_by_test_id("explanation").inner_text().replace("\n", " ")


def test_the_visible_numbers_are_those_of_the_server(page: Any):
    opened = sample()
    place = HeadPlace(opened.get_trace().layers[SITE].name, HEAD, QUERY)
    steps, note = find_steps(opened, place)
    assert note == ""
    with served(opened) as url:
        open_steps(page, url)
        for name, precision in (("product", 0.05), ("scale", 0.005), ("normalise", 5e-4)):
            index = place_of(opened, steps, name)
            values = steps.steps[index].arrays["out"]
            for key in range(QUERY + 1):
                shown = page.get_by_test_id(f"{index}.out.{key}").locator("i").inner_text()
                assert number(shown) == pytest.approx(float(values[key]), abs=precision), (
                    name,
                    key,
                )
        for name in ("project", "transform"):
            index = place_of(opened, steps, name)
            for channel in range(16):
                shown = page.get_by_test_id(f"{index}.q.0.{channel}").inner_text()
                assert number(shown) == pytest.approx(
                    float(steps.steps[index].arrays["q"][channel]), abs=5e-4
                )
        hatched = page.locator(f'[data-testid^="{place_of(opened, steps, "normalise")}.out."] i.m')
        assert hatched.count() == len(steps.positions) - QUERY - 1


def test_a_cell_says_how_it_is_computed(page: Any):
    """The numbers of the rule, put together by hand, give the number of the cell."""
    opened = sample()
    steps, _ = find_steps(opened, HeadPlace(opened.get_trace().layers[SITE].name, HEAD, QUERY))
    index = place_of(opened, steps, "project")
    with served(opened) as url:
        open_steps(page, url)
        page.get_by_test_id(f"{index}.q.0.3").click()
        text = explanation(page)
        expected = float(steps.steps[index].arrays["q"][3])
        value = number(re.findall(r"= ([−\d.e-]+)", text)[0])
        assert value == pytest.approx(expected, rel=1e-4)
        terms = re.findall(r"([−\d.]+) × ([−\d.]+)", text)
        rest = re.findall(r"more products: ([−\d.]+)", text)
        assert len(terms) == 4
        total = sum(number(a) * number(b) for a, b in terms) + number(rest[0])
        assert total == pytest.approx(expected, rel=1e-3)
        weight = place_of(opened, steps, "normalise")
        page.mouse.move(5, 5)
        page.get_by_test_id(f"{weight}.out.4").click()
        found = re.findall(r"exp\(([−\d.]+) − ([−\d.]+)\) / ([\d.]+)", explanation(page))
        score, top, total = (number(part) for part in found[0])
        expected = float(steps.steps[weight].arrays["out"][4])
        assert 2.718281828 ** (score - top) / total == pytest.approx(expected, rel=1e-3)
