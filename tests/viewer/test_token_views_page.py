"""Views with other tokens in a browser: hidden and merged tokens, several queries added, a
threshold, points.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.observe.traces import TokenGrouping, group_tokens, trace_from_weights
from headwise.observe.traces.head_steps import map_queries_and_keys
from headwise.viewer.model_actions import group_shown_tokens
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from viewer.page_browser import sample_model, served, wait_until
from viewer.page_models import GPT


def open_head(page: Any, url: str, fields: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '#/head?{fields}'")
    page.get_by_role("heading", name="Head E").wait_for()


def test_hidden_tokens_leave_every_view_and_the_rest_is_divided_by_its_sum(page: Any):
    model = sample_model()
    trace = model.get_trace()
    words = trace.streams["source"][0].words
    weights = trace.head_weights("encoder.1.attention", 3)[4, 1:]
    with served(model) as url:
        open_head(page, url, "site=1&head=3&position=3")
        page.get_by_role("button", name="hide special").click()
        wait_until(page, f"document.querySelectorAll('.toks .tok').length === {len(words) - 1}")
        page.get_by_role("option", name=words[4], exact=True).first.click()
        expected = np.sort(weights / weights.sum())[::-1][:3]
        wait_until(
            page, f"document.querySelector('.head-lay').textContent.includes('{expected[0]:.4g}')"
        )
        page.get_by_role("link", name="Steps").click()
        page.get_by_text("this screen needs each token of the model").wait_for()
        page.get_by_role("button", name="Show all tokens").click()
        wait_until(page, f"document.querySelectorAll('.toks .tok').length === {len(words)}")
        assert page.get_by_role("heading", name="E1 H3").first.is_visible()


def test_tokens_kept_together_show_the_sum_of_their_weights(page: Any):
    model = sample_model()
    rows = model.get_trace().head_weights("encoder.0.attention", 2)
    with served(model) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/text?site=0&head=2'")
        page.locator(".chip").nth(3).click()
        page.locator(".chip").nth(5).click(modifiers=["Shift"])
        page.mouse.move(5, 5)
        page.get_by_text("attend to (sum)").wait_for()
        expected = np.sort(rows[3] + rows[5])[::-1][0]
        wait_until(
            page, f"document.querySelector('.finder').textContent.includes('{expected:.2f}')"
        )
        wait_until(page, "location.hash.includes('add=5')")
        assert "position=3" in page.url


def test_a_threshold_leaves_only_strong_pairs(page: Any):
    model = sample_model()
    weights = model.get_trace().head_weights("encoder.0.attention", 2)
    with served(model) as url:
        open_head(page, url, "head=2&form=arcs&least=0.5")
        expected = int((np.round(weights * 255) / 255 >= 0.5).sum())
        wait_until(page, f"document.querySelectorAll('.lines path').length === {expected}")
        assert page.get_by_text("pairs with at least 50 % of the largest weight").is_visible()


def test_points_lie_where_the_queries_and_keys_are(page: Any):
    model = sample_model()
    found = map_queries_and_keys(model.get_trace(), "encoder.1.attention", 3)
    with served(model) as url:
        open_head(page, url, "site=1&head=3&form=points&position=4")
        page.locator(".query-point").first.wait_for()
        places = page.locator(".query-point").evaluate_all(
            "all => all.map((c) => [+c.getAttribute('cx'), +c.getAttribute('cy')])"
        )
        points, expected = np.array(places), found.queries * [1, -1]
        scale = np.ptp(points[:, 0]) / np.ptp(expected[:, 0])
        np.testing.assert_allclose(points - points[0], (expected - expected[0]) * scale, atol=1e-2)
        assert f"{round(found.share * 100)} %" in page.locator(".points p").first.inner_text()
        best = model.get_trace().head_weights("encoder.1.attention", 3)[4].max()
        wait_until(
            page,
            f"document.querySelector('[data-testid=points-keys]').textContent.includes('{best:.2f}')",
        )


# --- the job --------------------------------------------------------------------------------------


def group(model: OpenModel, **arguments: Any) -> None:
    group_shown_tokens(model, arguments, JobProgress(Job("group", arguments)))


def test_grouping_keeps_the_recorded_trace_for_the_model() -> None:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, 11), generator=torch.Generator().manual_seed(0))
    model = OpenModel(hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net)
    recorded, revision = model.get_trace(), model.revision
    group(model, first=True)
    site = recorded.layers[1].name
    expected = group_tokens(recorded, TokenGrouping(first=True)).head_weights(site, 2)
    np.testing.assert_array_equal(model.get_trace().head_weights(site, 2), expected)
    assert model.get_recorded() is recorded
    assert model.revision > revision
    assert model.describe()["grouping"] == {"words": False, "special": False, "first": True}
    group(model, words=True)  # from the recorded tokens, not from those that were shown
    assert len(model.get_trace().streams["text"][0].words) == 11
    group(model)
    assert model.get_trace() is recorded
    assert model.recorded is None
    with pytest.raises(ValueError, match="words=1 is neither true nor false"):
        group(model, words=1)


def test_weights_are_drawn_over_the_patches_of_the_image(page: Any):
    """A patch with a large weight gets the colour of the ramp; one with almost none shows the
    image.
    """
    config = {
        "model_type": "vit",
        "hidden_size": 12,
        "num_attention_heads": 3,
        "num_hidden_layers": 1,
        "intermediate_size": 20,
        "image_size": 28,
        "patch_size": 7,
        "num_channels": 3,
        "architectures": ["ViTModel"],
    }
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    pixels = torch.zeros(1, 3, 28, 28)
    pixels[:, 0, :14], pixels[:, 1, 14:] = 1, 1  # red above green
    trace = hw.trace(net, {"x": pixels})
    weights = np.full((1, 1, 17, 17), 1e-6, np.float32)
    weights[..., 1 + 5] = 1
    shown = trace_from_weights([weights], [str(n) for n in range(17)])
    trace = dataclasses.replace(
        shown, streams={}, images={shown.layers[0].key_stream: trace.images["text"]}
    )
    with served(OpenModel(trace)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/head?position=3&scale=lin&theme=light'")
        page.get_by_text("The image as the model read it").wait_for()
        wait_until(page, "document.querySelector('.patches canvas') !== null")
        page.wait_for_timeout(400)
        read = """places => { const c = document.querySelector('.patches canvas');
        const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return places.map(([x, y]) => [...all.slice(4 * (Math.floor(y * c.height) * c.width + Math.floor(x * c.width)))]
            .slice(0, 3)); }"""
        far_red, far_green, strong = page.evaluate(read, [[0.9, 0.1], [0.9, 0.9], [0.375, 0.375]])
        assert far_red == pytest.approx([255, 0, 0], abs=6)
        assert far_green == pytest.approx([0, 255, 0], abs=6)
        assert strong[2] > 80
        assert strong[0] < 120
        page.locator(".patches").click(position={"x": 5, "y": 5})
        wait_until(page, "location.hash.includes('position=1')")
        page.get_by_role("heading", name="query 1").wait_for()
        page.keyboard.press("t")
        table = page.get_by_role("table", name="Patches")
        table.wait_for()
        assert table.get_by_role("row").count() == 1 + 16
        assert table.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts() == [
            "1",
            "1",
            "1.000",
        ]
