"""Translation data: pairs, splits, batches and scores."""

from __future__ import annotations

import gzip
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.models.vocabulary import train_bpe
from headwise.training.data import IGNORE_INDEX, Batch, open_data
from headwise.training.data.translation import (
    ParallelTextTask,
    SentencePair,
    normalise_sentence,
    score_translations,
    split_pairs,
)
from headwise.util.errors import SpecError

SOURCES = [f"{n} " + " ".join(["red", "small", "houses"] * (1 + n * 37 % 5)) for n in range(83)]
TARGETS = [source.upper()[::-1] for source in SOURCES]


@pytest.fixture
def path(tmp_path: Path) -> str:
    (file := tmp_path / "a.tsv").write_text(
        "".join(f"{a}\t{b}\tmore\n" for a, b in zip(SOURCES, TARGETS, strict=True))
    )
    return str(file)


def make_task(path: str, **options) -> ParallelTextTask:
    return ParallelTextTask(path, vocab=300, longest=60, **options)


def rows(task: ParallelTextTask, batch: Batch) -> Iterator[tuple[str, str, str]]:
    """What a batch holds, text by text, as segments tell them apart: source, target as read, and
    target as asked.
    """
    source, target = task.data.vocabularies
    sides = (
        (batch.source, batch.source_tokens, source),
        (batch.x, batch.tokens, target),
        (batch.labels, batch.tokens, target),
    )
    for row in range(len(batch.x)):
        for segment in range(int(batch.tokens.segment[row].max()) + 1):
            own = [ids[row][at.segment[row] == segment].tolist() for ids, at, _ in sides]
            assert own[0][-1] == 1, "a source ends with its end"
            assert own[1][0] == 0, "a target begins with a start"
            assert own[2] == [*own[1][1:], 1], (
                "each token is followed by the next one, the last by the end"
            )
            yield tuple(v.decode(ids) for ids, (_, _, v) in zip(own, sides, strict=True))


def swept(task: ParallelTextTask, split: str, size: int, first: int = 0) -> list[Batch]:
    count = task.batches(size, split)
    assert count is not None
    return [task.batch(first * count + n, size, split) for n in range(count)]


def test_sentences_stay_beside_their_translation_and_an_epoch_has_each_once(path: str):
    task = make_task(path)
    size = 7
    by_split = {}
    for split in ("train", "valid", "test"):
        found = [row for batch in swept(task, split, size) for row in rows(task, batch)]
        assert all(target == request == source.upper()[::-1] for source, target, request in found)
        assert len(found) == len(set(found)) == task.data.sizes[split]
        by_split[split] = {source for source, _, _ in found}
    assert set().union(*by_split.values()) == set(SOURCES)
    assert sum(map(len, by_split.values())) == len(SOURCES)


def test_epochs_differ_in_order_and_batches_follow_from_their_numbers(path: str):
    task, size = make_task(path), 7
    first, second = (
        [list(rows(task, batch)) for batch in swept(task, "train", size, epoch)] for epoch in (0, 1)
    )
    assert Counter(row for batch in first for row in batch) == Counter(
        row for batch in second for row in batch
    )
    assert first != second
    assert {frozenset(batch) for batch in first} != {
        frozenset(batch) for batch in second
    }  # other neighbours, too
    alone = make_task(path)
    alone.data.plans.clear()
    assert (
        list(rows(alone, alone.batch(len(first) + 2, size))) == second[2]
    )  # with nothing asked before
    other = make_task(path, seed=1)
    assert [list(rows(other, batch)) for batch in swept(other, "train", size)] != first
    tensors = (swept(one, "valid", size)[0].x for one in (task, other))
    assert torch.equal(*tensors)  # no seed moves what is held out


def test_padding_is_marked_and_has_no_labels(path: str):
    batch = make_task(path).batch(0, 7)
    assert ((batch.labels == IGNORE_INDEX) == (batch.tokens.segment < 0)).all()
    for row, at in zip(batch.tokens.position, batch.tokens.is_real, strict=True):
        assert row[at].tolist() == list(range(int(at.sum())))


