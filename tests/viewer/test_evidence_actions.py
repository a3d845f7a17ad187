"""Evidence of classes: the numbers are those of the library, and the page shows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.observe import bundled_sample
from headwise.viewer.binary_answers import decode_arrays
from headwise.viewer.head_actions import find_evidence
from support.page_browser import sample_model, served
from support.page_models import progress


def test_a_text_is_scored_by_the_weights_on_the_pairs_of_the_class():
    """The class "previous" by hand: the mean weight on the token before, over all rows that have
    one.
    """
    model = sample_model()
    text = bundled_sample.TEXTS[0]
    found = find_evidence(
        model,
        {"site": 2, "head": 1, "class": "previous", "texts": [text, bundled_sample.TEXTS[1]]},
        progress(),
    )
    header, arrays = decode_arrays(found)
    source, _, target = text.partition("\t")
    own = hw.trace(model.get_model(), {"source": source, "text": target})
    weights = own.head_weights("encoder.2.attention", 1)
    assert arrays["scores"].shape == (2,)
    assert arrays["scores"][0] == pytest.approx(np.diagonal(weights, -1).mean(), rel=1e-4)
    pair = header["texts"][0]["pairs"][0]
    rest = weights.copy()
    np.fill_diagonal(rest, 0)
    rest[:, 0] = 0
    assert pair["weight"] == pytest.approx(rest.max(), abs=1e-4)
    assert header["texts"][0]["text"].startswith(source[:4])


def test_evidence_needs_measures():
    model = sample_model()
    model.table = None
    with pytest.raises(ValueError, match="have not been measured"):
        find_evidence(model, {"site": 2, "head": 1, "class": "previous"}, progress())


def test_the_page_shows_why_a_head_has_its_class(page: Any):
    model = sample_model()
    model.texts = bundled_sample.TEXTS
    with served(model) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.evaluate("location.hash = '#/classify?site=2&head=1'")
        why = page.get_by_test_id("why")
        why.wait_for()
        assert model.table is not None
        measure = model.table.head("encoder.2.attention", 1).measures["previous"]
        assert (
            f"({measure.value:.2f} − {measure.chance:.2f}) / (1 − {measure.chance:.2f})"
            in why.inner_text()
        )
        why.get_by_role("button", name="Find the texts").click()
        best = why.get_by_role("region", name="Texts that show it best")
        best.wait_for(timeout=90_000)
        arguments = {"site": 2, "head": 1, "class": "previous", "texts": list(bundled_sample.TEXTS)}
        scores = np.sort(decode_arrays(find_evidence(model, arguments, progress()))[1]["scores"])[
            ::-1
        ]
        shown = [float(cell) for cell in best.locator("tbody td.num").all_inner_texts()]
        assert shown == pytest.approx(scores[:3], abs=0.006)
        worst = (
            why.get_by_role("region", name="Texts that show it worst")
            .locator("tbody td.num")
            .all_inner_texts()
        )
        assert [float(cell) for cell in worst] == pytest.approx(scores[-3:], abs=0.006)
        assert why.locator(".score-bars rect").count() == len(bundled_sample.TEXTS)
