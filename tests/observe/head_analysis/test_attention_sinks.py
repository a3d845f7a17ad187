"""The first token is a sink only where heads use it as one; p-values of ratios against float64
definitions.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy
import torch

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.attention_sinks import (
    MAX_SINK_TEXTS,
    mark_first_token_sinks,
    measure_first_token,
)
from headwise.observe.head_analysis.head_measurement import measure_heads
from headwise.observe.head_analysis.resampling import excess_p_values
from headwise.observe.inspect.attention_sites import require_ability
from observe.head_analysis import handset_heads as handmade
from support.number_examples import make_example, make_examples, small_gpt2


def test_p_of_a_ratio_is_calibrated_and_equals_a_plain_t_test_for_equal_counts():
    draw = np.random.default_rng(0)
    x, counts = draw.normal(3, 1, (7, 1)), np.full((7, 1), 5.0)
    t = (x / 5 - 0.4).mean() / ((x / 5).std(ddof=1) / math.sqrt(7))
    expected = scipy.stats.t.sf(t, 6)
    assert excess_p_values((x, counts), (np.full((7, 1), 2.0), counts))[0] == pytest.approx(
        expected
    )
    counts = draw.integers(3, 40, (9, 4000)).astype(float)
    sums = counts * 0.2 + draw.normal(0, 1, counts.shape) * np.sqrt(counts)
    p = excess_p_values((sums, counts), (0.2 * counts, counts))
    assert 0.03 < (p < 0.05).mean() < 0.07


def test_p_needs_two_texts_with_rows():
    sums, counts = (
        np.array([[1.0, 3.0], [0.0, 2.0], [0.0, 3.0]]),
        np.array([[4.0, 4.0], [0.0, 4.0], [0.0, 4.0]]),
    )
    p = excess_p_values((sums, counts), (np.zeros_like(sums), counts))
    assert math.isnan(p[0])
    assert 0 < p[1] < 0.05


def weights_of(net: hw.Transformer, example: Example) -> list[torch.Tensor]:
    probes = {name: hw.Probe("weights") for name, _ in net.spec.attention_specs()}
    net.probes = probes
    with torch.no_grad():
        net(example.model_inputs)
    net.probes = {}
    return [probe.tensors["weights"][0].double() for probe in probes.values()]


def test_the_weight_on_the_first_token_is_a_mean_over_rows_with_a_choice():
    net, texts = handmade.decoder(), handmade.texts(5)
    sites = require_ability(net, "observe")
    found = measure_first_token(
        net, sites, {one.site.name: ("text", "text") for one in sites}, texts
    )
    weights = [weights_of(net, text) for text in texts]
    for one in found:
        layer = int(one.site.split(".")[1])
        rows = [
            float(text[layer][one.head, t, 0])
            for text in weights
            for t in range(1, text[layer].shape[1])
        ]
        chance = [1 / (t + 1) for text in weights for t in range(1, text[layer].shape[1])]
        assert one.value == pytest.approx(np.mean(rows), abs=1e-6)
        assert one.chance == pytest.approx(np.mean(chance), abs=1e-6)


def sink_flags(net: torch.nn.Module, texts: list[Example]) -> tuple[list[bool], tuple[str, ...]]:
    sites = require_ability(net, "observe")
    marked, notes = mark_first_token_sinks(
        net, sites, {one.site.name: ("text", "text") for one in sites}, texts
    )
    return [bool(one.streams["text"].is_sink[0]) for one in marked], notes


def test_a_first_token_that_a_head_reads_is_a_sink():
    flags, notes = sink_flags(handmade.decoder(), handmade.texts(MAX_SINK_TEXTS + 3))
    assert flags == [True] * (MAX_SINK_TEXTS + 3)
    assert notes[0].startswith("the first token of the text is a sink: 1 of 6 heads")
    assert "L0H1 1.00 of its weight" in notes[0]


def test_a_first_token_that_no_head_prefers_is_a_word_like_others():
    net, texts = small_gpt2(sharp=1.0), make_examples(20)
    flags, notes = sink_flags(net, texts)
    assert flags == [False] * 20
    assert notes == (
        "the first token of the text is no sink: no head puts clearly more weight on it than "
        "chance",
    )
    table = measure_heads(net, texts)
    assert all(head.measures["sink"].value == pytest.approx(0, abs=1e-6) for head in table.heads)
    assert table.notes == notes


@pytest.mark.parametrize(
    ("net", "texts"),
    [
        (handmade.decoder(), handmade.texts(MAX_SINK_TEXTS + 3)),
        (small_gpt2(sharp=1.0), make_examples(7)),
    ],
    ids=["sink", "word"],
)
def test_measures_run_each_text_once_and_equal_those_of_marked_texts(net, texts):
    sites = require_ability(net, "observe")
    streams = {one.site.name: ("text", "text") for one in sites}
    marked = list(mark_first_token_sinks(net, sites, streams, texts)[0])
    ran = list[int]()
    handle = net.register_forward_hook(lambda _, args, output: ran.extend(range(len(output))))
    found = measure_heads(net, texts)
    handle.remove()
    assert len(ran) == len(texts)
    assert json.dumps(found.data) == json.dumps(measure_heads(net, marked).data)


def test_short_texts_in_which_chance_is_high_have_no_sink():
    flags, _ = sink_flags(
        small_gpt2(sharp=1.0), [make_example([n, n + 1, 7]) for n in range(3, 20)]
    )
    assert not any(flags)


def test_a_special_first_token_is_a_sink_without_a_measurement():
    texts = make_examples(4)
    special = [
        replace(
            one,
            streams={
                "text": replace(
                    one.streams["text"], is_special=torch.arange(one.streams["text"].count) == 0
                )
            },
        )
        for one in texts
    ]
    assert sink_flags(small_gpt2(sharp=1.0), special) == ([True] * 4, ())