def test_sources_that_are_nearly_alike_stay_in_one_split(tmp_path: Path):
    words = [
        f"{a} {b}"
        for a in ("go", "come", "see", "stay")
        for b in ("home", "there", "now", "Tom", "2", "on")
    ]
    lines = [
        f"{form}\t{n}\n"
        for n, word in enumerate(words)
        for form in (word, f"{word.title()}!", f"{word}\N{FULLWIDTH FULL STOP}")
    ]
    random.Random(0).shuffle(lines)
    (file := tmp_path / "a.tsv").write_text("".join(lines))
    task = make_task(str(file), valid=0.25, test=0.25)
    keys = {
        split: {normalise_sentence(pair.source) for pair in pairs}
        for split, pairs in task.data.pairs.items()
    }
    assert [len(keys[split]) for split in ("train", "valid", "test")] == [12, 6, 6]
    assert sum(map(len, keys.values())) == len(set().union(*keys.values())) == len(words)
    assert sum(task.data.sizes.values()) == len(lines)


def translations(count: int) -> str:
    """Pairs of which some share a source, some a target and some are joined by a third pair."""
    rows = [f"s{n} a\tt{n} b\n" for n in range(count)]
    rows += [f"s{n} A!\tother {n}\n" for n in range(0, count, 3)]
    rows += [f"more {n}\tOTHER {n}.\n" for n in range(0, count, 6)]
    return "".join(rows)


def test_no_sentence_of_either_side_is_in_two_splits(tmp_path: Path):
    (file := tmp_path / "a.tsv").write_text(translations(60))
    options = {"vocab": 300, "valid": 0.25, "test": 0.25}
    pairs = open_data(str(file), options).data.pairs
    for side in (0, 1):
        sentences = [
            {normalise_sentence(pair[side]) for pair in pairs[split]}
            for split in ("train", "valid", "test")
        ]
        assert min(map(len, sentences)) > 5
        assert sum(map(len, sentences)) == len(set().union(*sentences))
    earlier = open_data(str(file), {**options, "split_by": "sources"}).data.pairs
    shared = {pair.target.strip(".").lower() for pair in earlier["train"]} & {
        pair.target.strip(".").lower() for pair in earlier["test"]
    }
    assert shared
    with pytest.raises(
        SpecError, match="split_by='targets' is unknown; use one of sentences, sources"
    ):
        open_data(str(file), {**options, "split_by": "targets"})


def test_a_split_far_from_its_share_is_refused():
    answers = ("yes", "no", "maybe")
    pairs = [SentencePair(f"question {n}", answers[n % 3]) for n in range(999)]
    with pytest.raises(
        SpecError,
        match=r"split valid has 333 of 999 pairs instead of 5%, .* use split_by='sources'",
    ):
        split_pairs(pairs, (0.05, 0.05), {})
    splits, _ = split_pairs(pairs, (0.05, 0.05), {}, split_by="sources")
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 899,
        "valid": 50,
        "test": 50,
    }


def test_separate_files_and_counts_of_skipped_pairs(tmp_path: Path):
    files = {"de": [f"wort {n}" for n in range(40)], "en": [f"word {n}" for n in range(40)]}
    files["de"][3], files["en"][5], files["en"][7] = "", " ", "word " * 90
    for end, words in files.items():
        (tmp_path / f"train.{end}.gz").write_bytes(gzip.compress("\r\n".join(words).encode()))
        (tmp_path / f"val.{end}").write_text(f"{words[10].upper()}!\nneu\n")
        (tmp_path / f"test.{end}").write_text(f"{words[11]}\n")
    values = {
        split: tuple(str(tmp_path / f"{split}.{end}") for end in ("de", "en"))
        for split in ("val", "test")
    }
    train = tuple(str(tmp_path / f"train.{end}.gz") for end in ("de", "en"))
    task = ParallelTextTask(train, valid=values["val"], test=values["test"], vocab=300, longest=40)
    assert task.data.sizes == {"train": 40 - 2 - 2 - 1, "valid": 2, "test": 1}
    assert [pair.source for pair in task.data.pairs["valid"]] == ["WORT 10!", "neu"]
    text = " ".join(task.notes)
    assert [f"{n} of" in text for n in (2, 2, 1)] == [True] * 3
    assert "2 of 40 pairs are left out because a side is empty" in text
    assert "2 of 38 pairs are not trained on because their sentences are held out" in text
    assert "1 of 36 pairs are not trained on because a side has more than longest=40 tokens" in text
    keep = {pair.source for pair in task.data.pairs["train"]}
    assert not keep & {"wort 10", "wort 11", "wort 7", "wort 5", ""}


