"""The texts of a batch in one row, so that none is filled up, and what is said of them put back where they stood."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, ProcessorSpec
from .example_order import (
    DEFAULT_HELD_OUT,
    BatchPlan,
    IndexArray,
    check_split_shares,
    plan_by_length,
    plan_by_token_budget,
    plan_packed_rows,
    split_by_key,
)
from .file_task import Dataset, FileTask, make_translator
from .task import IGNORE_INDEX, Batch, MetricSums
from .text_files import existing_file, read_lines
from .vocabulary import IdArray, SubwordVocabulary, train_bpe


class UnpackableBatch(ValueError):
    """A batch whose texts cannot lie in one row, and why."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The same texts in one row: the `batch`, and which place each token had among the rows of a `shape` [B, T]."""

    batch: Batch
    places: Tensor
    shape: tuple[int, int]

    def unpack(self, outputs: Tensor) -> Tensor:
        """What is said of every token [1, N, ...] where it stood, [B, T, ...]; zeros where rows were filled up."""
        rows = outputs.new_zeros(self.shape[0] * self.shape[1], *outputs.shape[2:])
        return rows.index_copy_(0, self.places.to(outputs.device), outputs[0]).unflatten(0, self.shape)


def pack_batch(batch: Batch) -> PackedBatch:
    """The texts of a batch of ids, in the order in which they stand; text k of a source goes with text k of x.

    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> told = pack_batch(
    ...     Batch(ids, torch.tensor([[6, 5, IGNORE_INDEX], [8, 9, 7]]), SequenceInfo.from_batch(ids, lengths=[2, 3]))
    ... )
    >>> told.batch.x.tolist(), told.batch.tokens.lengths
    ([[5, 6, 7, 8, 9]], ((2, 3),))
    >>> told.unpack(told.batch.x).tolist()
    [[5, 6, 0], [7, 8, 9]]
    """
    if batch.labels.shape != batch.x.shape:
        raise UnpackableBatch("its labels are of whole rows, which are told apart by nothing else")
    sides = [(batch.x, batch.tokens)] + ([] if batch.source is None else [(batch.source, batch.source_tokens)])
    found = [_find_texts(ids, tokens) for ids, tokens in sides]
    texts = np.unique(np.concatenate([side.texts for side in found]), axis=0)
    rows = [_flatten_side(ids, side, texts) for (ids, _), side in zip(sides, found, strict=True)]
    own, places = found[0], torch.from_numpy(found[0].places)
    labels = batch.labels.flatten()[places]
    if int((labels != IGNORE_INDEX).sum()) != int((batch.labels != IGNORE_INDEX).sum()):
        raise UnpackableBatch("something is asked where rows are filled up")
    (x, tokens), (source, source_tokens) = rows[0], rows[1] if len(rows) > 1 else (None, None)
    row = replace(batch, x=x, labels=labels[None], tokens=tokens, source=source, source_tokens=source_tokens)
    return PackedBatch(row, places, own.shape)


def real_token_share(batch: Batch) -> float:
    """How much of the rows of a batch is no padding, of x and of its source.

    >>> real_token_share(Batch(torch.zeros(2, 4), torch.zeros(2, 4), SequenceInfo.packed([[4], [1, 1]])))
    0.75
    """
    told = [(batch.x, batch.tokens), (batch.source, batch.source_tokens)]
    sizes = [(x.shape[0] * x.shape[1], tokens) for x, tokens in told if x is not None]
    live = [size if tokens is None else float(tokens.is_real.float().mean()) * size for size, tokens in sizes]
    return sum(live) / max(1, sum(size for size, _ in sizes))


def iter_texts(row: Batch) -> Iterator[Batch]:
    """Every text of a packed row as a batch of its own, without its tokens: each stands from 0 on."""
    own, other = row.tokens, row.source_tokens
    assert own is not None
    assert own.lengths is not None
    sources = None if other is None else other.lengths
    asks = row.x.split(own.lengths[0], 1)
    labels = row.labels.split(own.lengths[0], 1)
    told = [None] * len(asks) if sources is None or row.source is None else row.source.split(sources[0], 1)
    for x, wanted, source in zip(asks, labels, told, strict=True):
        if x.shape[1]:
            yield Batch(x, wanted, source=source)


