"""The strongest texts of each head against the weights of transformers, in bounded memory, however
the data set is divided.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.observe.head_analysis import top_sequences
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.head_measurement import MeasureOptions, measure_heads
from headwise.observe.head_analysis.text_analysis import read_texts
from headwise.observe.head_analysis.top_sequences import (
    SEQUENCE_MEASURES,
    SequenceCollector,
    TopSequences,
    find_top_sequences,
)
from headwise.util.errors import SpecError
from support.transformers_models import ZOO

LENGTHS = (3, 11, 5, 8)


def make_texts(count: int, repeats: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 60, (LENGTHS[n % 4],), generator=draw) for n in range(count)]
    return [torch.cat([one, one]) if repeats else one for one in texts]


def place_and_value(w_TS: Tensor, pairs_TS: Tensor) -> tuple[float, int, int]:
    """The largest of the chosen weights and its query and key; -inf if there is none."""
    best = (-np.inf, 0, 0)
    for t, s in pairs_TS.nonzero().tolist():
        if float(w_TS[t, s]) > best[0]:
            best = (float(w_TS[t, s]), t, s)
    return best


def choice(w_HTS: Tensor) -> Tensor:
    """The pairs of queries that may read several keys, of which the weights are above 0."""
    allowed = (w_HTS > 0).any(0)
    return allowed & (allowed.sum(-1, keepdim=True) > 1)


def expected_largest(model: Any, texts: list[Tensor], which: str) -> dict[tuple[int, int], Any]:
    """Every text's largest weight by layer and head, from the model's own attention weights."""
    found: dict[tuple[int, int], list[tuple[float, int, int, int]]] = {}
    for number, ids in enumerate(texts):
        with torch.no_grad():
            layers = getattr(model(ids[None], output_attentions=True), which)
        for layer, w_BHTS in enumerate(layers):
            for head, w_TS in enumerate(w_BHTS[0]):
                value, t, s = place_and_value(w_TS, choice(w_BHTS[0]))
                found.setdefault((layer, head), []).append((value, number, t, s))
    return {head: sorted(rows, key=lambda row: (-row[0], row[1])) for head, rows in found.items()}


def is_marked(model: nn.Module, texts: list[Tensor]) -> bool:
    """True if the first token of the texts was measured to be a sink."""
    return any("is a sink" in note for note in hw.heads(model, texts).notes)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_strongest_texts_are_those_of_the_models_own_weights(name: str):
    model = ZOO[name].build()
    texts = make_texts(20)
    assert not is_marked(model, texts)
    top = find_top_sequences(model, texts, count=4)
    expected = expected_largest(model, texts, "attentions")
    assert len(top.heads) == len(expected) == 8
    for ((_, head), kept), (place, rows) in zip(top.heads.items(), expected.items(), strict=True):
        assert head == place[1]
        strongest = [one for one in kept if not one.decile]
        assert [one[1:4] for one in strongest] == [row[1:] for row in rows[:4]]
        values = [row[0] for row in rows[:4]]
        assert np.allclose([one.value for one in strongest], values, rtol=1e-5)


def test_a_first_token_that_is_a_sink_and_special_tokens_are_left_out():
    model = ZOO["llama"].build()
    [example], _ = read_texts(model, [torch.tensor([5, 6, 7, 8])])
    tokens = example.streams["text"]
    special = torch.tensor([True, False, False, True])
    marks: list[dict[str, Any]] = [{"first_is_sink": True}, {"is_special": special}]
    for marked in marks:
        sinks = Example(example.inputs, {"text": replace(tokens, **marked)})
        collector = SequenceCollector(count=1)
        measured = MeasureOptions(metrics=(), min_texts=1)
        measure_heads(model, [sinks], options=measured, collectors=[collector])
        keys = {kept[0].key for kept in collector.result(model).heads.values()}
        assert keys <= {1, 2} | ({3} if "first_is_sink" in marked else set())


def is_pair(measure: str, ids: list[int], t: int, s: int) -> bool:
    """True if a measure is about this query and key."""
    if measure == "duplicate":
        return ids[t] == ids[s] and t != s
    if measure == "induction":
        return 0 < s < t and ids[t] == ids[s - 1]
    return s - t == {"previous": -1, "self": 0, "next": 1}[measure]


PAIR_MEASURES = [one for one in SEQUENCE_MEASURES if one not in ("largest", "punctuation")]


@pytest.mark.parametrize("measure", PAIR_MEASURES)
def test_other_measures_are_weights_of_a_query_on_its_pairs(measure: str):
    model = ZOO["bert" if measure == "next" else "llama"].build()
    texts = make_texts(6, repeats=True)
    top = find_top_sequences(model, texts, measure, count=6)
    for number, ids in enumerate(texts):
        with torch.no_grad():
            layers = model(ids[None], output_attentions=True).attentions
        heads = [w_TS for w_BHTS in layers for w_TS in w_BHTS[0]]
        for kept, w_TS in zip(top.heads.values(), heads, strict=True):
            rows: list[float] = []
            for t, weights in enumerate(w_TS.tolist()):
                has_choice = sum(one > 0 for one in weights) > 1
                chosen = [
                    one
                    for s, one in enumerate(weights)
                    if has_choice and is_pair(measure, ids.tolist(), t, s)
                ]
                rows.append(sum(chosen))
            [one] = [one for one in kept if one.text == number and not one.decile]
            assert abs(one.value - max(rows)) < 1e-6
            assert abs(rows[one.query] - max(rows)) < 1e-6
            assert is_pair(measure, ids.tolist(), one.query, one.key)


def test_deciles_hold_the_texts_of_each_tenth():
    model = ZOO["llama"].build()
    texts = make_texts(40)
    top = find_top_sequences(model, texts, count=1)
    expected = expected_largest(model, texts, "attentions")
    for kept, rows in zip(top.heads.values(), expected.values(), strict=True):
        rank = {row[1]: n for n, row in enumerate(reversed(rows))}
        deciles = [one.decile for one in kept if one.decile]
        assert deciles == sorted([*range(1, 11)] * 3, reverse=True)
        for one in kept[1:]:
            assert one.decile == rank[one.text] * 10 // 40 + 1
    other = find_top_sequences(model, texts, count=1, seed=1)
    assert other.data["heads"] != top.data["heads"]


def collect(model: nn.Module, texts: list[Tensor], count: int) -> SequenceCollector:
    examples, _ = read_texts(model, texts)
    collector = SequenceCollector(count=count)
    measured = MeasureOptions(metrics=(), min_texts=1)
    measure_heads(model, examples, options=measured, collectors=[collector])
    return collector


@pytest.mark.parametrize("size", [1, 3, 7])
def test_shards_in_order_give_the_same_texts(size: int):
    model = ZOO["llama"].build()
    texts = make_texts(23)
    whole = collect(model, texts, 5)
    merged = SequenceCollector(count=5)
    for first in range(0, len(texts), size):
        merged.merge(collect(model, texts[first : first + size], 5))
    assert json.dumps(merged.result(model).data) == json.dumps(whole.result(model).data)


def test_memory_does_not_grow_with_the_number_of_texts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(top_sequences, "MAX_SAMPLE", 8)
    model = ZOO["llama"].build()
    texts = make_texts(400)
    sizes: list[int] = []
    for count in (100, 400):
        collector = collect(model, texts[:count], 2)
        assert len(collector.sample) == 8
        assert len(collector.texts) <= 8 + 2 * 8
        sizes.append(len(pickle.dumps(collector)))
    assert sizes[1] < 1.5 * sizes[0]


def test_cross_attention_names_tokens_of_both_texts():
    model = ZOO["bart"].build()
    pairs = [
        {"input_ids": one[None], "decoder_input_ids": one[None].flip(1)} for one in make_texts(6)
    ]
    top = find_top_sequences(model, pairs, count=2)
    cross = {site: kept for site, kept in top.heads.items() if site[0].endswith("cross")}
    assert len(cross) == 8
    for kept in cross.values():
        queries = top.words(kept[0].text, "text")
        keys = top.words(kept[0].text, "source")
        assert (kept[0].query < len(queries), kept[0].key < len(keys)) == (True, True)
    induction = find_top_sequences(model, pairs, "previous", count=2)
    assert not any(site.endswith("cross") for site, _ in induction.heads)


def test_texts_of_one_token_are_not_kept():
    model = ZOO["llama"].build()
    texts = [torch.tensor([5]), torch.tensor([6, 7, 8]), torch.tensor([9])]
    top = find_top_sequences(model, texts, count=3)
    assert {one.text for kept in top.heads.values() for one in kept} == {1}
    assert find_top_sequences(model, [torch.tensor([5])]).table.rows == []


def test_tables_and_json():
    model = ZOO["llama"].build()
    top = find_top_sequences(model, make_texts(12), count=2)
    assert isinstance(top, TopSequences)
    values = [float(str(row[1])) for row in top.table.rows]
    assert values == sorted(values, reverse=True)
    assert len(values) == 8
    rows = top.head_table("L1H2").rows
    assert [row[0] for row in rows][:2] == ["strongest"] * 2
    data = json.loads(json.dumps(top.data))
    assert {one["text"] for head in data["heads"] for one in head["sequences"]} == {
        int(n) for n in data["texts"]
    }


def test_refusals():
    model = ZOO["llama"].build()
    texts = make_texts(3)
    with pytest.raises(SpecError, match="unknown measure 'larges'; did you mean 'largest'"):
        find_top_sequences(model, texts, "larges")
    with pytest.raises(SpecError, match="count must be >= 1, got 0"):
        find_top_sequences(model, texts, count=0)
    with pytest.raises(SpecError, match="only 0 of the texts can be read"):
        find_top_sequences(model, [])
    top = find_top_sequences(model, texts)
    with pytest.raises(ValueError, match="has no head 9; give heads in 0"):
        top.head_table("L1H9")
