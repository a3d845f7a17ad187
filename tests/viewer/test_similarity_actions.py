"""The Similarity screen: its distances are those of the library, over the texts of the job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.observe import bundled_sample
from headwise.observe.head_analysis.head_circuits import compare_circuits
from headwise.observe.head_analysis.head_similarity import HeadLocation
from headwise.viewer.model_actions import HeadGroups, compute_similarity, make_examples
from headwise.viewer.open_model import OpenModel
from viewer.binary_messages import decode_arrays
from viewer.page_browser import sample_model, served, wait_until
from viewer.page_models import progress

TEXTS = ["<zh>12,345 dollars", "<zh>7 dollars", "<zh>809.50 dollars"]


@pytest.fixture(scope="module")
def model() -> OpenModel:
    return OpenModel(
        bundled_sample.load_sample_trace(), load_model=bundled_sample.load_sample_model
    )


@pytest.fixture(scope="module")
def answer(model: OpenModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays of the job over three texts."""
    return decode_arrays(compute_similarity(model, {"texts": TEXTS}, progress()))


def test_distances_are_those_of_the_library(model: OpenModel, answer: Any):
    header, arrays = answer
    reader = hw.ExampleReader(model.get_model())
    for text in TEXTS:
        reader.add_text(text)
    expected = hw.measure_redundancy(model.get_model(), reader.examples_with_frequencies())
    assert header["texts"] == 3
    by_attention = [group for group in header["groups"] if group["by"] == "attention"]
    assert [group["streams"] for group in by_attention] == [
        list(group.streams) for group in expected.readers
    ]
    assert header["groups"][: len(by_attention)] == by_attention
    sites = [layer.name for layer in model.get_trace().layers]
    for number, group in enumerate(expected.readers):
        np.testing.assert_allclose(
            arrays[f"{number}.distances"], group.distances, rtol=1e-5, atol=1e-7
        )
        assert arrays[f"{number}.merges"].shape == (len(group.heads) - 1, 3)
        heads = [(sites[site], head) for site, head in header["groups"][number]["heads"]]
        assert heads == [(head.site, head.head) for head in group.heads]
        test, shown = group.similar_pair_test, header["groups"][number]["pairTest"]
        assert (shown["found"], shown["pairs"]) == (len(group.similar_pairs), group.num_pairs)
        assert (shown["chance"], shown["p"]) == (test.chance, test.p)


def test_outputs_are_compared_by_the_alignment_of_the_library(model: OpenModel, answer: Any):
    header, arrays = answer
    expected = hw.measure_redundancy(model.get_model(), make_examples(model, TEXTS))
    numbers = [number for number, group in enumerate(header["groups"]) if group["by"] == "outputs"]
    assert len(numbers) == len(expected.readers) == 3
    for number, group in zip(numbers, expected.readers, strict=True):
        assert group.outputs is not None
        distances = np.clip(1 - group.outputs, 0, None)
        np.testing.assert_allclose(arrays[f"{number}.distances"], distances, rtol=1e-4, atol=1e-6)
        assert len(header["groups"][number]["heads"]) == len(group.heads)


def test_circuits_are_compared_by_their_cosine(model: OpenModel, answer: Any):
    header, arrays = answer
    (number,) = [
        number for number, group in enumerate(header["groups"]) if group["by"] == "circuits"
    ]
    sites = [layer.name for layer in model.get_trace().layers]
    heads = [(sites[site], head) for site, head in header["groups"][number]["heads"]]
    assert heads == model.heads
    expected = compare_circuits(model.get_model()).values.numpy()
    np.testing.assert_allclose(
        arrays[f"{number}.distances"], np.clip(1 - expected, 0, None), atol=1e-5
    )
    assert arrays[f"{number}.points"].shape == (54, 2)


def test_heads_without_a_similarity_are_left_out(model: OpenModel):
    heads = [HeadLocation("encoder.0.attention", 0, head) for head in range(3)]
    similarity = np.array([[1, 0.2, np.nan], [0.2, 1, np.nan], [np.nan] * 3])
    groups = HeadGroups(model)
    groups.add_similarity("outputs", ("text", "text"), heads, similarity)
    groups.add_similarity("outputs", ("text", "text"), heads[2:], similarity[2:, 2:])
    assert [group["heads"] for group in groups.groups] == [[[0, 0], [0, 1]]]
    np.testing.assert_allclose(groups.arrays["0.distances"], [[0, 0.8], [0.8, 0]], rtol=1e-6)


def test_a_model_without_circuits_says_why(model: OpenModel, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise ValueError("cannot get OV circuits: a mixes heads")

    monkeypatch.setattr("headwise.observe.head_analysis.head_circuits.compare_circuits", refuse)
    header, _ = decode_arrays(compute_similarity(model, {"texts": TEXTS}, progress()))
    assert "OV circuits are not compared: cannot get OV circuits: a mixes heads" in header["notes"]
    assert {group["by"] for group in header["groups"]} == {"attention", "outputs"}


def test_the_page_compares_heads_in_three_ways(page: Any):
    opened = sample_model()
    opened.texts = tuple(TEXTS)
    with served(opened) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.get_by_role("link", name="Similar").click()
        page.get_by_role("button", name="Compare the heads").click()
        page.locator(".dendrogram").wait_for(timeout=90_000)
        assert "nats" in page.locator(".dendrogram").get_attribute("aria-label")
        page.get_by_role("button", name="OV circuits").click()
        page.get_by_text("54 heads by the cosine of their OV circuits").wait_for()
        assert page.locator(".dendrogram .branch").count() == 53
        page.get_by_role("button", name="Table").click()
        rows = page.get_by_role("table", name="Distances of all pairs").get_by_role("row")
        nearest = rows.nth(1).get_by_role("cell").all_inner_texts()
        values = compare_circuits(opened.get_model()).values.numpy()
        values[np.tril_indices(54)] = -2
        assert float(nearest[2]) == pytest.approx(1 - values.max(), abs=6e-3)
        page.get_by_role("button", name="outputs", exact=True).click()
        page.get_by_text("centred kernel alignment").wait_for()
        wait_until(page, "location.hash.includes('by=outputs')")


@pytest.mark.parametrize("texts", [None, [], ["one"], ["one", "  "], "one two"])
def test_a_single_text_is_refused(model: OpenModel, texts: Any):
    with pytest.raises(ValueError, match="give one text a line"):
        compute_similarity(model, {"texts": texts}, progress())
