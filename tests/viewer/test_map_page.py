"""Filters of the Map, and the tree of clusters of the Similarity screen, in a browser."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from headwise.observe import bundled_sample
from headwise.observe.head_analysis.head_similarity import ClusterMerge, cut_clusters
from headwise.viewer.binary_answers import decode_arrays
from headwise.viewer.head_actions import compute_similarity
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from support.page_browser import sample_model, served, wait_until


def open_map(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()


def test_the_strongest_heads_are_shown_and_other_layers_are_folded(page: Any):
    opened = OpenModel(bundled_sample.load_sample_trace(), table=bundled_sample.load_sample_table())
    table = opened.table
    assert table is not None
    best = table.sorted_by("sink")[:4]
    with served(opened) as url:
        open_map(page, url)
        page.get_by_role("button", name="Sink", exact=True).click()
        slider = page.get_by_label("strongest by sink")
        slider.fill("4")
        shown = {head.site for head in best}
        page.get_by_test_id("folded").wait_for()
        assert page.get_by_test_id("folded").inner_text() == (
            f"{9 - len(shown)} layers without a shown head are folded; show all"
        )
        rows = page.get_by_role("rowheader").evaluate_all("all => all.map((one) => one.title)")
        assert set(rows) == shown
        page.get_by_role("button", name="Table").click()
        names = page.locator("table.data tbody tr").count()
        assert names == 4
        page.get_by_role("button", name="Chart").click()
        wait_until(page, "location.hash.includes('top=4')")
        page.get_by_test_id("folded").click()
        wait_until(page, "document.querySelectorAll('[role=gridcell]').length === 54")


def test_the_tree_is_cut_where_it_is_dragged(page: Any):
    """Every head is a leaf, every merge a branch, and the clusters are those of the library at the
    same distance.
    """
    model = sample_model()
    texts = list(bundled_sample.TEXTS)[:3]
    header, arrays = decode_arrays(
        compute_similarity(model, {"texts": texts}, JobProgress(Job("similarity", {})))
    )
    merges = [
        ClusterMerge(int(one), int(other), float(distance))
        for one, other, distance in arrays["0.merges"]
    ]
    model.texts = tuple(texts)
    with served(model) as url:
        open_map(page, url)
        page.get_by_role("link", name="Similar").click()
        tree = page.locator(".dendrogram")
        tree.wait_for(timeout=90_000)
        heads = len(header["groups"][0]["heads"])
        assert tree.locator(".leaf").count() == heads
        assert tree.locator(".branch").count() == len(merges) == heads - 1
        most = max(merge.height for merge in merges)
        for share in (0.35, 0.7):
            tree.scroll_into_view_if_needed()
            box = tree.bounding_box()
            y = (8 + (1 - share) * (240 - 8 - 58)) / 240 * box["height"]
            page.mouse.click(box["x"] + box["width"] / 2, box["y"] + y)
            wait_until(page, "document.querySelector('.dendrogram .cut') !== null")
            page.wait_for_timeout(200)
            shown = float(page.locator(".similar input[type=range]").input_value())
            assert abs(shown / most - share) < 0.05
            labels = cut_clusters(
                merges, float(tree.locator(".cut").get_attribute("data-threshold"))
            )
            assert (
                page.get_by_text(re.compile(r"^\d+ clusters"))
                .inner_text()
                .startswith(f"{len(set(labels))} clusters")
            )
            joined = sum(
                merge.height <= float(tree.locator(".cut").get_attribute("data-threshold"))
                for merge in merges
            )
            assert tree.locator(".branch.joined").count() == joined
        leaf = tree.locator(".leaf").nth(2)
        name = leaf.text_content()
        leaf.click()
        page.get_by_role("heading", name=name, exact=True).wait_for()
        assert np.isfinite(most)
