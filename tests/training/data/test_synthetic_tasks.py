"""Promises of every generated task: seeded batches, disjoint splits, chance level, and refusals."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.kernels.counter_rng import RandomStreams, philox
from headwise.models import model_spec as bp
from headwise.training.data import SPLITS, Batch, Task, make_task
from headwise.training.data.synthetic_task import assign_splits, hash_rows, sum_by_slice
from support.refusals import refused_cases

SMALL: dict[str, Task] = {
    "recall": make_task("recall", vocabulary=21, length=(26, 34), pairs=(2, 5)),
    "copy": make_task("copy", symbols=5, block=(4, 7), gap=(0, 3)),
    "copy-source": make_task("copy", kind="source", symbols=5, block=(4, 7), gap=0),
    "markov": make_task("markov", symbols=3, length=19),
    "group": make_task("group", group="S3", length=7),
    "lookup2": make_task("lookup2", entities=3, attributes=2, values=5, direct=2, composed=3),
    "graph": make_task("graph", nodes=13, chords=3, sources=4, reach=2),
    "dates": make_task("dates"),
}
# The first 8 hexadecimal digits of SHA-256 over batch 3 of 8 examples of "train", and of "test".
# They change with the data and with nothing else: whoever trained before then trained on something
# else.
PINNED = {
    "recall": ("b8e92baf", "c9c32117"),
    "copy": ("4ad7afd6", "1389f7a8"),
    "copy-source": ("3e5f8f11", "ad768c79"),
    "markov": ("1d14d693", "70cad9d3"),
    "group": ("52f90e12", "6b37e0e4"),
    "lookup2": ("76488bce", "962106ef"),
    "graph": ("9b561ad5", "4edc46bf"),
    "dates": ("6e89939b", "5806e80a"),
}


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest) -> Task:
    return SMALL[request.param]


def tensors(batch: Batch) -> list[torch.Tensor]:
    found = [batch.x, batch.labels, batch.source]
    for tokens in (batch.tokens, batch.source_tokens):
        found += [] if tokens is None else [tokens.position, tokens.segment]
    return [tensor for tensor in found if tensor is not None]


def as_tuples(value):
    """Named tuples as plain ones: the name of a class is no data."""
    return tuple(map(as_tuples, value)) if isinstance(value, tuple) else value


def digest(batch: Batch) -> str:
    gold = [one.tolist() if isinstance(one, torch.Tensor) else as_tuples(one) for one in batch.gold]
    result = hashlib.sha256(repr(gold).encode())
    for tensor in tensors(batch):
        result.update(repr((tuple(tensor.shape), tensor.tolist())).encode())
    return result.hexdigest()[:8]


def rows(batch: Batch) -> list[tuple]:
    """Each example as it is, without what fills its row up."""
    live = (
        torch.ones_like(batch.x, dtype=torch.bool) if batch.tokens is None else batch.tokens.is_real
    )
    out = []
    for n in range(len(batch.x)):
        labels = batch.labels[n][live[n]] if batch.labels.dim() == 2 else batch.labels[n]
        result = [batch.x[n][live[n]].tolist(), labels.tolist()]
        if batch.source is not None:
            real = slice(None) if batch.source_tokens is None else batch.source_tokens.is_real[n]
            result.append(batch.source[n][real].tolist())
        out.append(str(result))
    return out


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_random_words_are_those_that_their_authors_publish(counter: str, key: str, answer: str):
    """The known answers of Random123 1.14, tests/kat_vectors, "philox4x32 10"."""
    words = [np.array([int(word, 16)], np.uint64) for word in counter.split()]
    first, second = (int(word, 16) for word in key.split())
    assert [f"{int(word[0]):08x}" for word in philox(words, (first, second))] == answer.split()


def streams(count: int) -> RandomStreams:
    return RandomStreams(0, 0, np.arange(count), np.zeros(count, np.int64))


def check_even(found: np.ndarray, kinds: int):
    """All of so many kinds occur alike often: chi squared within five deviations."""
    counts = np.bincount(found.ravel(), minlength=kinds)
    assert len(counts) == kinds
    expected = found.size / kinds
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - (kinds - 1)) < 5 * (2 * (kinds - 1)) ** 0.5


def test_draws_are_even():
    draws = streams(4000)
    check_even(draws.integers(7, 5), 7)
    check_even((draws.uniform(5) * 11).astype(int), 11)
    code = draws.distinct(5, 3) @ [25, 5, 1]  # 5 * 4 * 3 ordered choices
    check_even(np.unique(code, return_inverse=True)[1], 60)
    assert (np.sort(draws.distinct(6, 6), 1) == np.arange(6)).all()
    limits = np.arange(1, 4)
    assert (streams(300).integers(limits, 3).max(0) == limits - 1).all()


def test_streams_do_not_repeat_nor_meet():
    """Words of examples, attempts, splits and seeds are all different, and so are those that
    follow.
    """
    draws = [
        RandomStreams(s, p, np.array([e]), np.array([a]))
        for s in (0, 1, 2**32)
        for p in (0, 1)
        for e, a in ((0, 0), (0, 1), (2**32, 0))
    ]
    words = [tuple(one.words(4)[0].tolist()) for one in draws for _ in range(3)]
    assert len(set(words)) == len(words)


def test_marks_see_order_and_length_but_not_padding():
    result = np.array([[3, 1, -1, -1], [1, 3, -1, -1], [3, 1, 0, -1], [3, 1, -1, -1]])
    first, other, longer, same = hash_rows(result).tolist()
    assert len({first, other, longer}) == 3
    assert first == same == int(hash_rows(result[:1, :2])[0])
    share = np.bincount(assign_splits(np.arange(80_000)[:, None]), minlength=3) / 80_000
    assert np.abs(share - [6 / 8, 1 / 8, 1 / 8]).max() < 0.006


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_is_a_function_of_its_number(small: Task):
    """Whatever was asked before, and however examples are put into batches."""
    whole = rows(small.batch(1, 12, "valid"))
    again = replace(small)
    assert again is not small
    parts = {index: rows(again.batch(index, 3, "valid")) for index in (5, 7, 4, 6)}
    assert whole == parts[4] + parts[5] + parts[6] + parts[7]
    assert whole == rows(small.batch(1, 12, "valid"))
    for other in (
        small.batch(1, 12),
        small.batch(2, 12, "valid"),
        replace(small, seed=1).batch(1, 12, "valid"),
    ):
        assert rows(other) != whole


@pytest.mark.parametrize("name", SMALL)
def test_generated_data_is_unchanged(name: str):
    """In another process, on another machine, in another year."""
    found = tuple(digest(SMALL[name].batch(3, 8, split)) for split in ("train", "test"))
    assert found == PINNED[name]


def test_splits_share_no_example(small: Task):
    """Nor do those of another seed."""
    recorded: dict[str, str] = {}
    for split in SPLITS:
        for one in (small, replace(small, seed=5)):
            for row in rows(one.batch(0, 150, split)):
                assert recorded.setdefault(row, split) == split
    assert len(recorded) > 400


def test_chance_is_the_score_of_guessing(small: Task):
    """A guesser that draws any of the answers there are."""
    batch = small.batch(0, 400, "test")
    answers = {
        "recall": (10, 21),
        "copy": (3, 8),
        "markov": (0, 3),
        "group": (0, 6),
        "lookup2": (2 + 3 + 2, 12),
    }.get(small.name)
    first, stop = answers or (0, round(1 / small.chance["accuracy"]))
    logits = torch.full((*batch.labels.shape, stop), -1.0)
    logits[..., first:] = torch.rand(
        logits[..., first:].shape, generator=torch.Generator().manual_seed(0)
    )
    result = dict(small.measure(logits, batch))
    for name in {"accuracy", "exact_match"} & set(small.chance) & set(result):
        total, count = result[name]
        chance = small.chance[name]
        assert abs(total / count - chance) < 4 * (chance * (1 - chance) / count) ** 0.5 + 1e-12, (
            name
        )


def test_right_answers_score_one_and_wrong_answers_zero(small: Task):
    batch = small.batch(2, 9)
    expected = batch.labels.clamp(min=0)
    logits = torch.nn.functional.one_hot(expected, small.model().heads[0].outputs).float()
    for sign, mark in ((1, 1.0), (-1, 0.0)):
        result = dict(small.measure(sign * logits, batch))
        assert all(
            total == mark * count
            for name, (total, count) in result.items()
            if name[0] in "ae" and name[:3] != "exc"
        )
        assert all(count > 0 for _, count in result.values())
    parts = [(name, result[name][1]) for name in result if name.startswith("accuracy@")]
    kinds = {re.split("[<>=]", name)[0] for name, _ in parts}
    for kind in kinds:  # the slices of one kind divide what is asked
        assert sum(count for name, count in parts if name.startswith(kind)) == result["accuracy"][1]


@pytest.mark.parametrize("name", sorted({task.name for task in SMALL.values()}))
def test_default_models_fit_their_tasks(name: str):
    """Tables and heads as large as ids and labels ask; one document describes them."""
    for one in [make_task(name), *(one for one in SMALL.values() if one.name == name)]:
        described, batch = one.model(), one.batch(0, 40)
        first, last = described.stacks[0].embedding, described.stacks[-1].embedding
        assert first is not None
        assert last is not None
        assert int(batch.x.max()) < last.tokens
        assert batch.source is None or int(batch.source.max()) < first.tokens
        assert int(batch.labels.max()) < described.heads[0].outputs
        assert bp.from_toml(bp.to_toml(described)) == described
        assert (batch.source is not None) == (described.kind == "encoder-decoder")


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"), refused_cases(__file__, "generated tasks", globals(), 2)
)
def test_invalid_arguments_are_refused(name: str, options: dict, words: str):
    with pytest.raises(hw.SpecError) as error:
        make_task(name, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("args", "words"), refused_cases(__file__, "batches", globals()))
def test_batches_that_cannot_be_are_refused(args: tuple, words: str):
    with pytest.raises(hw.SpecError, match=words.replace("?", r"\?")):
        SMALL["copy"].batch(*args)


# --- slices ---------------------------------------------------------------------------------------


def test_empty_slices_are_left_out_but_never_the_whole():
    nothing = torch.zeros(3, dtype=torch.bool)
    assert sum_by_slice("a", nothing, nothing, {"x": ~nothing}) == {"a": (0.0, 0)}
