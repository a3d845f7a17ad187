"""Word alignment by cross-attention heads, against the alignment error rate over sets of links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.observe.head_analysis.weight_bands import WeightBand
from headwise.observe.head_analysis.word_alignment import AlignmentScores
from observe.head_analysis import attention_maps as maps

SITE = "decoder.0.cross"
Links = list[tuple[int, int, bool]]


def pair(seed: int, kind: str = "full") -> tuple[WeightBand, Links]:
    """A map between the pieces of two texts, and gold links between their
    words, some of them sure.
    """
    draw = np.random.default_rng(seed)
    block = maps.weight_map(kind, seed, count=13, other=17)
    source, text = (
        int(block.key_tokens.word_index.max()) + 1,
        int(block.query_tokens.word_index.max()) + 1,
    )
    links = {
        (int(draw.integers(source)), int(draw.integers(text))): bool(draw.random() < 0.6)
        for _ in range(9)
    }
    return block, [(s, t, sure) for (s, t), sure in links.items()]


def links_of(block: WeightBand, row: str) -> tuple[list[dict[tuple[int, int], float]], int]:
    """The links of each head, of uniform weights and of the diagonal, each with its share of a tie;
    and how many.
    """
    result = block.query_tokens.word_index.tolist()
    result = result if row == "input" else [*result[1:], -1]
    actual = block.key_tokens.word_index.tolist()
    allowed = block.allowed.numpy().any(0)
    words = sorted({one for one in result if one >= 0})
    counts = max(block.query_tokens.word_index.tolist()) + 1, max(actual) + 1
    grids = [w.numpy() for w in block.w_HTS]
    found: list[dict[tuple[int, int], float]] = [{} for _ in range(len(grids) + 2)]
    linked = 0
    for word in words:
        rows = [t for t, one in enumerate(result) if one == word]
        may = sorted(
            {s for t in rows for s, one in enumerate(actual) if one >= 0 and allowed[t, s]}
        )
        if not may:
            continue
        linked += 1
        readable = sorted({actual[s] for s in may})
        for head, grid in enumerate(grids):
            weight = {
                w: sum(grid[t, s] for t in rows for s, one in enumerate(actual) if one == w)
                for w in readable
            }
            top = [w for w in readable if weight[w] == max(weight.values())]
            found[head].update({(w, word): 1 / len(top) for w in top})
        found[-2].update({(w, word): 1 / len(readable) for w in readable})
        found[-1][int((word + 0.5) * counts[1] / counts[0]), word] = 1.0
    return found, linked


@pytest.mark.parametrize("step", [17, 3])
@pytest.mark.parametrize("row", ["input", "target"])
@pytest.mark.parametrize("kind", ["full", "holes", "each"])
def test_links_are_counted_as_sets(kind: str, row: str, step: int):
    texts = [pair(seed, kind) for seed in range(5)]
    alignment = AlignmentScores()
    for block, links in texts:
        alignment.start_example(
            Example(
                None,
                {"source": block.key_tokens, "text": block.query_tokens},
                alignment_links=links,
            )
        )
        for band in maps.split_bands(block, step):
            alignment.add_band(SITE, band)
        alignment.finish_example()
    measures = alignment.measures()
    right, sample, gold = np.zeros((2, maps.HEADS + 2)), 0, 0
    for block, links in texts:
        found, linked = links_of(block, row)
        sure, possible = (
            {(s, t) for s, t, is_sure in links if is_sure},
            {(s, t) for s, t, _ in links},
        )
        right += [
            [sum(one.get(link, 0) for link in pairs) for one in found] for pairs in (sure, possible)
        ]
        sample, gold = sample + linked, gold + len(sure)
    expected = {
        "": right.sum(0) / (sample + gold),
        " precision": right[1] / sample,
        " recall": right[0] / gold,
    }
    for head in range(maps.HEADS):
        for name, values in expected.items():
            one = measures[SITE, head][f"alignment {row}{name}"]
            assert one.value == pytest.approx(values[head])
            assert one.chance == pytest.approx(values[-2:].max())
            assert one.low <= one.value <= one.high


def test_a_head_that_draws_the_gold_links_has_no_error():
    """One that links all target words as people did, of whom some were not sure, and one along the
    diagonal.
    """
    count, order = 7, [3, 1, 0, 6, 5, 2, 4]
    flags = [torch.zeros(count, dtype=torch.bool)] * 3
    source, text = (
        TokenAnnotations(
            torch.arange(count), ("w",) * count, *flags, torch.arange(count), torch.ones(count)
        )
        for _ in range(2)
    )
    w = torch.zeros(2, count, count)
    w[0, range(count), order] = 1
    w[1] = torch.eye(count)
    alignment = AlignmentScores()
    for _ in range(2):
        links = [(s, t, t != 2) for t, s in enumerate(order)]
        alignment.start_example(
            Example(None, {"source": source, "text": text}, alignment_links=links)
        )
        alignment.add_band(
            SITE, WeightBand(w, torch.ones(count, count, dtype=torch.bool), 0, text, source)
        )
        alignment.add_band(
            "decoder.0.attention",
            WeightBand(w, torch.ones(count, count, dtype=torch.bool), 0, text, text),
        )
        alignment.finish_example()
    measures = alignment.measures()
    assert set(measures) == {(SITE, 0), (SITE, 1)}
    assert measures[SITE, 0]["alignment input"].value == 1
    assert (
        measures[SITE, 1]["alignment input"].value
        == measures[SITE, 1]["alignment input"].chance
        == 2 / 13
    )
    assert measures[SITE, 0]["alignment target"].value < 0.5


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ((99, 0, True), "names word 99 of the source, which has"),
        ((0, 99, True), "names word 99 of the text, which has"),
        ((-1, 0, True), "names word -1 of the source"),
    ],
)
def test_links_out_of_range_are_refused(link: tuple[int, int, bool], message: str):
    block, _ = pair(0)
    with pytest.raises(ValueError, match=message):
        AlignmentScores().start_example(
            Example(
                None,
                {"source": block.key_tokens, "text": block.query_tokens},
                alignment_links=[link],
            )
        )


def test_links_without_words_or_without_a_source_are_refused():
    block, links = pair(0)
    nothing = replace(block.key_tokens, word_index=torch.full_like(block.key_tokens.word_index, -1))
    with pytest.raises(ValueError, match="of the source, which has no words; count words from 0"):
        AlignmentScores().start_example(
            Example(None, {"source": nothing, "text": block.query_tokens}, alignment_links=links)
        )
    with pytest.raises(
        ValueError,
        match=r"links need a source and a target text .this example has only: text.; leave",
    ):
        AlignmentScores().start_example(
            Example(None, {"text": block.query_tokens}, alignment_links=links)
        )


def test_texts_without_links_are_left_out():
    block, links = pair(0)
    alignment = AlignmentScores()
    for some in (links, [], links):
        alignment.start_example(
            Example(
                None, {"source": block.key_tokens, "text": block.query_tokens}, alignment_links=some
            )
        )
        alignment.add_band(SITE, block)
        alignment.finish_example()
    assert [bool(value) for value in alignment.counts_by_example] == [True, False, True]
    assert alignment.measures()
