"""Dependency scores of heads, against counting on whole word maps; refusals."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import scipy
import torch

from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.observe.head_analysis.dependency_syntax import (
    DependencyScores,
    is_relation_measure,
)
from headwise.observe.head_analysis.weight_bands import WeightBand, WordBandMerger
from headwise.report.data import Estimate
from observe.head_analysis import attention_maps as maps

RELATIONS = ("nsubj", "obj", "poss")
SITE = "encoder.0.attention"
Counts = dict[tuple[str, str], list[np.ndarray]]


def is_above_chance(measure: Estimate) -> bool:
    return measure.low > measure.chance


def text(seed: int, kind: str) -> tuple[WeightBand, list[tuple[int, int, str]]]:
    """A map of pieces of words, and arcs among its words."""
    draw = np.random.default_rng(100 + seed)
    block = maps.weight_map(kind, seed, count=19)
    spelt = tuple("'s" if draw.random() < 0.3 else word for word in block.key_tokens.words)
    changed = replace(block.key_tokens, words=spelt)
    block = replace(block, query_tokens=changed, key_tokens=changed)
    words = int(changed.word_index.max()) + 1
    pairs = [(int(d), int(g)) for d in range(words) for g in [draw.integers(0, words)] if d != g]
    return block, [(d, g, str(draw.choice(RELATIONS))) for d, g in pairs]


def map_of_words(block: WeightBand) -> tuple[np.ndarray, np.ndarray, TokenAnnotations]:
    """The whole map [heads, words, words] without what is no word, and who may read whom."""
    recorded: list[WeightBand] = []
    WordBandMerger(lambda _, band: recorded.append(band)).add_band(SITE, block)
    (one,) = recorded
    in_words = (one.key_tokens.word_index >= 0).numpy()
    allowed = one.allowed.any(0).numpy()
    return (
        one.w_HTS.numpy()[:, in_words][:, :, in_words],
        allowed[in_words][:, in_words],
        one.key_tokens,
    )


def best(row: np.ndarray, expected: int) -> float:
    top = np.flatnonzero(row == row.max())
    return float(expected in top) / len(top)


def counted(block: WeightBand, arcs: list[tuple[int, int, str]]) -> Counts:
    """Hits of each head and of one that reads all alike, of each offset of -8..8, and the arcs, as
    we count them.
    """
    w, may, _ = map_of_words(block)
    alike, _, _ = map_of_words(block.uniform_baseline)
    w = np.concatenate([w, alike])
    found: Counts = defaultdict(list)
    for dependent, governor, relation in arcs:
        for value, expected, towards in (
            (dependent, governor, "governor"),
            (governor, dependent, "dependent"),
        ):
            if not may[value, expected]:
                continue
            rows = np.where(may[value], w[:, value], -1)
            hits = [best(row, expected) for row in rows]
            led = [float(value + o == expected) for o in range(-8, 9) if o]
            for name in (relation, "all"):
                found[name, towards].append(np.array([*hits, *led, 1.0]))
    return found


def clark(block: WeightBand, arcs: list[tuple[int, int, str]]) -> Counts:
    """The same as the notebook of 1906.04341 counts: transposed maps, itself left out, offsets end
    at the last word.
    """
    w, _, result = map_of_words(block)
    spelt = [result.words[n] for n in np.flatnonzero((result.word_index >= 0).numpy())]
    found: Counts = defaultdict(list)
    for towards, grid in (("governor", w), ("dependent", w.transpose(0, 2, 1))):
        grid = grid.copy()
        grid[:, range(len(spelt)), range(len(spelt))] = 0
        guess = grid.argmax(-1)
        for dependent, governor, relation in arcs:
            marked = (
                relation == "poss"
                and dependent + 1 < len(spelt)
                and spelt[dependent + 1] in ("'s", "s'")
            )
            actual = dependent + 1 if marked else dependent
            led = [float(min(actual + o, len(spelt) - 1) == governor) for o in range(-3, 3)]
            for name in (relation, "all"):
                found[name, towards].append(
                    np.array([*(guess[:, actual] == governor).astype(float), *led, 1.0])
                )
    return found


def example_of(block: WeightBand, arcs: list[tuple[int, int, str]]) -> Example:
    return Example(None, {"text": block.key_tokens}, dependencies=arcs)


def gone_through(
    syntax: DependencyScores, texts: list[tuple[WeightBand, list]], step: int
) -> DependencyScores:
    for block, arcs in texts:
        syntax.start_example(example_of(block, arcs))
        for band in maps.split_bands(block, step):
            syntax.add_band(SITE, band)
        syntax.finish_example()
    return syntax


@pytest.mark.parametrize("step", [19, 4])
@pytest.mark.parametrize(
    ("convention", "kind", "by_hand"),
    [
        ("ours", "full", counted),
        ("ours", "causal", counted),
        ("ours", "each", counted),
        ("clark", "full", clark),
    ],
)
def test_arcs_are_counted_one_by_one(convention: str, kind: str, by_hand, step: int):
    texts = [text(seed, kind) for seed in range(6)]
    syntax = gone_through(DependencyScores(convention=convention, min_arcs=1), texts, step)
    expected = [by_hand(*one) for one in texts]
    for value, own in zip(syntax.counts_by_example, expected, strict=True):
        nonzero = {key: sums for (_, key), sums in value.items() if sums[-1]}
        assert set(nonzero) == set(own)
        for key, rows in own.items():
            assert np.allclose(nonzero[key], sum(rows)), key
    measures = syntax.measures()
    tests = maps.HEADS * len({key for own in expected for key in own})
    for relation, towards in {key for own in expected for key in own}:
        none = np.zeros(maps.HEADS + syntax.num_baselines + 1)
        each = np.array([sum(own.get((relation, towards), []), none) for own in expected])
        share = each.sum(0)[:-1] / each.sum(0)[-1]
        each = each[each[:, -1] > 0]
        without = (
            (each.sum(0) - each)[:, :-1] / (each.sum(0) - each)[:, -1:]
            if len(each) > 1
            else each[:, :-1] * math.nan
        )
        better = without[:, : maps.HEADS] - without[:, maps.HEADS :].max(1)[:, None]
        error = better.std(0) * math.sqrt(len(each) - 1)
        far = scipy.stats.t.ppf(1 - 0.025 / tests, len(each) - 1) * error
        for head in range(maps.HEADS):
            one = measures[SITE, head][f"syntactic {relation} to {towards}"]
            assert one.value == pytest.approx(share[head])
            assert one.chance == pytest.approx(share[maps.HEADS :].max())
            if len(each) < 6 and not error[head] > 1e-9:
                assert math.isnan(one.low)
                assert math.isnan(one.p)
            else:
                ends = max(0.0, share[head] - far[head]), min(1.0, share[head] + far[head])
                assert (one.low, one.high) == pytest.approx(ends)


def test_a_head_that_follows_a_relation_is_above_and_one_at_an_offset_is_not():
    """Head 0 reads the governor in nine of ten texts, head 1 always the word before, head 2
    anything.
    """
    texts, draw = [], np.random.default_rng(0)
    for n in range(60):
        count = 12
        flags = [torch.zeros(count, dtype=torch.bool)] * 3
        token_annotations = TokenAnnotations(
            torch.arange(count), ("w",) * count, *flags, torch.arange(count), torch.ones(count)
        )
        governor = draw.integers(0, count, count)
        arcs = [(d, int(g), "nsubj") for d, g in enumerate(governor) if d != g]
        w = np.zeros((3, count, count))
        w[0, range(count), governor if n % 10 else draw.integers(0, count, count)] = 1
        w[1, range(count), [0, *range(count - 1)]] = 1
        w[2] = draw.random((count, count))
        texts.append(
            (
                WeightBand(
                    torch.from_numpy(w),
                    torch.ones(count, count, dtype=torch.bool),
                    0,
                    token_annotations,
                    token_annotations,
                ),
                arcs,
            )
        )
    syntax = gone_through(DependencyScores(), texts, 12)
    measures = syntax.measures()
    name = "syntactic nsubj to governor"
    assert is_above_chance(measures[SITE, 0][name])
    assert measures[SITE, 0][name].value == pytest.approx(0.9, abs=0.02)
    assert not any(is_above_chance(measures[SITE, head][name]) for head in (1, 2))
    assert measures[SITE, 1][name].value <= measures[SITE, 1][name].chance


def test_none_of_many_random_heads_is_above_its_baseline():
    """240 tests, a head, relation and direction each; one in 20 such families may have a single
    one.
    """
    draw, texts = np.random.default_rng(1), []
    for seed in range(40):
        base, arcs = text(seed, "full")
        noise = torch.from_numpy(draw.random((30, 19, 19)))
        texts.append((replace(base, w_HTS=noise / noise.sum(-1, keepdim=True)), arcs))
    measures = gone_through(DependencyScores(), texts, 19).measures()
    found = [one for value in measures.values() for one in value.values()]
    assert len(found) == 30 * 2 * (len(RELATIONS) + 1)
    assert not any(map(is_above_chance, found))


def test_rare_relations_and_texts_without_dependencies_give_no_result():
    texts = [text(seed, "full") for seed in range(3)]
    texts[1] = (texts[1][0], [])
    syntax = gone_through(DependencyScores(min_arcs=10_000), texts, 19)
    assert len(syntax.counts_by_example) == 3
    assert syntax.counts_by_example[1] == {}
    assert syntax.measures() == {}


def test_measures_of_one_relation():
    assert is_relation_measure("syntactic nmod:poss to dependent")
    assert not is_relation_measure("syntactic all to dependent")
    assert not is_relation_measure("separator")


@pytest.mark.parametrize("arc", [(0, 99, "obj"), (99, 0, "obj"), (-1, 0, "obj")])
def test_arcs_out_of_range_are_refused(arc: tuple[int, int, str]):
    block, _ = text(0, "full")
    with pytest.raises(
        ValueError, match="names a word that does not exist: the tokens have words 0"
    ):
        DependencyScores().start_example(example_of(block, [arc]))


def test_arcs_of_tokens_that_are_of_no_word_are_refused():
    block, arcs = text(0, "full")
    changed = replace(block.key_tokens, word_index=torch.full_like(block.key_tokens.word_index, -1))
    with pytest.raises(ValueError, match="the tokens have no words"):
        DependencyScores().start_example(Example(None, {"text": changed}, dependencies=arcs))


def test_examples_without_tokens():
    DependencyScores().start_example(Example(None, {}))
    with pytest.raises(ValueError, match="dependencies but no tokens"):
        DependencyScores().start_example(Example(None, {}, dependencies=[(0, 1, "obj")]))


def test_unknown_conventions_are_refused():
    with pytest.raises(ValueError, match="unknown convention 'clarke'; did you mean 'clark'"):
        DependencyScores(convention="clarke")


def test_the_interval_of_a_share_is_between_0_and_1():
    """Few texts, a share of 1: a normal interval would reach beyond it."""
    draw = np.random.default_rng(0)
    counts = np.full((6, 1), 4.0)
    sums = np.concatenate([np.full((6, 1), 4.0), draw.integers(0, 3, (6, 2)), counts], 1)
    scores = DependencyScores()
    scores.num_baselines = 2
    scores.counts_by_example = [{("site", ("obj", "governor")): row} for row in sums.astype(float)]
    measures = [one["syntactic obj to governor"] for one in scores.measures().values()]
    assert [one.value for one in measures] == [1.0]
    assert measures[0].high == 1
    assert 0 <= measures[0].low < 1
    assert measures[0].rows == 24
