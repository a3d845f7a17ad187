"""Head metrics against their definitions, one row and one key at a time, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.observe.head_analysis.head_measurement import (
    CHANCE,
    FIRST_TOKEN,
    MeasureOptions,
    MetricSums,
    measure_heads,
)
from headwise.observe.head_analysis.head_metrics import (
    ALL_METRICS,
    HEAD_METRICS,
    LITERATURE_METRICS,
    MASS_TOLERANCE,
    MAX_DISTANCE,
    MAX_OFFSET,
    HeadMetric,
    metrics_for_criteria,
    random_breadth_sums,
    variance_explained_by_offset,
)
from headwise.observe.head_analysis.resampling import ratio_of_sums
from headwise.observe.head_analysis.weight_bands import (
    MIN_NON_SINK_WEIGHT,
    WeightBand,
    WordBandMerger,
    merge_annotations,
    number_words,
)
from observe.head_analysis import attention_maps as maps


def of_criteria(criteria: str) -> list[HeadMetric]:
    return [LITERATURE_METRICS[name] for name in metrics_for_criteria(criteria)]


KINDS = ("full", "causal", "holes", "each")
CASES = [*((kind, 0) for kind in KINDS), ("holes", 1)]


class Row:
    """What one query of one head reads, as lists."""

    def __init__(self, block: WeightBand, head: int, t: int) -> None:
        allowed = block.allowed[head % len(block.allowed)]
        self.w, self.t = block.w_HTS[head, t].tolist(), t
        self.may_read = [s for s, ok in enumerate(allowed[t].tolist()) if ok]
        self.query_tokens, self.key_tokens = block.query_tokens, block.key_tokens
        self.id = int(block.query_tokens.ids[t])
        self.ids = block.key_tokens.ids.tolist()

    def without(self, keys: list[int], *, renormalised: bool = True) -> Row:
        row = object.__new__(Row)
        row.__dict__.update(self.__dict__)
        row.w = [0.0 if s in keys else w for s, w in enumerate(self.w)]
        left = sum(row.w)
        row.may_read = [s for s in self.may_read if s not in keys]
        if renormalised:
            row.may_read = row.may_read if left >= MIN_NON_SINK_WEIGHT else []
            row.w = [w / left for w in row.w] if left >= MIN_NON_SINK_WEIGHT else [0.0] * len(row.w)
        return row

    def on(self, keys: list[int]) -> tuple[float, int]:
        """The weight on these keys, counted where one of them may be read."""
        return (sum(self.w[s] for s in keys), 1) if set(keys) & set(self.may_read) else (0.0, 0)

    def mostly(self, keys: list[int]) -> float:
        best = [s for s, w in enumerate(self.w) if w == max(self.w)]
        return sum(s in keys for s in best) / len(best)


def flagged(flags: torch.Tensor) -> list[int]:
    return [s for s, flag in enumerate(flags.tolist()) if flag]


def sinks(row: Row) -> list[int]:
    return sorted(
        {
            *[0][: row.key_tokens.first_is_sink],
            *flagged(row.key_tokens.is_special),
            *flagged(row.key_tokens.is_separator),
        }
    )


def alive(value: Callable[[Row], float]) -> Callable[[Row], tuple[float, int]]:
    return lambda row: (value(row), 1) if row.may_read else (0.0, 0)


def nats(row: Row) -> float:
    return -sum(w * math.log(w) for w in row.w if w > 0)


def keys_for(share: float, row: Row) -> float:
    goal, stored, keys = share * sum(row.w) * (1 - MASS_TOLERANCE), 0.0, 0
    for w in sorted(row.w, reverse=True):
        stored, keys = stored + w, keys + 1
        if stored >= goal:
            break
    return keys / len(row.may_read)


def rarest(row: Row) -> list[int]:
    frequencies = {
        s: int(n)
        for s, n in enumerate(row.key_tokens.frequency.tolist())
        if n > 0 and not row.key_tokens.is_special[s]
    }
    return [s for s, n in frequencies.items() if n == min(frequencies.values())]


def rare(row: Row) -> tuple[float, int]:
    return (row.mostly(rarest(row)), 1) if set(rarest(row)) & set(row.may_read) else (0.0, 0)


def at(offset: int) -> Callable[[Row], tuple[float, int]]:
    return lambda row: row.on([row.t + offset]) if 0 <= row.t + offset < len(row.w) else (0.0, 0)


def duplicate(row: Row) -> tuple[float, int]:
    return row.on([s for s, one in enumerate(row.ids) if one == row.id and s != row.t])


def induction(row: Row) -> tuple[float, int]:
    return row.on([s for s in range(1, row.t) if row.ids[s - 1] == row.id])


def offsets(row: Row) -> np.ndarray:
    return np.array([row.mostly([row.t + o]) for o in range(-MAX_OFFSET, MAX_OFFSET + 1)])


ROWS: dict[str, Callable[[Row], tuple[float, int]]] = {
    "entropy": alive(nats),
    "breadth": lambda row: (
        (math.exp(nats(row)) / len(row.may_read), 1) if len(row.may_read) > 1 else (0.0, 0)
    ),
    "confidence": alive(lambda row: max(row.w)),
    "distance": alive(lambda row: sum(w * abs(s - row.t) for s, w in enumerate(row.w))),
    "sink": alive(lambda row: 1 - sum(w for s, w in enumerate(row.w) if s not in sinks(row))),
    "separator": lambda row: row.on(flagged(row.key_tokens.is_separator)),
    "first": lambda row: row.on([0]),
    "punctuation": lambda row: row.on(flagged(row.key_tokens.is_punctuation)),
    "previous": at(-1),
    "self": at(0),
    "next": at(1),
    "duplicate": duplicate,
    "induction": induction,
    "rare": rare,
    **{f"support{n}": alive(lambda row, n=n: keys_for(n / 100, row)) for n in (50, 90, 95)},
}


def rows_of(block: WeightBand, name: str, head: int) -> list[Row]:
    rows = [Row(block, head, t) for t in range(block.w_HTS.shape[1])]
    return (
        [row.without(sinks(row)) for row in rows]
        if ALL_METRICS[name].weight_source == "rest"
        else rows
    )


def own(block: WeightBand, name: str) -> WeightBand:
    """What a statistic is given, by the way that measuring takes."""
    recorded: list[WeightBand] = []

    def compute_sums(one: WeightBand) -> tuple[torch.Tensor, torch.Tensor]:
        recorded.append(replace(one, w_HTS=one.w_HTS.clone()))
        return one.w_HTS[:, 0, 0], one.w_HTS[:, 0, 0]

    adding = MetricSums([replace(HEAD_METRICS[name], compute_sums=compute_sums)])
    adding.add_band("site", block)
    adding.finish_example()
    return recorded[0]


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_sums_and_numbers_are_those_of_every_row(name: str, kind: str, seed: int):
    block = maps.weight_map(kind, seed)
    sums, numbers = HEAD_METRICS[name].compute_sums(own(block, name))
    entry = {"support50": 0, "support90": 1, "support95": 2}.get(name)
    if entry is not None:
        sums, numbers = sums[:, entry], numbers[:, entry]
    for head in range(maps.HEADS):
        values = [ROWS[name](row) for row in rows_of(block, name, head)]
        assert float(numbers[head]) == sum(n for _, n in values)
        assert float(sums[head]) == pytest.approx(sum(v for v, n in values if n), abs=1e-12)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_offsets_are_those_of_the_largest_weights(kind: str, seed: int):
    block = maps.weight_map(kind, seed)
    for name in ("offset", "peak"):
        sums, numbers = HEAD_METRICS[name].compute_sums(own(block, name))
        fold = HEAD_METRICS[name].reduce
        assert fold is not None
        for head in range(maps.HEADS):
            values = [offsets(row) for row in rows_of(block, name, head) if row.may_read]
            assert np.allclose(
                sums[head].numpy(), sum(values, np.zeros(2 * MAX_OFFSET + 1)), atol=1e-12
            )
            assert set(numbers[head].tolist()) == {len(values)}
            best = np.mean(values, 0)
            expected = best.max() if name == "offset" else best.argmax() - MAX_OFFSET
            assert float(fold(sums[head] / numbers[head])) == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_distance_r2_equals_regression_on_offsets(kind: str, seed: int):
    """R^2 of least squares on a column for each offset, and one for all that are farther, over
    several texts.
    """
    texts = [
        own(maps.weight_map(kind, 10 * seed + n, count=count), "positional_share")
        for n, count in enumerate((5, 19, 37))
    ]
    values = [HEAD_METRICS["positional_share"].compute_sums(one) for one in texts]
    sums, numbers = (torch.stack([part[n] for part in values]).sum(0) for n in range(2))
    found = variance_explained_by_offset(
        torch.from_numpy(ratio_of_sums(sums.numpy()[None], numbers.numpy()[None]))
    )
    for head in range(maps.HEADS):
        rows = [row for one in texts for row in rows_of_given(one, head)]
        pairs = [(row.w[s], s - row.t) for row in rows for s in row.may_read]
        weights = np.array([w for w, _ in pairs])
        columns = {o: n for n, o in enumerate(range(-MAX_DISTANCE, MAX_DISTANCE + 1))}
        design = np.zeros((len(pairs), 2 * MAX_DISTANCE + 2))
        design[np.arange(len(pairs)), [columns.get(o, -1) for _, o in pairs]] = 1
        left = weights - design @ np.linalg.lstsq(design, weights, rcond=None)[0]
        expected = 1 - (left**2).sum() / ((weights - weights.mean()) ** 2).sum()
        assert float(found[head]) == pytest.approx(expected, abs=1e-9)


def rows_of_given(block: WeightBand, head: int) -> list[Row]:
    left = (
        torch.ones_like(block.w_HTS[..., 0], dtype=torch.bool)
        if block.counted_rows is None
        else block.counted_rows
    )
    count = left.expand(len(block.w_HTS), -1)[head].tolist()
    block = replace(block, w_HTS=block.scale_rows(block.w_HTS))
    return [Row(block, head, t) for t in range(block.w_HTS.shape[1]) if count[t]]


def test_rows_without_sinks_have_no_weight_on_them():
    """Weights that sum to 1 up to rounding leave nothing for a sink."""
    block = maps.weight_map("full", 0)
    never = torch.zeros_like(block.key_tokens.is_special)
    tokens = replace(block.key_tokens, is_special=never, is_separator=never)
    block = replace(block, key_tokens=tokens)
    assert not block.non_sink_weight[1:].eq(1).all()  # head 0 has a learned sink
    sums, _ = HEAD_METRICS["sink"].compute_sums(block)
    assert not sums[1:].any()
    assert sums[0] > 1


def test_distance_explains_nothing_of_constant_weights():
    block = maps.weight_map("full", 0, ends=False).uniform_baseline
    sums, numbers = HEAD_METRICS["positional_share"].compute_sums(block)
    assert float(variance_explained_by_offset(sums / torch.where(numbers > 0, numbers, 1))) == 0


def test_a_content_independent_head_is_explained_by_distance():
    """Each offset has a weight of its own; rows are not made whole, or their ends would differ."""
    base = maps.weight_map("full", 0)
    far = (torch.arange(17) - torch.arange(17)[:, None]).double()
    weight_band = WeightBand(
        torch.exp(-far.square())[None] / 2, base.allowed, 0, base.query_tokens, base.key_tokens
    )
    sums, numbers = HEAD_METRICS["positional_share"].compute_sums(weight_band)
    assert float(variance_explained_by_offset(sums / numbers.clamp(min=1))) == pytest.approx(
        1, abs=1e-12
    )


def added(names: tuple[str, ...], whole: WeightBand, step: int, by: str = "tokens") -> dict:
    adding = MetricSums([ALL_METRICS[name] for name in names])
    words = WordBandMerger(adding.add_band)
    for band in maps.split_bands(whole, step):
        (words.add_band if by == "words" else adding.add_band)("site", band)
    adding.finish_example()
    return {key: value[0] for key, value in adding.sums_by_example.items()}


@pytest.mark.parametrize(("kind", "by"), [*zip(KINDS, ["tokens", "words"] * 2, strict=True)])
def test_bands_of_any_size_add_up_to_one(kind: str, by: str):
    block = maps.weight_map(kind, 7, count=23)
    once = added(tuple(ALL_METRICS), block, 23, by)
    expected = {("site", name, which) for name in ALL_METRICS for which in ("own", CHANCE)}
    assert expected <= set(once)
    for step in (1, 5):
        again = added(tuple(ALL_METRICS), block, step, by)
        for key, (sums, numbers) in once.items():
            assert np.allclose(again[key][0], sums, rtol=1e-12, atol=1e-12), key
            assert np.allclose(again[key][1], numbers, rtol=1e-12, atol=1e-12), key


def test_rows_of_long_texts_that_are_sorted_are_spread_and_the_same_in_any_bands():
    block = maps.weight_map("causal", 3, count=301)
    sums, numbers = HEAD_METRICS["support90"].compute_sums(block)
    spread = [round(300 * n / 63) for n in range(64)]
    assert set(numbers.flatten().tolist()) == {64}
    for head in range(maps.HEADS):
        assert float(sums[head, 1]) == pytest.approx(
            sum(keys_for(0.9, Row(block, head, t)) for t in spread)
        )
    again = added(("support90",), block, 7)["site", "support90", "own"]
    assert np.allclose(again[0], sums)
    assert np.allclose(again[1], numbers)


@pytest.mark.parametrize("name", ["previous", "rare", "duplicate", "offset"])
def test_chance_is_the_mean_of_many_random_heads(name: str):
    """Heads of random weights, none preferred: their mean is the head that reads all alike."""
    base = maps.weight_map("causal", 11)
    draw = torch.Generator().manual_seed(0)
    noise = torch.rand(20_000, 17, 17, generator=draw, dtype=torch.float64) * base.allowed
    many = replace(base, w_HTS=noise / noise.sum(-1, keepdim=True))
    result, chance = (
        HEAD_METRICS[name].compute_sums(one.without_sinks())
        for one in (many, base.uniform_baseline)
    )
    found = result[0].mean(0) / result[1].mean(0)
    assert torch.allclose(found, (chance[0] / chance[1])[0], atol=0.01)


# --- others between two streams -------------------------------------------------------------------


def test_between_two_texts_there_is_no_distance():
    block = maps.weight_map("full", 2, count=11, other=7)
    names = {name for _, name, _ in added(tuple(ALL_METRICS), block, 3)} - {FIRST_TOKEN}
    assert names == {name for name, one in ALL_METRICS.items() if not one.self_attention_only}
    for name in ("entropy", "sink", "punctuation", "rare"):
        sums, numbers = HEAD_METRICS[name].compute_sums(own(block, name))
        for head in range(maps.HEADS):
            values = [ROWS[name](row) for row in rows_of(block, name, head)]
            assert float(numbers[head]) == sum(n for _, n in values)
            assert float(sums[head]) == pytest.approx(sum(v for v, n in values if n), abs=1e-12)


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_words_are_read_by_all_pieces_and_read_on_average(kind: str, seed: int):
    block = maps.weight_map(kind, seed)
    recorded: list[WeightBand] = []
    words = WordBandMerger(lambda _, band: recorded.append(band))
    for band in maps.split_bands(block, 4):
        words.add_band("site", band)
    of = number_words(block.key_tokens).tolist()
    count = of[-1] + 1
    allowed = block.allowed.expand(maps.HEADS, -1, -1)
    expected, may = np.zeros((maps.HEADS, count, count)), np.zeros((maps.HEADS, count, count), bool)
    for t, row in enumerate(of):
        for s, key in enumerate(of):
            expected[:, row, key] += block.w_HTS[:, t, s].numpy() / of.count(row)
            may[:, row, key] |= allowed[:, t, s].numpy()
    assert np.allclose(torch.cat([one.w_HTS for one in recorded], 1).numpy(), expected)
    found = torch.cat([one.allowed for one in recorded], -2).numpy()
    assert (np.broadcast_to(found, may.shape) == may).all()
    assert [one.first_query for one in recorded] == np.cumsum(
        [0, *(one.w_HTS.shape[1] for one in recorded[:-1])]
    ).tolist()
    assert all(one.is_self_attention for one in recorded)


def test_word_annotations():
    block = maps.weight_map("full", 4)
    key_tokens, of = block.key_tokens, number_words(block.key_tokens).tolist()
    merged = merge_annotations(key_tokens)
    for number in range(of[-1] + 1):
        tokens = [s for s, one in enumerate(of) if one == number]
        assert merged.words[number] == "".join(key_tokens.words[s] for s in tokens)
        assert int(merged.frequency[number]) == min(int(key_tokens.frequency[s]) for s in tokens)
        assert bool(merged.is_special[number]) == any(
            bool(key_tokens.is_special[s]) for s in tokens
        )
        assert int(merged.word_index[number]) == int(key_tokens.word_index[tokens[0]])
        for other in range(of[-1] + 1):
            both = [
                [int(key_tokens.ids[s]) for s, one in enumerate(of) if one == n]
                for n in (number, other)
            ]
            assert (both[0] == both[1]) == bool(merged.ids[number] == merged.ids[other])


def test_pieces_of_a_word_stand_in_a_row():
    key_tokens = maps.weight_map("full", 4).key_tokens
    with pytest.raises(ValueError, match="the tokens of word 0 are not adjacent"):
        number_words(replace(key_tokens, word_index=torch.tensor([0, 1, 0] + [2] * 14)))


# --- published statistics -------------------------------------------------------------------------


def clark(block: WeightBand, name: str, head: int) -> float:
    """Of one text, as section 3 of 1906.04341 and its notebook add it up."""
    w = block.w_HTS[head].numpy()
    n = len(w)
    smooth = 0.9999 * w + 1e-4 / n
    ends = [s for s, one in enumerate(block.key_tokens.words) if one in (".", ",")]
    first = [0] if bool(block.key_tokens.is_special[0]) else []
    options = {
        "next": lambda: np.trace(w, 1) / n,
        "previous": lambda: np.trace(w, -1) / n,
        "first": lambda: w[:, first].sum() / n,
        "separator": lambda: w[:, flagged(block.key_tokens.is_separator)].sum() / n,
        "punctuation": lambda: w[:, ends].sum() / n,
        "entropy": lambda: -(smooth * np.log(smooth)).sum(-1).mean(),
    }
    return options[name]()


@pytest.mark.parametrize("one", of_criteria("clark"), ids=lambda one: one.name)
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_clarks_statistics_are_means_over_texts(kind: str, one):
    texts = [maps.weight_map(kind, seed, count=count) for seed, count in ((1, 7), (2, 29), (3, 13))]
    values = [one.compute_sums(text) for text in texts]
    for head in range(maps.HEADS):
        each = [clark(text, one.name.removeprefix("clark "), head) for text in texts]
        sums, numbers = (np.array([float(part[n][head]) for part in values]) for n in range(2))
        assert ratio_of_sums(sums, numbers) == pytest.approx(np.mean(each))


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_voitas_statistics(kind: str, seed: int):
    block = maps.weight_map(kind, seed)
    ends = flagged(block.key_tokens.is_separator)
    values = {
        one.name.removeprefix("voita "): one.compute_sums(block) for one in of_criteria("voita")
    }
    for head in range(maps.HEADS):
        rows = [row for t, row in enumerate(rows_of_given(block, head)) if t not in ends]
        rows = [
            row for row in (one.without(ends, renormalised=False) for one in rows) if row.may_read
        ]
        places = sum(offsets(row) for row in rows)
        assert float(values["confidence"][0][head]) == pytest.approx(
            sum(max(row.w) for row in rows)
        )
        assert float(values["confidence"][1][head]) == len(rows)
        assert np.allclose(values["position"][0][head].numpy(), places)
        assert set(values["position"][1][head].tolist()) == {len(rows)}
        hits = [rare(row) for row in rows]
        assert float(values["rare"][0][head]) == pytest.approx(sum(v for v, n in hits if n))
        assert float(values["rare"][1][head]) == sum(n for _, n in hits)


# --- intervals ------------------------------------------------------------------------------------


def test_unknown_statistics_are_named():
    with pytest.raises(ValueError, match="unknown metric 'sinc'; did you mean 'sink'"):
        measure_heads(
            torch.nn.MultiheadAttention(4, 2).eval(), [], options=MeasureOptions(("sinc",))
        )
    assert not set(LITERATURE_METRICS) & set(HEAD_METRICS)


@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_chance_of_breadth_is_that_of_weights_drawn_from_all_distributions(count: int):
    weights = np.random.default_rng(count).exponential(size=(40_000, count))
    weights /= weights.sum(1, keepdims=True)  # a flat Dirichlet distribution
    mean_entropy = -(weights * np.log(weights)).sum(1).mean()
    assert mean_entropy == pytest.approx(sum(1 / n for n in range(2, count + 1)), rel=0.01)
    allowed = torch.ones(1, count, dtype=torch.bool)
    block = replace(
        maps.weight_map("full", 0), w_HTS=torch.full((1, 1, count), 1 / count), allowed=allowed
    )
    sums, numbers = random_breadth_sums(block)
    assert (float(sums), float(numbers)) == (
        pytest.approx(math.exp(mean_entropy) / count, rel=0.01),
        1,
    )


def test_a_row_with_a_single_key_has_no_breadth():
    block = replace(
        maps.weight_map("full", 0),
        w_HTS=torch.ones(1, 1, 1),
        allowed=torch.ones(1, 1, dtype=torch.bool),
    )
    for sums in (HEAD_METRICS["breadth"].compute_sums, random_breadth_sums):
        assert float(sums(block)[1]) == 0
