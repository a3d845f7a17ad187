"""The Similarity screen: its distances are those of the library, over the texts of the job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.viewer import bundled_sample
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from headwise.viewer.similarity_actions import compute_similarity
from headwise.viewer.tile_encoding import decode_arrays

TEXTS = ["<zh>12,345 dollars", "<zh>7 dollars", "<zh>809.50 dollars"]


@pytest.fixture(scope="module")
def model() -> OpenModel:
    return OpenModel(bundled_sample.load_sample_trace(), load_model=bundled_sample.load_sample_model)


def progress() -> JobProgress:
    return JobProgress(Job("test", {}))


def test_distances_are_those_of_the_library(model: OpenModel):
    header, arrays = decode_arrays(compute_similarity(model, {"texts": TEXTS}, progress()))
    reader = hw.ExampleReader(model.get_model())
    for text in TEXTS:
        reader.add_text(text)
    expected = hw.measure_redundancy(model.get_model(), reader.examples_with_frequencies())
    assert header["texts"] == 3
    assert [group["streams"] for group in header["groups"]] == [list(group.streams) for group in expected.readers]
    sites = [layer.name for layer in model.get_trace().layers]
    for number, group in enumerate(expected.readers):
        np.testing.assert_allclose(arrays[f"{number}.distances"], group.distances, rtol=1e-5, atol=1e-7)
        assert arrays[f"{number}.merges"].shape == (len(group.heads) - 1, 3)
        heads = [(sites[site], head) for site, head in header["groups"][number]["heads"]]
        assert heads == [(head.site, head.head) for head in group.heads]


@pytest.mark.parametrize("texts", [None, [], ["one"], ["one", "  "], "one two"])
def test_a_single_text_is_refused(model: OpenModel, texts: Any):
    with pytest.raises(ValueError, match="give one text a line"):
        compute_similarity(model, {"texts": texts}, progress())
