"""Labels of every task, derived again from the input by slow and plain means."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from math import log

import numpy as np
import pytest
import torch
from sympy.combinatorics.named_groups import AlternatingGroup, SymmetricGroup

from headwise.training.data import IGNORE_INDEX, Batch, Task, make_task
from headwise.training.data.algorithmic_tasks import make_multiplication_table

Row = tuple[list[int], list[int]]


def examples(one: Task, count: int = 200, split: str = "train") -> list[Row]:
    """What is read and what is wanted, row by row, without what fills rows up."""
    batch = one.batch(0, count, split)
    return [
        (batch.x[n][live].tolist(), batch.labels[n][live].tolist())
        for n, live in enumerate(live_of(batch))
    ]


def live_of(batch: Batch) -> torch.Tensor:
    return (
        torch.ones_like(batch.x, dtype=torch.bool) if batch.tokens is None else batch.tokens.is_real
    )


def labelled_columns(labels: list[int]) -> list[int]:
    return [t for t, label in enumerate(labels) if label != IGNORE_INDEX]


def check_frequency(found: int, of: int, chance: float):
    """Within four deviations of what is expected."""
    assert abs(found / of - chance) < 4 * (chance * (1 - chance) / of) ** 0.5


# --- recall ---------------------------------------------------------------------------------------


def test_recall_wants_the_value_of_each_key():
    one = make_task("recall", vocabulary=51, length=(32, 64), pairs=(3, 5))
    found = Counter()
    batch = one.batch(0, 200)
    for (x, labels), gold in zip(examples(one), batch.gold, strict=True):
        places = labelled_columns(labels)
        pairs = len(places)
        found[(len(x), pairs)] += 1
        assert (gold.pairs, gold.length) == (pairs, len(x))
        keys, values = x[: 2 * pairs : 2], x[1 : 2 * pairs : 2]
        assert len({*keys}) == len({*values}) == pairs
        assert all(1 <= key < 25 for key in keys)
        assert all(25 <= value < 51 for value in values)
        assert sorted(x[t] for t in places) == sorted(keys)
        assert all(labels[t] == values[keys.index(x[t])] for t in places)
        assert all(t >= 2 * pairs and t % 2 == 0 for t in places)
        assert sorted(t for _, t in gold.links) == places
        assert all(x[s] == labels[t] for s, t in gold.links)
    assert set(found) == {(32, 3), (64, 5)}
    assert min(found.values()) > 70


def test_recall_takes_slots_by_the_power_law_without_replacement():
    """p(i) ~ i^(0.01 - 1), i = 1 .. space: of the first key's slot exactly, and of both keys'
    together.
    """
    one = make_task("recall", vocabulary=200, length=16, pairs=2)
    weights = [i ** (0.01 - 1) for i in range(1, 7)]
    p = [w / sum(weights) for w in weights]
    count, found = 6000, Counter()
    for gold in one.batch(0, count).gold:
        found[tuple((t - 4) // 2 for _, t in gold.links)] += 1
    for i, j in product(range(6), repeat=2):
        if i == j:
            assert (i, j) not in found
        else:
            check_frequency(found[i, j], count, p[i] * p[j] / (1 - p[i]))


# --- copy -----------------------------------------------------------------------------------------


def test_copy_wants_the_block_again():
    one = make_task("copy", symbols=7, block=(5, 9), gap=(0, 4))
    batch, shapes = one.batch(0, 200), Counter()
    for (x, labels), gold in zip(examples(one), batch.gold, strict=True):
        mark = x.index(1)
        places = [t for t in range(1, mark) if x[t] != 0]
        block = [x[t] for t in places]
        shapes[len(block), mark - 1 - len(block)] += 1
        assert x[0] == 2
        assert (gold.block, gold.gap) == (len(block), mark - 1 - len(block))
        assert all(3 <= token < 10 for token in block)
        assert labels == [IGNORE_INDEX] * mark + block
        assert x[mark + 1 :] == block[:-1]
        assert gold.links == tuple(zip(places, range(mark, len(x)), strict=True))
        assert places == list(range(1, 1 + len(block)))
    assert set(shapes) == set(product((5, 9), (0, 4)))


def test_copy_from_a_source_repeats_it():
    one = make_task("copy", kind="source", symbols=7, block=(5, 9), gap=0)
    batch, sizes = one.batch(0, 200), set[int]()
    assert batch.source is not None
    assert batch.tokens is not None
    assert batch.source_tokens is not None
    assert torch.equal(batch.tokens.is_real, batch.source_tokens.is_real)
    for x, labels, source, gold in zip(
        *(t.tolist() for t in (batch.x, batch.labels, batch.source)), batch.gold, strict=True
    ):
        size = gold.block
        block = source[:size]
        assert all(3 <= token < 10 for token in block)
        assert (x[:size], labels) == (
            [2, *block[:-1]],
            block + [IGNORE_INDEX] * (len(labels) - size),
        )
        assert gold.links == tuple((n, n) for n in range(size))
        sizes.add(size)
    assert sizes == {5, 9}
    assert batch.tokens.is_real.sum(1).tolist() == [gold.block for gold in batch.gold]
    logits = torch.nn.functional.one_hot(batch.labels.clamp(min=0), 10).float()
    assert {"accuracy@block=5", "accuracy@block=9", "exact_match@block=9"} < set(
        one.measure(logits, batch)
    )


def test_copy_reports_its_distance():
    one = make_task("copy", symbols=7, block=(5, 9), gap=(0, 20))
    batch = one.batch(0, 50)
    logits = torch.zeros(*batch.labels.shape, 10)
    metrics = one.measure(logits, batch)
    expected = Counter()
    for gold in batch.gold:
        expected[
            next(f"accuracy@distance<={b}" for b in (8, 16, 32) if gold.block + gold.gap <= b)
        ] += gold.block
    assert {name: count for name, (_, count) in metrics.items() if "distance" in name} == expected


# --- markov ---------------------------------------------------------------------------------------


def bayes(x: list[int], symbols: int) -> list[list[Fraction]]:
    """The bigram's guess behind each place, counted anew each time."""
    return [
        [
            Fraction(
                sum(x[s] == x[t] and x[s + 1] == b for s in range(t)) + 1,
                x[:t].count(x[t]) + symbols,
            )
            for b in range(symbols)
        ]
        for t in range(len(x))
    ]


