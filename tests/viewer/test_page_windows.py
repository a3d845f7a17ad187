"""Where a screen begins, what stays in sight, and what a window shows when a text is refused or
another window opens one.
"""

from __future__ import annotations

from typing import Any

from headwise.viewer.targets import Target, open_target
from viewer.page_browser import sample_model, served, wait_until


def test_a_screen_begins_at_its_top_and_a_step_back_returns_to_the_place(page: Any):
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        place = page.evaluate("scrollTo(0, 300), scrollY")
        assert place > 100
        page.get_by_role("link", name="Similar").click()
        page.get_by_role("heading", name="Similar heads").wait_for()
        assert page.evaluate("scrollY") == 0
        page.go_back()
        page.get_by_role("heading", name="Map").wait_for()
        wait_until(page, f"scrollY === {place}")


def test_the_inspector_stays_in_sight_and_a_step_stops_above_the_tokens(page: Any):
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.keyboard.press("9")
        page.locator(".step").first.wait_for()
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        bottom = page.locator(".step[aria-current]").bounding_box()
        strip = page.locator(".strip").bounding_box()
        assert bottom["y"] + bottom["height"] <= strip["y"]
        assert page.evaluate("scrollY") > 0
        side = page.locator(".side").bounding_box()
        assert side["y"] == page.locator(".bar").bounding_box()["height"]
        assert side["y"] + side["height"] <= strip["y"]


def test_a_phone_shows_why_a_head_has_its_class_above_the_matrix(page: Any):
    page.set_viewport_size({"width": 390, "height": 844})
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/head?site=6&head=1'")
        page.get_by_role("application").wait_for()
        evidence = page.get_by_text("aligns words as the gold links do").first.bounding_box()
        assert evidence["y"] < page.get_by_role("application").bounding_box()["y"]


def test_a_screen_keeps_its_own_choice_of_tables(page: Any):
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.keyboard.press("t")
        page.get_by_role("table", name="54 heads").wait_for()
        page.get_by_role("link", name="Head", exact=True).click()
        page.get_by_role("application").wait_for()
        assert "table=1" not in page.url
        page.get_by_role("link", name="Map").click()
        page.get_by_role("table", name="54 heads").wait_for()
        assert "table=1" in page.url


def test_a_refused_text_says_what_the_sample_reads_and_what_is_still_shown(page: Any):
    with served(open_target(Target())) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        box = page.get_by_role("textbox", name="Source text")
        box.fill("hello")
        box.press("Enter")
        note = page.get_by_role("alert")
        note.get_by_text("For example: <zh>2 April 2099").wait_for()
        note.get_by_text("Still showing: <zh>12,345,678.90 dollars → ").wait_for()
        page.get_by_role("link", name="Text").click()
        note.get_by_text("Still showing").wait_for()
        box.fill("<zh>2 April 2099")
        box.press("Enter")
        note.wait_for(state="detached")
        target = page.get_by_role("textbox", name="Target")
        wait_until(page, "document.querySelectorAll('textarea')[1].value === '二〇九九年四月二日'")
        assert target.input_value() == "二〇九九年四月二日"


def test_a_window_does_not_take_itself_for_another(page: Any):
    """It asks on about its former text while its own next one has been opened."""
    held: list[Any] = []
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.wait_for_load_state("networkidle")
        page.route(
            "**/api/jobs/*/result",
            lambda route: route.continue_() if held else held.append(route),
        )
        box = page.get_by_role("textbox", name="Source text")
        box.fill("<zh>2 April 2099")
        box.press("Enter")
        while not held:
            page.wait_for_timeout(20)
        with page.expect_response("**/api/tile**") as answer:
            page.get_by_role("link", name="Head", exact=True).click()
        assert answer.value.status == 409
        held[0].continue_()
        page.get_by_text("9 tokens").wait_for()
        page.get_by_role("application").wait_for()
        assert page.get_by_role("alert").count() == 0


def test_a_window_says_that_another_one_opened_another_text(page: Any):
    with served(sample_model()) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.wait_for_load_state("networkidle")
        other = page.context.new_page()
        other.goto(url)
        box = other.get_by_role("textbox", name="Source text")
        box.fill("<zh>2 April 2099")
        box.press("Enter")
        other.get_by_text("9 tokens").wait_for()
        page.keyboard.press("3")
        note = page.get_by_role("alert").filter(has_text="Another window")
        note.get_by_text("Still showing: <zh>12,345,678.90 dollars").wait_for()
        assert page.get_by_text("16 tokens").is_visible()
        note.get_by_role("button").click()
        note.wait_for(state="detached")
        page.get_by_role("application").wait_for()
        page.get_by_role("complementary").get_by_text("this text").wait_for()
        other.get_by_role("link", name="Text").click()
        other.get_by_role("alert").filter(has_text="Another window").wait_for()
        other.close()