class _PackedSide(NamedTuple):
    """Where the tokens of a side stand among its rows, and its texts as (row, segment), with their lengths."""

    places: IndexArray
    texts: IndexArray
    lengths: IndexArray
    shape: tuple[int, int]


def _find_texts(ids: Tensor, tokens: SequenceInfo | None) -> _PackedSide:
    if ids.dim() != 2 or ids.is_floating_point():
        raise UnpackableBatch("what it reads are no ids of tokens")
    shape = (ids.shape[0], ids.shape[1])
    told = SequenceInfo.contiguous(0, shape[1], "cpu") if tokens is None else tokens
    position, segment = (t.expand(shape).cpu().numpy().ravel() for t in (told.position, told.segment))
    places = np.flatnonzero(segment >= 0)
    which = np.stack([places // max(1, shape[1]), segment[places]], 1)
    texts, begins, lengths = np.unique(which, axis=0, return_index=True, return_counts=True)
    inside = np.arange(len(places)) - np.repeat(begins, lengths)
    if not (np.array_equal(np.repeat(texts, lengths, 0), which) and np.array_equal(inside, position[places])):
        raise UnpackableBatch("its texts do not stand one behind the other, each from position 0 on")
    return _PackedSide(places, texts, lengths, shape)


def _flatten_side(ids: Tensor, side: _PackedSide, texts: IndexArray) -> tuple[Tensor, SequenceInfo]:
    """The ids of a side in one row, and its tokens, of these texts; one that it does not have is empty."""
    lengths = dict(zip(map(tuple, side.texts.tolist()), side.lengths.tolist(), strict=True))
    each: Sequence[int] = [lengths.get(text, 0) for text in map(tuple, texts.tolist())]
    return ids.flatten()[torch.from_numpy(side.places)][None], SequenceInfo.packed([each])


# --- The scores that translations are published with, as sacreBLEU reckons them ------------------------


@dataclass(frozen=True)
class SacreBleuScores:
    """BLEU and chrF of a whole corpus, 0 to 100, each with the signature that says how it was reckoned."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def score_translations(hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> SacreBleuScores:
    """The scores of translations against one reference each; tokenize="zh" for Chinese, as sacreBLEU names it.

    >>> score_translations(["the cat sat on the mat"], ["the cat sat on the mat"]).chrf
    100.0
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} translations for {len(references)} references; give one for each")
    metrics = _sacrebleu_metrics()
    try:
        bleu, chrf = metrics.BLEU(tokenize=tokenize), metrics.CHRF()
    except (KeyError, AssertionError, ValueError):
        raise SpecError(f"tokenize={tokenize!r} is unknown to sacrebleu; use '13a', 'zh', 'char' or 'intl'") from None
    scores = [metric.corpus_score(list(hypotheses), [list(references)]).score for metric in (bleu, chrf)]
    return SacreBleuScores(scores[0], scores[1], str(bleu.get_signature()), str(chrf.get_signature()))


def _sacrebleu_metrics() -> Any:
    try:
        return import_module("sacrebleu.metrics")
    except ImportError:
        raise SpecError("BLEU and chrF need sacrebleu; pip install 'headwise[mt]'") from None


# --- Sentences and what they are in another language ---------------------------------------------------

START_TOKEN, END_TOKEN = "<s>", "</s>"
BATCH_FORMS = ("bucketed", "budget", "packed")
LARGE_CORPUS_PAIRS = 10_000  # pairs from which on a wider model pays


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@dataclass(frozen=True)
class TranslationOptions:
    """How pairs become batches: what all adaptors that have pairs let a user choose.

    `vocab` pieces are learnt from the train split, one vocabulary for both sides or `separate` ones. Pairs with
    more than `longest` tokens on a side are not trained on. form="bucketed": a batch of so many pairs of about one
    length; "budget": as many as that many tokens hold; "packed": rows of `longest` tokens, filled with several pairs.
    """

    vocab: int = 8000
    vocabularies: str = "shared"
    longest: int = 128
    form: str = "bucketed"

    def __post_init__(self) -> None:
        for name, known in (("vocabularies", ("shared", "separate")), ("form", BATCH_FORMS)):
            if (said := getattr(self, name)) not in known:
                raise SpecError(f"{name}={said!r} is unknown; {suggest(said, known)}")
        if self.longest < 2:
            raise SpecError(f"longest={self.longest} leaves no room beside the end; give longest=2 or more")


@dataclass(eq=False)
class ParallelCorpus:
    """The pairs of each split, and a sentence for each reason that some were left out."""

    splits: Mapping[str, list[SentencePair]]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        train: Iterable[SentencePair], shares: tuple[float, float], held_out_pairs: Mapping[str, list[SentencePair]]
    ) -> ParallelCorpus:
        """Held-out splits are their `own` pairs or a share of those to train on; no source is in two splits.

        Sources that differ in case, punctuation and spaces alone count as one.
        """
        pairs, notes = list(train), list[str]()
        whole = [pair for pair in pairs if pair.source and pair.target]
        if len(whole) < len(pairs):
            notes.append(f"left out, for a side of theirs is empty: {len(pairs) - len(whole)} of {len(pairs)} pairs")
        if not whole:
            raise SpecError("there is no pair with words on both sides; give source and target sentences")
        held = dict(held_out_pairs)
        if "valid" not in held_out_pairs:
            valid, test = shares[0], 0.0 if "test" in held_out_pairs else shares[1]
            found = split_by_key([normalise_sentence(pair.source) for pair in whole], valid, test)
            held |= {
                split: [whole[n] for n in found[split]] for split in ("valid", "test") if split not in held_out_pairs
            }
            whole = [whole[n] for n in found["train"]]
        judged = {normalise_sentence(pair.source) for split in held.values() for pair in split}
        kept = [pair for pair in whole if normalise_sentence(pair.source) not in judged]
        if len(kept) < len(whole):
            notes.append(
                f"not trained on, for their sources are held out: {len(whole) - len(kept)} of {len(whole)} pairs"
            )
        if not kept:
            raise SpecError("every pair to train on is held out too; give other files to validate and test")
        return ParallelCorpus({"train": kept, **held}, notes)