def test_markov_labels_equal_the_best_guess():
    one = make_task("markov", symbols=3, length=23)
    batch = one.batch(0, 20)
    for (x, labels), gold in zip(examples(one, 20), batch.gold, strict=True):
        assert (x[0], labels[0]) == (3, IGNORE_INDEX)
        x, labels = x[1:], labels[1:]
        assert labels[:-1] == x[1:]
        np.testing.assert_allclose(
            gold.numpy(), [[float(p) for p in row] for row in bayes(x, 3)], rtol=1e-12
        )


def test_markov_measures_nats_above_the_best_guess():
    one = make_task("markov", symbols=3, length=23)
    batch = one.batch(0, 300, "valid")
    best = torch.stack(list(batch.gold))
    best = torch.cat([best[:, :1], best], 1)  # of the place before all symbols nothing is asked
    metrics = one.measure(best.log() + 5, batch)  # logits may be shifted
    assert metrics["nats"][1] == 300 * 23
    more = torch.cat(
        [best.log(), torch.zeros(300, 24, 1)], 2
    )  # half of all belief for what never comes
    assert one.measure(more, batch)["excess"][0] == pytest.approx(300 * 23 * log(2))
    assert abs(metrics["excess"][0]) < 1e-9
    uniform = one.measure(torch.zeros_like(best), batch)
    assert uniform["nats"][0] / uniform["nats"][1] == pytest.approx(log(3))
    # The excess is the mean of what a guess costs more, so both agree within the error of the
    # latter.
    more = (uniform["nats"][0] - metrics["nats"][0]) / metrics["nats"][1]
    assert uniform["excess"][0] / uniform["excess"][1] == pytest.approx(more, abs=0.03)
    again = make_task("markov", symbols=3, length=23)
    assert again.chance["excess"] == pytest.approx(
        uniform["excess"][0] / uniform["excess"][1], abs=0.01
    )


def test_markov_rows_are_dirichlet():
    """Of a row drawn from Dirichlet(1, ..., 1), two draws agree with
    probability 2 / (symbols + 1).
    """
    agree, count = 0, 0
    for x, _ in examples(make_task("markov", symbols=4, length=128), 3000):
        after = [b for a, b in pairwise(x) if a == 0][:2]
        agree, count = agree + (len(after) == 2 and after[0] == after[1]), count + (len(after) == 2)
    assert count > 2800
    check_frequency(agree, count, 2 / 5)


# --- group ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "group"),
    [("S3", SymmetricGroup(3)), ("S4", SymmetricGroup(4)), ("A5", AlternatingGroup(5))],
)
def test_permutations_multiply_as_sympys(name: str, group):
    """Its p * q applies p first, too."""
    elements = sorted(group.elements, key=lambda p: p.array_form)
    expected = [[elements.index(p * q) for q in elements] for p in elements[:9]]
    assert make_multiplication_table(name)[:9].tolist() == expected
    assert len(make_multiplication_table(name)) == group.order()