def test_pieces_are_learnt_from_pairs_to_train_on(path: str, tmp_path: Path):
    (stored := tmp_path / "valid.tsv").write_text("zzqzzq zzqzzq zzqzzq\tqzz\n" * 3)
    task = make_task(path, valid=str(stored), test=0.0)
    assert len(task.ids("zzqzzq")) == 6
    assert len(task.ids(" SESUOH")) < 7
    parted = make_task(path, vocabularies="separate")
    source, target = parted.data.vocabularies
    assert len(source.encode([" houses"])[0]) == 1 < len(target.encode([" houses"])[0])
    assert parted.text(target.encode(["SESUOH"])[0].tolist()) == "SESUOH"
    assert parted.model().stacks[0].embedding.tokens == source.size
    assert not parted.model().stacks[1].embedding.table


def test_answers_are_scored_against_the_text_itself(path: str):
    task = make_task(path, valid=0.2)
    batch = task.batch(0, 5, "valid")
    ids = [task.ids(reference) for reference in batch.gold]
    assert task.score(ids, batch) == {"exact_match": (5.0, 5)}
    assert task.score([*ids[:3], ids[3][:-1], []], batch) == {"exact_match": (3.0, 5)}
    prompt, tokens = task.prompt(batch)
    assert prompt.tolist() == [[0]] * 5
    assert tokens is None
    assert task.end == 1
    longest = max(len(task.ids(target)) for target in TARGETS)
    assert task.answers > longest


def test_scores_of_a_script_without_spaces_and_of_single_words():
    expected, result = ["一个男人在街上走路。", "他来了。"], ["一个男人在路上走路。", "他来了。"]
    found = score_translations(result, expected)
    assert "tok:zh" in found.bleu_signature
    assert found.bleu == score_translations(result, expected, "zh").bleu
    assert "tok:char" in score_translations(["男の人が歩く"], ["男の人が歩いている"]).bleu_signature
    words = score_translations(["yes", "no"], ["yes", "yes"])
    assert words.bleu is None
    assert words.chrf > 0


def test_published_scores_are_those_of_sacrebleu(monkeypatch: pytest.MonkeyPatch):
    result, expected = (
        ["the cat sat on a mat", "who is there"],
        ["the cat sat on the mat", "who is there?"],
    )
    found = score_translations(result, expected)
    import sacrebleu

    assert found.bleu == sacrebleu.corpus_bleu(result, [expected]).score
    assert found.chrf == sacrebleu.corpus_chrf(result, [expected]).score
    assert "tok:13a" in found.bleu_signature
    assert "version:" in found.chrf_signature
    assert (
        score_translations(["他来了。"], ["他走了。"], tokenize="zh").bleu_signature
        != found.bleu_signature
    )
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(hw.SpecError, match=r"pip install 'headwise\[mt\]'"):
        score_translations(result, expected)


def test_no_token_spans_two_chinese_characters():
    """With merges across characters, the frequent pair would become one token, and a word would lie
    within it.
    """
    texts = ["我们喜欢苹果。", "我们喜欢 Python 3。"]
    vocabulary = train_bpe(texts * 9, 400, ("<s>", "</s>"))
    for text in texts:
        (ids,) = vocabulary.encode([text])
        pieces = [vocabulary.decode([token_id]) for token_id in ids.tolist()]
        assert "".join(pieces) == text
        assert [piece for piece in pieces if "\u4e00" <= piece[0] <= "\u9fff"] == re.findall(
            "[\u4e00-\u9fff]", text
        )
