"""The Text screen in a browser: one head, the mean of a set, two heads over each other, and
generated tokens.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.viewer.lab_actions import generate_text
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from viewer.page_browser import sample_model, served, wait_until
from viewer.page_models import GPT


def open_text(page: Any, url: str, fields: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '#/text?{fields}'")
    page.get_by_role("heading", name="Text", exact=True).wait_for()
    wait_until(page, "/\\d\\.\\d/.test(document.querySelector('.finder')?.textContent ?? '')")


def listed(page: Any, number: int = 0) -> list[float]:
    """The weights of the first lists of the page."""
    text = page.locator(".finder").nth(number).locator("td.num").all_inner_texts()
    return [float(value) for value in text if value]


def open_gpt() -> tuple[OpenModel, Any, torch.Tensor]:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(0))
    return (
        OpenModel(hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net),
        net,
        ids,
    )


def test_a_set_chosen_on_the_map_is_averaged(page: Any):
    model = sample_model()
    trace = model.get_trace()
    rows = [trace.head_weights("encoder.0.attention", head)[3] for head in (1, 2, 4)]
    with served(model) as url:
        page.goto(url)
        for head in (1, 2, 4):  # a click with shift selects and pins
            page.get_by_role("gridcell", name=re.compile(f"^E0 H{head}\\b")).click(
                modifiers=["Shift"]
            )
        page.get_by_role("link", name="Text").click()
        page.get_by_role("button", name="mean of a set").click()
        page.locator(".chip").nth(3).click()
        expected = np.sort(np.mean(rows, 0))[::-1][:6]
        wait_until(
            page,
            "document.querySelector('.text-lay h2 ~ *, .text-lay')?.textContent.includes('mean of "
            "3 heads')",
        )
        page.wait_for_timeout(300)
        assert listed(page) == pytest.approx(expected, rel=0.06, abs=0.006)


def test_two_heads_have_two_colours_and_their_own_weights(page: Any):
    model = sample_model()
    trace = model.get_trace()
    site = [layer.name for layer in trace.layers].index("decoder.0.cross")
    with served(model) as url:
        open_text(page, url, f"site={site}&head=2&heads=two&second={site}.3&position=9")
        wait_until(page, "document.querySelectorAll('.finder').length === 2")
        page.wait_for_timeout(300)
        for number, head in enumerate((2, 3)):
            row = np.sort(trace.head_weights("decoder.0.cross", head)[9])[::-1][:6]
            assert listed(page, number) == pytest.approx(row, rel=0.06, abs=0.006)
        colours = page.evaluate(
            "['a', 'b'].map((name) => getComputedStyle(document.querySelector(`.voice-lines "
            "rect.hue-${name}`)).fill)"
        )
        assert colours == ["rgb(213, 94, 0)", "rgb(0, 135, 95)"]
        boxes = [
            page.get_by_role("heading", name=name, exact=True).bounding_box()
            for name in ("source", "text")
        ]
        assert boxes[0]["y"] == boxes[1]["y"]  # side by side
        assert boxes[0]["x"] < boxes[1]["x"]


def test_nothing_is_bare_before_a_token_is_chosen(page: Any):
    with served(sample_model()) as url:
        open_text(page, url, "site=0&head=2")
        assert len(listed(page)) == 6
        assert page.get_by_role("region", name="Strongest pairs").get_by_role("row").count() > 3
        assert page.locator(".voice-lines path").count() > 0
        page.locator(".chip").nth(1).hover()
        wait_until(
            page, "document.querySelector('.text-lay h3').textContent.startsWith('1 attends')"
        )


def test_a_generated_text_is_that_of_generate():
    model, net, ids = open_gpt()
    found = generate_text(model, {"count": 6}, JobProgress(Job("generate", {})))
    assert found == {"revision": model.revision, "first": 9, "count": 6}
    tokens = list(model.get_trace().streams["text"][0].ids)
    assert tokens[:9] == ids[0].tolist()
    assert tokens[9:] == hw.generate(net, ids, max_new_tokens=6)[0]
    whole = hw.trace(net, torch.tensor([tokens[:-1]]))
    for site, head in model.heads:
        step = model.get_trace().head_weights(site, head)
        np.testing.assert_allclose(step, whole.head_weights(site, head), atol=1e-5)


@pytest.mark.parametrize(
    ("count", "message"), [(0, "count=0"), (65, "give 1 to 64"), ("many", "count='many'")]
)
def test_counts_out_of_range_are_refused(count: Any, message: str):
    model, _, _ = open_gpt()
    before = model.get_trace()
    with pytest.raises(ValueError, match=message):
        generate_text(model, {"count": count}, JobProgress(Job("generate", {})))
    assert model.get_trace() is before


def test_an_encoder_decoder_model_is_refused():
    with pytest.raises(ValueError, match=r"error\.onlyDecoder"):
        generate_text(sample_model(), {"count": 3}, JobProgress(Job("generate", {})))


def test_generated_tokens_are_stepped_through(page: Any):
    model, _, _ = open_gpt()
    with served(model) as url:
        open_text(page, url, "site=0&head=1")
        page.get_by_label("new tokens").fill("5")
        page.get_by_role("button", name="Continue the text").click()
        page.get_by_role("button", name="next step").wait_for()
        generation = page.get_by_test_id("generation")
        wait_until(
            page,
            "document.querySelector('[data-testid=generation]').textContent.includes('step 1 of "
            "5')",
        )
        page.get_by_role("button", name="next step").click()
        page.get_by_role("button", name="next step").click()
        words = model.get_trace().streams["text"][0].words
        assert f"step 3 of 5: reads {words[10]}, predicts {words[11]}" in generation.inner_text()
        page.wait_for_timeout(300)
        row = np.sort(model.get_trace().head_weights(model.heads[0][0], 1)[10])[::-1][:6]
        assert listed(page) == pytest.approx(row, rel=0.06, abs=0.006)
        page.get_by_role("button", name="previous step").click()
        assert "step 2 of 5" in generation.inner_text()
        assert page.locator(".chip.generated").count() == 5