@pytest.mark.parametrize("name", ["parity", "Z5", "S3", "A5"])
def test_group_wants_the_product_so_far(name: str):
    table = make_multiplication_table(name)
    for (first, *x), (none, *labels) in examples(make_task("group", group=name, length=12), 50):
        assert (first, none) == (len(table), IGNORE_INDEX)
        assert labels == [prefix(table, x[: t + 1]) for t in range(12)]
        if name in ("parity", "Z5"):
            assert labels == [sum(x[: t + 1]) % len(table) for t in range(12)]


def prefix(table: np.ndarray, x: list[int]) -> int:
    """The product from the right, which is the same where the rule is a group's."""
    return x[0] if len(x) == 1 else int(table[prefix(table, x[:1]), prefix(table, x[1:])])


# --- lookup2 --------------------------------------------------------------------------------------


def test_lookup2_answers_follow_from_the_facts():
    one = make_task("lookup2", entities=4, attributes=3, values=9, direct=3, composed=4)
    batch, others = one.batch(0, 200), Counter()
    for (x, labels), gold in zip(examples(one), batch.gold, strict=True):
        words = one.text(x).split()
        facts = {(words[t], words[t + 1]): words[t + 2] for t in range(0, 36, 3)}
        assert set(facts) == set(product([f"E{n}" for n in range(4)], [f"a{n}" for n in range(3)]))
        expected, recorded = {}, []
        for t in range(36, len(words), 4):
            mark, entity, second, value = words[t : t + 4]
            if mark == "?":
                assert entity not in expected
                expected[entity] = second
                assert value == facts[entity, second]
            else:
                assert mark == "="
                assert entity != second
                assert value == facts[entity, expected[second]]
                others[entity, second] += 1
            recorded.append(t + 2)
        assert len(recorded) == 7
        assert labelled_columns(labels) == recorded
        assert all(labels[t] == x[t + 1] for t in recorded)
        assert [t for _, t in gold.direct + gold.composed] == recorded
        assert all(words[s] == words[t + 1] and s < 36 for s, t in gold.direct + gold.composed)
        for (s, t), (fact, _) in zip(gold.hops, gold.composed, strict=True):
            assert words[s - 1] == words[t]  # the other entity was asked
            assert words[s] == words[fact - 1]  # for the attribute of the fact that answers
            assert words[t - 1] == words[fact - 2]
    assert len(others) == 12  # every entity with every other


def test_lookup2_distinguishes_its_questions():
    one = make_task("lookup2", entities=4, attributes=3, values=9, direct=3, composed=4)
    batch = one.batch(0, 5)
    logits = torch.nn.functional.one_hot(
        batch.labels.clamp(min=0), one.model().heads[0].outputs
    ).float()
    logits[:, [t for _, t in batch.gold[0].composed]] = 0
    metrics = one.measure(logits, batch)
    assert (
        metrics["accuracy"],
        metrics["accuracy@query=direct"],
        metrics["accuracy@query=composed"],
    ) == (
        (15, 35),
        (15, 15),
        (0, 20),
    )


# --- graph ----------------------------------------------------------------------------------------


def test_graph_wants_how_far_the_nearest_source_is():
    one = make_task("graph", nodes=17, chords=4, sources=3, reach=2)
    near = {
        node: {b for a, b in one.edges if a == node} | {a for a, b in one.edges if b == node}
        for node in range(17)
    }
    assert sum(map(len, near.values())) == 2 * (17 + 4)
    assert not any(node in others for node, others in near.items())
    for (x, labels), gold in zip(examples(one), one.batch(0, 200).gold, strict=True):
        assert sum(x) == 3
        assert gold == tuple(node for node in range(17) if x[node])
        steps = dict.fromkeys(gold, 0)
        queue = deque(gold)
        while queue:
            node = queue.popleft()
            for other in near[node] - set(steps):
                steps[other] = steps[node] + 1
                queue.append(other)
        assert labels == [min(steps[node], 3) for node in range(17)]


def test_graph_reads_along_its_edges():
    one = make_task("graph", nodes=12, chords=3, sources=5, reach=2)
    both = set(one.edges) | {(b, a) for a, b in one.edges} | {(n, n) for n in range(12)}
    assert {(i, j) for i, j in product(range(12), repeat=2) if one.pattern.allows(i, j)} == both
    described = one.model()
    assert {spec.pattern for _, spec in described.attention_specs()} == {one.pattern}
    assert len(described.stacks[0].layers) == one.reach
    assert replace(one, seed=1).edges != one.edges