def normalise_sentence(sentence: str) -> str:
    """What two sentences share that are nearly one: letters and digits alone, or the sentence where it has none.

    >>> normalise_sentence("Hi, Tom!") == normalise_sentence("hi tom."), normalise_sentence("?!")
    (True, '?!')
    """
    folded = unicodedata.normalize("NFKC", sentence).casefold()
    return re.sub(r"[\W_]+", "", folded) or sentence


class EncodedSide(NamedTuple):
    """One side of all pairs of a split, as ids."""

    ids: list[IdArray]
    lengths: IndexArray

    @staticmethod
    def of(ids: list[IdArray]) -> EncodedSide:
        return EncodedSide(ids, np.array([len(one) + 1 for one in ids], np.int64))  # and the end, or the start


class TranslationDataset(Dataset):
    """Pairs as ids. A source is read up to its end; a target is begun with a start and asked up to its end."""

    def __init__(self, corpus: ParallelCorpus, options: TranslationOptions) -> None:
        self.options, self.pairs = options, dict(corpus.splits)
        self.vocabularies = _train_vocabularies(self.pairs["train"], options)
        self.vocabulary = target = self.vocabularies[1]
        self.target, self.start, self.end = target, target.special(START_TOKEN), target.special(END_TOKEN)
        coded = {split: self._encode_pairs(pairs) for split, pairs in self.pairs.items()}
        long = np.flatnonzero(_pair_lengths(coded["train"]) > options.longest)
        self.notes = tuple(corpus.notes)
        if len(long):
            said = f"not trained on, for they have more than longest={options.longest} tokens on a side"
            self.notes += (f"{said}: {len(long)} of {len(self.pairs['train'])} pairs",)
            kept = sorted(set(range(len(self.pairs["train"]))) - set(long.tolist()))
            self.pairs["train"] = [self.pairs["train"][n] for n in kept]
            coded["train"] = tuple(EncodedSide.of([side.ids[n] for n in kept]) for side in coded["train"])
        if not self.pairs["train"]:
            raise SpecError(f"no pair to train on has at most {options.longest} tokens on each side; raise longest=")
        self.encoded = coded
        self.sizes = {split: len(pairs) for split, pairs in self.pairs.items()}
        held = [side.lengths for split, sides in coded.items() if split != "train" for side in sides[1:]]
        self.answers = int(np.concatenate([*held, coded["train"][1].lengths]).max()) + 8  # room for a longer wording
        self._plans: dict[tuple[str, int], BatchPlan] = {}

    def _encode_pairs(self, pairs: list[SentencePair]) -> tuple[EncodedSide, ...]:
        texts = [pair.source for pair in pairs], [pair.target for pair in pairs]
        return tuple(EncodedSide.of(v.encode(side)) for v, side in zip(self.vocabularies, texts, strict=True))

    def _batch_plan(self, size: int, split: str) -> BatchPlan:
        """How examples share batches, which no seed changes."""
        key = split, size
        if key not in self._plans:
            form = "bucketed" if split != "train" and self.options.form == "packed" else self.options.form
            lengths = [side.lengths for side in self.encoded[split]]
            levels = _pair_lengths(self.encoded[split])
            if form == "packed":
                self._plans[key] = plan_packed_rows(lengths, self.options.longest, size)
            else:
                self._plans[key] = {"bucketed": plan_by_length, "budget": plan_by_token_budget}[form](levels, size)
        return self._plans[key]

    def batches(self, size: int, split: str) -> int:
        return self._batch_plan(size, split).batches

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        plan = self._batch_plan(size, split)
        rows = plan.take(index, seed) if split == "train" else plan.evaluation_rows(index)
        sources, targets = self.encoded[split]
        stop, end = self.vocabularies[0].special(END_TOKEN), self.target.special(END_TOKEN)
        source, source_tokens = _pad_rows([[[*sources.ids[n], stop] for n in row] for row in rows])
        x, tokens = _pad_rows([[[self.start, *targets.ids[n]] for n in row] for row in rows])
        labels, _ = _pad_rows([[[*targets.ids[n], end] for n in row] for row in rows], IGNORE_INDEX)
        alone = split != "train" or self.options.form != "packed"  # so that a row is one example
        gold = [self.pairs[split][row[0]].target for row in rows] if alone else ()
        return Batch(x, labels, tokens, source, source_tokens, gold)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        return batch.x[:, :1], None

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """How many answers are the wanted one, letter for letter."""
        if len(batch.gold) != len(generated):
            raise ValueError(f"{len(generated)} answers for {len(batch.gold)} sentences; packed rows cannot be scored")
        told = [self.target.decode(row) for row in generated]
        return {"exact_match": (float(sum(a == b for a, b in zip(told, batch.gold, strict=True))), len(told))}

    @property
    def usage(self) -> ProcessorSpec:
        source, target = self.vocabularies
        own = None if source is target else source.document
        around = {"behind": (source.special(END_TOKEN),), "begin": (self.start,), "end": (self.end,)}
        return ProcessorSpec(**around, tokenizer=target.document, source_tokenizer=own)

    @property
    def chance(self) -> Mapping[str, float]:
        return {"accuracy": 1 / self.target.size, "exact_match": 0.0}

    def model(self) -> ModelSpec:
        source, target = self.vocabularies
        width, layers = (256, 3) if self.sizes["train"] >= LARGE_CORPUS_PAIRS else (128, 2)
        return make_translator((source.size, target.size), width, layers, table="one" if source is target else "two")


