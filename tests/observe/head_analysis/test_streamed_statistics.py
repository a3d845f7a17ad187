"""Heads measured by the Triton kernel as by bands of weights, on whole models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwise.kernels import triton_support
from headwise.observe.head_analysis import weight_bands
from headwise.observe.head_analysis.annotated_examples import Example, examples_from_lines
from headwise.observe.head_analysis.head_measurement import (
    CHANCE,
    FIRST_TOKEN,
    OBSERVED,
    MeasureOptions,
    MetricSums,
    measure_heads,
    sum_examples,
)
from headwise.observe.head_analysis.head_metrics import HEAD_METRICS
from headwise.observe.inspect.model_tokenizer import use_tokenizer
from observe.head_analysis import handset_heads
from support.importance_examples import BERT, GPT2, build_model
from support.transformers_models import ZOO

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        not triton_support.IS_INTERPRETED,
        reason="Triton is not interpreted; run make triton",
    ),
]
TEXTS = ["a, b and a, b again", "two to two; to two x x"]
OPTIONS = MeasureOptions()


def zoo(name: str) -> Any:
    entry = ZOO[name]
    return entry._replace(keys=entry.keys | {"vocab_size": 256}).build().eval()


MODELS = {
    "gpt2": lambda: build_model(GPT2 | {"vocab_size": 256}).float(),
    "bert": lambda: build_model(BERT | {"vocab_size": 256}).float(),
    **{name: lambda name=name: zoo(name) for name in ("llama", "gemma2", "gpt-oss")},
}


def list_examples(model: Any) -> list[Example]:
    with use_tokenizer(model, "bytes") as reader:
        return list(examples_from_lines(reader, TEXTS).examples_with_frequencies())


def measure(model: Any, dtype: torch.dtype = torch.float32) -> MetricSums:
    return sum_examples(model.to(dtype), list_examples(model), OPTIONS)


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_bands(name: str, monkeypatch: pytest.MonkeyPatch):
    model = MODELS[name]()
    bands = measure(model)
    monkeypatch.setattr(triton_support, "DEVICES", {"cpu"})

    def refuse(*args: Any) -> None:
        raise AssertionError("weights were computed")

    monkeypatch.setattr(weight_bands.WeightBand, "__init__", refuse)
    streamed = measure(model)
    assert {metric for _, metric, _ in streamed.sums_by_example} == set(HEAD_METRICS)
    # Bands also keep the sums with the first token as a sink; a stream is told of it before.
    assert {key for key in bands.sums_by_example if key[2] in (OBSERVED, CHANCE)} == {
        *streamed.sums_by_example,
        *((site, FIRST_TOKEN, source) for site, _, source in streamed.sums_by_example),
    }
    for key, found_texts in streamed.sums_by_example.items():
        texts = bands.sums_by_example[key]
        for (sums, counts), (found, found_counts) in zip(texts, found_texts, strict=True):
            np.testing.assert_allclose(found_counts, counts, atol=1e-6, err_msg=str(key))
            rounding = 1e-6 * np.maximum(1, np.maximum(np.abs(sums), counts))
            # a sum of no rows or pairs may hold what rounding leaves of all others
            assert (np.abs(found - sums) <= rounding)[counts > 0].all(), key


def test_a_first_token_that_a_head_reads_is_a_sink_as_with_bands(monkeypatch: pytest.MonkeyPatch):
    model = handset_heads.decoder().float()
    examples = handset_heads.texts(6)
    bands = measure_heads(model, examples)
    assert any("first token of the text is a sink" in note for note in bands.notes)
    monkeypatch.setattr(triton_support, "DEVICES", {"cpu"})
    streamed = measure_heads(model, examples)
    assert streamed.notes == bands.notes
    for own, other in zip(streamed.heads, bands.heads, strict=True):
        for name, measure in own.measures.items():
            value = other.measures[name].value
            assert measure.value == pytest.approx(value, abs=1e-5, nan_ok=True), name


def test_float64_and_collectors_take_bands(monkeypatch: pytest.MonkeyPatch):
    model = MODELS["gpt2"]()
    bands = measure(model, torch.float64)
    monkeypatch.setattr(triton_support, "DEVICES", {"cpu"})
    streamed = measure(model, torch.float64)
    for key, texts in bands.sums_by_example.items():
        np.testing.assert_array_equal(streamed.sums_by_example[key], texts)


def test_one_copy_reaches_the_host_for_each_text(monkeypatch: pytest.MonkeyPatch):
    model = MODELS["gpt2"]()
    monkeypatch.setattr(triton_support, "DEVICES", {"cpu"})
    copies: list[torch.Size] = []
    copy = torch.Tensor.cpu

    def count(self: torch.Tensor, *args: Any) -> torch.Tensor:
        copies.append(self.shape)
        return copy(self, *args)

    monkeypatch.setattr(torch.Tensor, "cpu", count)
    examples = list_examples(model)
    copies.clear()
    sum_examples(model, examples, OPTIONS)
    assert len(copies) == len(TEXTS)
