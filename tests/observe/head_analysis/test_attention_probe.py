"""The attention-only probe: word maps and likelihood by definition, planted
syntax, and baselines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.observe.head_analysis.dependency_syntax import (
    ProbeOptions,
    ProbeSentence,
    probe_loss,
    train_attention_probe,
    word_attention_maps,
)
from headwise.observe.inspect.attention_sites import find_attention
from support.importance_examples import BERT, build_model, random_ids, translator

TEXTS = 40


def stream(words: list[int]) -> TokenAnnotations:
    """Tokens that are pieces of these words, -1 for none."""
    none = torch.zeros(len(words), dtype=torch.bool)
    word = torch.tensor(words)
    return TokenAnnotations(
        torch.arange(len(words)),
        ("a",) * len(words),
        word < 0,
        none,
        none,
        word,
        torch.ones(len(words)),
    )


def own_maps(net: Any, text: torch.Tensor) -> torch.Tensor:
    """The weights of all heads, [heads, T, S], of an encoder of ours."""
    probes = {site.name: hw.Probe("weights") for site in hw.sites(net)}
    net.probes = probes
    with torch.no_grad():
        net(text)
    net.probes = {}
    return torch.cat([probe.tensors["weights"][0] for probe in probes.values()])


def planted(net: Any, head: int, count: int = TEXTS) -> list[Example]:
    """Texts whose words are governed by what one head reads most, itself aside."""
    examples = []
    for n in range(count):
        text = random_ids(n, 7 + n % 3)
        words = list(range(text.shape[1]))
        maps = own_maps(net, text)[head].clone().fill_diagonal_(0)
        arcs = [(dependent, int(maps[dependent].argmax()), "any") for dependent in words]
        examples.append(Example({"x": text}, {"text": stream(words)}, arcs))
    return examples


# --- by definition --------------------------------------------------------------------------------


def test_word_maps_sum_over_keys_and_average_over_queries(monkeypatch: pytest.MonkeyPatch):
    net, text, words = build_model(BERT), random_ids(0), [-1, 0, 0, 1, 2, 2, -1]
    maps, expected = own_maps(net, text).numpy(), np.zeros((6, 3, 3))
    for i in range(3):
        for j in range(3):
            reads, result = ([t for t, word in enumerate(words) if word == one] for one in (i, j))
            expected[:, i, j] = np.mean([sum(maps[:, t, s] for s in result) for t in reads], 0)
    for cells in (2**24, 3 * 7 * 2):  # all rows at once, and two at a time
        monkeypatch.setattr("headwise.observe.head_analysis.weight_bands.MAX_CELLS", cells)
        got = word_attention_maps(
            net, find_attention(net), Example({"x": text}, {"text": stream(words)})
        )
        np.testing.assert_allclose(torch.cat(list(got.values())), expected, rtol=1e-5)


def test_the_likelihood_is_its_definition():
    draw = torch.Generator().manual_seed(0)
    sentences = [
        ProbeSentence(torch.rand(2, 4, 4, generator=draw), [(0, 2), (1, 0), (3, 1)]),
        ProbeSentence(torch.rand(2, 3, 3, generator=draw), [(2, 0)]),
    ]
    weight, expected = np.array([1.5, -2.0, 0.5, 3.0]), []
    for maps, arcs in sentences:
        a = maps.numpy()
        for j, governor in arcs:
            words = [i for i in range(a.shape[1]) if i != j]
            scores = {
                i: sum(weight[k] * a[k, i, j] + weight[2 + k] * a[k, j, i] for k in range(2))
                for i in words
            }
            expected.append(np.log(sum(np.exp(list(scores.values())))) - scores[governor])
    result = probe_loss(sentences)(torch.from_numpy(weight).float())
    assert float(result) == pytest.approx(np.mean(expected), rel=1e-5)


# --- planted --------------------------------------------------------------------------------------


def test_planted_syntax_is_found_and_both_baselines_miss_it():
    net, copied = build_model(BERT), build_model(BERT, seed=5)
    examples = planted(net, 4)
    attention_probe = train_attention_probe(
        net, examples, random_baseline=copied, options=ProbeOptions(weight_decay=1e-5)
    )
    assert attention_probe.random_baseline is not None
    assert attention_probe.uas.value > 0.95
    assert attention_probe.uas.low > attention_probe.random_baseline.high
    assert attention_probe.uas.low > attention_probe.baseline.high
    largest = max(attention_probe.head_weights, key=lambda one: one.down)
    assert largest.down > 2 * largest.up
    assert (largest.site, largest.head) == ("encoder.1.attention", 1)
    assert abs(attention_probe.uas.chance - 1 / 7) < 0.03
    assert attention_probe.texts == (28, 12)
    assert sum(attention_probe.arcs) == sum(len(one.dependencies) for one in examples)


def test_directions_of_dependencies_are_distinguished():
    net = build_model(BERT)
    other = []
    for example in planted(net, 4):
        maps = own_maps(net, example.inputs["x"])[4].clone().fill_diagonal_(0)
        arcs = [
            (dependent, int(maps[:, dependent].argmax()), "any") for dependent in range(len(maps))
        ]
        other.append(replace(example, dependencies=arcs))  # a word is governed by who reads it most
    attention_probe = train_attention_probe(net, other, options=ProbeOptions(weight_decay=1e-5))
    largest = max(attention_probe.head_weights, key=lambda one: one.up)
    assert largest.up > 2 * largest.down
    assert (largest.site, largest.head) == ("encoder.1.attention", 1)
    assert attention_probe.uas.low > attention_probe.baseline.high + 0.1
    assert attention_probe.random_baseline is None


def test_the_offset_that_is_most_often_right_is_a_baseline():
    net = build_model(BERT)
    examples = []
    for n in range(10):
        arcs = [(word, word - 2, "any") for word in range(2, 7)] + [(0, 6, "far")]
        examples.append(Example({"x": random_ids(n)}, {"text": stream(list(range(7)))}, arcs))
    attention_probe = train_attention_probe(net, examples)
    assert attention_probe.offset == -2
    assert attention_probe.baseline.value == pytest.approx(
        5 / 6
    )  # all texts agree: too few for an interval
    assert np.isnan([attention_probe.baseline.low, attention_probe.baseline.high]).all()


# --- bad input ------------------------------------------------------------------------------------


def test_texts_without_arcs_are_left_out_and_counted():
    net, examples = build_model(BERT), planted(build_model(BERT), 4, 10)
    root = replace(examples[0], dependencies=[(2, -1, "root"), (2, 2, "root")])
    attention_probe = train_attention_probe(net, [*examples, root])
    assert attention_probe.notes == ("left out 1 text without dependencies",)


def test_unsupported_models_are_refused():
    net, examples = build_model(BERT), planted(build_model(BERT), 4, 10)
    for texts, reason in [
        (
            examples[:3],
            "3 texts with dependencies: 2 for training and 1 held out; at least two of each",
        ),
        (
            [replace(examples[0], dependencies=[(0, 9, "x")])],
            r"a dependency joins words \(0, 9\): the tokens have words 0..6",
        ),
        (
            [replace(examples[0], streams={"text": stream([-1] * 7)})] * 9,
            "the tokens have no words",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            train_attention_probe(net, texts)
    with pytest.raises(ValueError, match="in train mode"):
        train_attention_probe(net.train(), examples)
    with pytest.raises(ValueError, match="Linear has no attention that headwise finds"):
        train_attention_probe(torch.nn.Linear(2, 2).eval(), examples)
    with pytest.raises(ValueError, match="weight_decay must be >= 0, got -1"):
        ProbeOptions(weight_decay=-1)
    assert len([one for one in hw.sites(translator()) if one.stack == "decoder"]) == 4