def _pair_lengths(sides: Sequence[EncodedSide]) -> IndexArray:
    return np.max([side.lengths for side in sides], axis=0)


def _train_vocabularies(
    train: list[SentencePair], making: TranslationOptions
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    sources, targets = ([pair[n] for pair in train] for n in (0, 1))
    if making.vocabularies == "separate":
        first, second = (train_bpe(texts, making.vocab, (START_TOKEN, END_TOKEN)) for texts in (sources, targets))
        return first, second
    both = train_bpe([*sources, *targets], making.vocab, (START_TOKEN, END_TOKEN))
    return both, both


def _pad_rows(rows: list[list[list[int]]], rest: int = 0) -> tuple[Tensor, SequenceInfo]:
    """Ids [B, T] of rows that hold one text or several, filled up with `rest`, and where each token stands."""
    length = max(sum(map(len, row)) for row in rows)
    ids, position, segment = np.full((3, len(rows), length), -1, np.int64)
    ids[:], position[:] = rest, 0
    for n, row in enumerate(rows):
        flat = [one for text in row for one in text]
        ids[n, : len(flat)] = flat
        position[n, : len(flat)] = [at for text in row for at in range(len(text))]
        segment[n, : len(flat)] = [k for k, text in enumerate(row) for _ in text]
    # Of texts alone in their rows nobody asks: filled up to one length they are one call.
    lengths = tuple(tuple(map(len, row)) for row in rows) if any(len(row) > 1 for row in rows) else None
    tokens = SequenceInfo(torch.from_numpy(position), torch.from_numpy(segment), checked=True, lengths=lengths)
    return torch.from_numpy(ids), tokens


# --- Translations --------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ParallelTextTask(FileTask):
    """A target sentence, from its source. `path` is two aligned files (source, target), or one whose `columns`,
    counted from 1 and parted by tabs, hold source and target.

    `valid` and `test` are shares, or files of the same kind as `path`. No source sentence is in two splits. The other
    fields are those of `pairs.Making`.

    >>> ParallelTextTask(("train.de", "train.en"), valid=("val.de",))
    Traceback (most recent call last):
    headwise.errors.SpecError: valid=('val.de',) names 1 file; give two, (source, target), or one with columns
    """

    name: ClassVar[str] = "parallel"
    path: str | tuple[str, ...]
    columns: tuple[int, ...] = (1, 2)
    valid: float | str | tuple[str, ...] = DEFAULT_HELD_OUT
    test: float | str | tuple[str, ...] = DEFAULT_HELD_OUT
    vocab: int = TranslationOptions.vocab
    vocabularies: str = TranslationOptions.vocabularies
    longest: int = TranslationOptions.longest
    form: str = TranslationOptions.form

    def check(self) -> None:
        for name in ("path", "valid", "test"):
            said = getattr(self, name)
            if isinstance(said, tuple) and len(said) != 2:
                files = f"names {len(said)} file{'s' * (len(said) != 1)}"
                raise SpecError(f"{name}={said!r} {files}; give two, (source, target), or one with columns")
        if len(self.columns) != 2 or min(self.columns) < 1:
            raise SpecError(f"columns={self.columns!r} are not two counted from 1; give source and target, as (1, 2)")
        check_split_shares(*self._shares())
        self._options()

    def _shares(self) -> tuple[float, float]:
        """What is held out for validation and test; where that has files of its own, the usual share."""
        valid, test = (DEFAULT_HELD_OUT if isinstance(said, (str, tuple)) else said for said in (self.valid, self.test))
        return valid, test

    def _options(self) -> TranslationOptions:
        return TranslationOptions(self.vocab, self.vocabularies, self.longest, self.form)

    def files(self) -> Sequence[Path]:
        said = [self.path, self.valid, self.test]
        return [
            existing_file(str(one)) for held in said if not isinstance(held, (int, float)) for one in _as_tuple(held)
        ]

    def read(self) -> TranslationDataset:
        held = {"valid": self.valid, "test": self.test}
        own = {name: list(self._read_pairs(said)) for name, said in held.items() if not isinstance(said, (int, float))}
        for name, pairs in own.items():
            if not pairs:
                raise SpecError(f"{name}={held[name]!r} is empty; give sentences, or a share such as {name}=0.05")
        return TranslationDataset(ParallelCorpus.of(self._read_pairs(self.path), self._shares(), own), self._options())

    def _read_pairs(self, said: str | tuple[str, ...]) -> Iterator[SentencePair]:
        paths = [existing_file(one) for one in _as_tuple(said)]
        return _read_aligned_files(*paths) if len(paths) == 2 else _read_columns(paths[0], self.columns)


def _as_tuple(said: str | tuple[str, ...]) -> tuple[str, ...]:
    return said if isinstance(said, tuple) else (said,)


def _read_aligned_files(source: Path, target: Path) -> Iterator[SentencePair]:
    counts = [0, 0]
    for both in zip_longest(read_lines(source), read_lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, both, strict=True)]
        if None not in both:
            yield SentencePair(both[0].strip(), both[1].strip())
    if counts[0] != counts[1]:
        told = f"{source} has {counts[0]} lines, {target} has {counts[1]}"
        raise SpecError(f"{told}; line n of one must be the translation of line n of the other")


def _read_columns(path: Path, columns: tuple[int, ...]) -> Iterator[SentencePair]:
    for n, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) < max(columns):
            fact = f"line {n} of {path} has {len(cells)} column{'s' * (len(cells) != 1)}"
            raise SpecError(f"{fact}, but columns={columns} are wanted; part source and target by a tab")
        yield SentencePair(*(cells[column - 1].strip() for column in columns))
