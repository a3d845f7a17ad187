"""Translation from parallel texts, and BLEU and chrF."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, pluralise, suggest
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

# --- BLEU and chrF, computed by sacreBLEU ---------------------------------------------------------


BLEU_ORDER = 4  # BLEU counts n-grams of 1 to 4 tokens (Papineni et al. 2002)
DEFAULT_BLEU_TOKENIZER = "13a"  # sacreBLEU's default, for scripts with spaces between words
# Scripts without spaces between words, by the beginning of their characters' Unicode names.
CHARACTER_SCRIPTS = ("HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
FULLWIDTH_NAMES = ("FULLWIDTH", "IDEOGRAPHIC")  # their punctuation, likewise
MIN_SCRIPT_SHARE = 0.1  # of the letters, from which on the tokenizer of a script is used


@dataclass(frozen=True)
class SacreBleuScores:
    """BLEU and chrF of a corpus, 0 to 100, each with the sacreBLEU signature of its settings.

    `bleu` is None if it cannot be computed because no reference has four tokens.
    """

    bleu: float | None
    chrf: float
    bleu_signature: str
    chrf_signature: str


def choose_bleu_tokenizer(references: Iterable[str]) -> str:
    """Return the sacreBLEU tokenizer for the script of some texts: "zh", "char" or "13a".

    Chinese is "zh"; Japanese, Thai, Lao, Khmer and Burmese are "char", because they have no spaces
    between words and sacreBLEU's own tokenizers for them need other packages.

    >>> [
    ...     choose_bleu_tokenizer([text])
    ...     for text in ("a man", "一个男人。", "男の人が歩く", "한 남자")
    ... ]
    ['13a', 'zh', 'char', '13a']
    """
    scripts = Counter(
        unicodedata.name(char, "").partition(" ")[0]
        for text in references
        for char in text
        if char.isalpha()
    )
    threshold = MIN_SCRIPT_SHARE * scripts.total()
    if sum(scripts[name] for name in CHARACTER_SCRIPTS) > threshold:
        return "char"
    return "zh" if scripts["CJK"] > threshold else DEFAULT_BLEU_TOKENIZER


def join_words(line: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text of words separated by spaces, as its language is written, and the words' character
    spans.

    Two words are joined if one ends and the other begins with a character of a script without
    spaces (Chinese, Japanese, Thai, Lao, Khmer or Burmese), or if one of these characters is its
    punctuation.

    >>> join_words("我 用 Visual Studio 。")
    ('我用 Visual Studio。', ((0, 1), (1, 2), (3, 9), (10, 16), (16, 17)))
    >>> join_words("the dog")
    ('the dog', ((0, 3), (4, 7)))
    """
    text, spans = "", list[tuple[int, int]]()
    for word in line.split():
        if text and not _are_written_joined(text[-1], word[0]):
            text += " "
        spans.append((len(text), len(text) + len(word)))
        text += word
    return text, tuple(spans)


def _are_written_joined(*chars: str) -> bool:
    """Whether no space is between the last and the first character of two
    words: see `join_words`.
    """
    unspaced = [
        char
        for char in chars
        if unicodedata.name(char, "").startswith(("CJK", *FULLWIDTH_NAMES, *CHARACTER_SCRIPTS))
    ]
    return len(unspaced) == len(chars) or any(
        unicodedata.category(char).startswith("P") for char in unspaced
    )


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str | None = None
) -> SacreBleuScores:
    """Corpus BLEU and chrF against one reference per sentence.

    `tokenize` is sacreBLEU's, such as "zh"; by default the one for the script of the references,
    see `choose_bleu_tokenizer`.

    >>> score_translations(["the cat sat on the mat"], ["the cat sat on the mat"]).chrf
    100.0
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            f"cannot score {len(hypotheses)} translations against {len(references)} references; "
            "give one of each"
        )
    bleu, chrf = (
        make_bleu(tokenize or choose_bleu_tokenizer(references)),
        _sacrebleu_metrics().CHRF(),
    )
    has_bleu = max(count_bleu_tokens(bleu, references)) >= BLEU_ORDER
    score = bleu.corpus_score(list(hypotheses), [list(references)]).score
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)]).score
    signatures = str(bleu.get_signature()), str(chrf.get_signature())
    return SacreBleuScores(score if has_bleu else None, chrf_score, *signatures)


def make_bleu(tokenize: str, **options: Any) -> Any:
    """Return sacreBLEU's BLEU metric with this tokenizer; raise SpecError if it has none of that
    name.
    """
    metrics = _sacrebleu_metrics()
    try:
        return metrics.BLEU(tokenize=tokenize, **options)
    except (KeyError, AssertionError, ValueError):
        raise SpecError(
            f"tokenize={tokenize!r} is unknown to sacrebleu; use '13a', 'zh', 'char' or 'intl'"
        ) from None


def count_bleu_tokens(bleu: Any, references: Sequence[str]) -> list[int]:
    """Return the number of tokens of each reference, as a metric of `make_bleu` splits it."""
    return [len(bleu.tokenizer(text.rstrip()).split()) for text in references]


def _sacrebleu_metrics() -> Any:
    try:
        return import_module("sacrebleu.metrics")
    except ImportError:
        raise SpecError("BLEU and chrF need sacrebleu; pip install 'headwise[mt]'") from None


# --- Sentences and what they are in another language ----------------------------------------------

START_TOKEN, END_TOKEN = "<s>", "</s>"
SPLIT_RULES = ("sentences", "sources")
BATCH_FORMS = ("bucketed", "budget", "packed")
LARGE_CORPUS_PAIRS = 10_000  # pairs from which on a wider model pays


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@dataclass(frozen=True)
class TranslationOptions:
    """Vocabulary and batching options of translation data.

    Subword vocabularies of `vocab` tokens are trained on the train split: a "shared" one, or
    "separate" ones for source and target. Pairs with more than `longest` tokens on a side are not
    trained on. With form="bucketed" the batch size counts pairs, and a batch has pairs of similar
    lengths; with "budget" it counts tokens; with "packed" it counts rows of `longest` tokens, each
    filled with several pairs.
    """

    vocab: int = 8000
    vocabularies: str = "shared"
    longest: int = 128
    form: str = "bucketed"

    def __post_init__(self) -> None:
        for name, choices in (("vocabularies", ("shared", "separate")), ("form", BATCH_FORMS)):
            if (value := getattr(self, name)) not in choices:
                raise SpecError(f"{name}={value!r} is unknown; {suggest(value, choices)}")
        if self.longest < 2:
            raise SpecError(
                f"longest={self.longest} has no room for a token and the end token; use longest=2 "
                "or more"
            )


@dataclass(eq=False)
class ParallelCorpus:
    """The sentence pairs of each split, and notes about the pairs that were left out."""

    splits: Mapping[str, list[SentencePair]]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        train: Iterable[SentencePair],
        shares: tuple[float, float],
        held_out_pairs: Mapping[str, list[SentencePair]],
        split_by: str = "sentences",
    ) -> ParallelCorpus:
        """Build the splits: held-out pairs are given, or are a share of `train`.

        No source and no target sentence is trained on and held out; with `split_by="sources"`
        targets may be. Sentences that differ only in case, punctuation and spaces count as equal.
        """
        all_pairs, notes = list(train), list[str]()
        pairs = [pair for pair in all_pairs if pair.source and pair.target]
        if len(pairs) < len(all_pairs):
            num_empty = len(all_pairs) - len(pairs)
            notes.append(
                f"{num_empty} of {len(all_pairs)} pairs are left out because a side is empty"
            )
        if not pairs:
            raise SpecError("no pair has text on both sides; give source and target sentences")
        splits, keys = dict(held_out_pairs), [_side_keys(pair, split_by) for pair in pairs]
        if "valid" not in held_out_pairs:
            valid, test = shares[0], 0.0 if "test" in held_out_pairs else shares[1]
            indices = split_by_key(_group_keys(keys, 2 + (test > 0)), valid, test)
            if split_by == "sentences":
                _check_split_sizes(indices, {"valid": valid, "test": test})
            splits |= {
                split: [pairs[n] for n in indices[split]]
                for split in ("valid", "test")
                if split not in held_out_pairs
            }
            pairs, keys = ([values[n] for n in indices["train"]] for values in (pairs, keys))
        held_out = {
            key for split in splits.values() for pair in split for key in _side_keys(pair, split_by)
        }
        train_pairs = [
            pair for pair, own in zip(pairs, keys, strict=True) if held_out.isdisjoint(own)
        ]
        if len(train_pairs) < len(pairs):
            num_shared = len(pairs) - len(train_pairs)
            notes.append(
                f"{num_shared} of {len(pairs)} pairs are not trained on because their {split_by} "
                "are held out"
            )
        if not train_pairs:
            remedy = (
                ""
                if split_by == "sources"
                else ", or use split_by='sources', which lets targets be in both"
            )
            raise SpecError(
                f"the {split_by} of every training pair are held out; give other files{remedy}"
            )
        return ParallelCorpus({"train": train_pairs, **splits}, notes)


def _check_split_sizes(indices: Mapping[str, IndexArray], shares: Mapping[str, float]) -> None:
    """Raise SpecError if groups of pairs that share a sentence are so large that a split is far
    from its share.
    """
    total = sum(map(len, indices.values()))
    for split, share in shares.items():
        if len(indices[split]) > 2 * share * total + 10:
            fact = (
                f"split {split} has {len(indices[split])} of {total} pairs instead of {share:.0%}"
            )
            raise SpecError(
                f"{fact}, because many pairs share a sentence; use split_by='sources', which lets "
                "targets be in both"
            )


def normalise_sentence(sentence: str) -> str:
    """Case-folded letters and digits of a sentence, for finding duplicates; the sentence itself if
    it has none.

    >>> normalise_sentence("Hi, Tom!") == normalise_sentence("hi tom."), normalise_sentence("?!")
    (True, '?!')
    """
    folded = unicodedata.normalize("NFKC", sentence).casefold()
    return re.sub(r"[\W_]+", "", folded) or sentence


def check_split_rule(split_by: str) -> None:
    """Raise if no rule has this name."""
    if split_by not in SPLIT_RULES:
        raise SpecError(f"split_by={split_by!r} is unknown; {suggest(split_by, SPLIT_RULES)}")


SideKey = tuple[str, str]  # the side and the normalised sentence


def _side_keys(pair: SentencePair, split_by: str) -> list[SideKey]:
    """The normalised sentences of a pair that must not be trained on and held out."""
    sides = ("source", "target") if split_by == "sentences" else ("source",)
    return [(side, normalise_sentence(getattr(pair, side))) for side in sides]


def _group_keys(keys: Sequence[Sequence[SideKey]], num_splits: int) -> list[str]:
    """The first source of the group of each pair; pairs that share a sentence, also by way of
    others, are a group.

    Raises SpecError if there are fewer groups than splits, but enough sources.
    """
    parents: dict[SideKey, SideKey] = {}

    def find_root(key: SideKey) -> SideKey:
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = key = parents[parent]
        return key

    for sides in keys:
        roots = sorted(map(find_root, sides))  # a source comes before a target
        parents |= dict.fromkeys(roots, roots[0])
    groups = [find_root(sides[0])[1] for sides in keys]
    if len(set(groups)) < num_splits <= len({sides[0] for sides in keys}):
        fact = (
            f"{len(keys)} pairs share so many sentences that they form "
            f"{pluralise(len(set(groups)), 'group')}"
        )
        raise SpecError(
            f"{fact}, too few for {num_splits} splits; use split_by='sources', which lets targets "
            "be in both"
        )
    return groups


class EncodedSide(NamedTuple):
    """Ids of the source or target sentences of a split, and their lengths with the start or end
    token.
    """

    ids: list[IdArray]
    lengths: IndexArray

    @staticmethod
    def of(ids: list[IdArray]) -> EncodedSide:
        return EncodedSide(ids, np.array([len(sentence) + 1 for sentence in ids], np.int64))


class TranslationDataset(Dataset):
    """Encoded sentence pairs: a source ends with `</s>`; a target is `<s> ...` as input and `...
    </s>` as labels.
    """

    def __init__(self, corpus: ParallelCorpus, options: TranslationOptions) -> None:
        self.options, self.pairs = options, dict(corpus.splits)
        self.vocabularies = _train_vocabularies(self.pairs["train"], options)
        self.vocabulary = target = self.vocabularies[1]
        self.target, self.start, self.end = (
            target,
            target.special(START_TOKEN),
            target.special(END_TOKEN),
        )
        encoded = {split: self._encode_pairs(pairs) for split, pairs in self.pairs.items()}
        too_long = np.flatnonzero(_pair_lengths(encoded["train"]) > options.longest)
        self.notes = tuple(corpus.notes)
        if len(too_long):
            count = f"{len(too_long)} of {len(self.pairs['train'])} pairs"
            self.notes += (
                f"{count} are not trained on because a side has more than "
                f"longest={options.longest} tokens",
            )
            indices = sorted(set(range(len(self.pairs["train"]))) - set(too_long.tolist()))
            self.pairs["train"] = [self.pairs["train"][n] for n in indices]
            encoded["train"] = tuple(
                EncodedSide.of([side.ids[n] for n in indices]) for side in encoded["train"]
            )
        if not self.pairs["train"]:
            raise SpecError(
                f"no training pair has at most longest={options.longest} tokens on each side; use "
                "a larger longest="
            )
        self.encoded = encoded
        self.sizes = {split: len(pairs) for split, pairs in self.pairs.items()}
        target_lengths = [sides[1].lengths for sides in encoded.values()]
        self.answers = (
            int(np.concatenate(target_lengths).max()) + 8
        )  # 8 more for answers longer than the reference
        self._plans: dict[tuple[str, int], BatchPlan] = {}

    def _encode_pairs(self, pairs: list[SentencePair]) -> tuple[EncodedSide, ...]:
        texts = [pair.source for pair in pairs], [pair.target for pair in pairs]
        return tuple(
            EncodedSide.of(v.encode(side)) for v, side in zip(self.vocabularies, texts, strict=True)
        )

    def _batch_plan(self, size: int, split: str) -> BatchPlan:
        """Assignment of pairs to batches, the same for every seed."""
        key = split, size
        if key not in self._plans:
            form = (
                "bucketed"
                if split != "train" and self.options.form == "packed"
                else self.options.form
            )
            lengths = [side.lengths for side in self.encoded[split]]
            levels = _pair_lengths(self.encoded[split])
            if form == "packed":
                self._plans[key] = plan_packed_rows(lengths, self.options.longest, size)
            else:
                self._plans[key] = {"bucketed": plan_by_length, "budget": plan_by_token_budget}[
                    form
                ](levels, size)
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
        one_pair_per_row = split != "train" or self.options.form != "packed"
        gold = [self.pairs[split][row[0]].target for row in rows] if one_pair_per_row else ()
        return Batch(x, labels, tokens, source, source_tokens, gold)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        return batch.x[:, :1], None

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """Number of answers that equal the reference translation, character for character."""
        if len(batch.gold) != len(generated):
            raise ValueError(
                f"cannot score {len(generated)} answers against {len(batch.gold)} references; "
                "give one answer per row of a batch that is not packed"
            )
        answers = [self.target.decode(row) for row in generated]
        return {
            "exact_match": (
                float(sum(a == b for a, b in zip(answers, batch.gold, strict=True))),
                len(answers),
            )
        }

    @property
    def usage(self) -> ProcessorSpec:
        source, target = self.vocabularies
        source_tokenizer = None if source is target else source.document
        special_ids = {
            "behind": (source.special(END_TOKEN),),
            "begin": (self.start,),
            "end": (self.end,),
        }
        return ProcessorSpec(
            **special_ids, tokenizer=target.document, source_tokenizer=source_tokenizer
        )

    @property
    def chance(self) -> Mapping[str, float]:
        return {"accuracy": 1 / self.target.size, "exact_match": 0.0}

    def model(self) -> ModelSpec:
        source, target = self.vocabularies
        width, layers = (256, 3) if self.sizes["train"] >= LARGE_CORPUS_PAIRS else (128, 2)
        return make_translator(
            (source.size, target.size), width, layers, table="one" if source is target else "two"
        )


def _pair_lengths(sides: Sequence[EncodedSide]) -> IndexArray:
    return np.max([side.lengths for side in sides], axis=0)


def _train_vocabularies(
    train: list[SentencePair], options: TranslationOptions
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    sources, targets = ([pair[n] for pair in train] for n in (0, 1))
    if options.vocabularies == "separate":
        source, target = (
            train_bpe(texts, options.vocab, (START_TOKEN, END_TOKEN))
            for texts in (sources, targets)
        )
        return source, target
    shared = train_bpe([*sources, *targets], options.vocab, (START_TOKEN, END_TOKEN))
    return shared, shared


def _pad_rows(rows: list[list[list[int]]], fill: int = 0) -> tuple[Tensor, SequenceInfo]:
    """Ids [B, T] of rows that each hold one text or several, padded with `fill`, and their
    positions and segments.
    """
    width = max(sum(map(len, row)) for row in rows)
    ids, position, segment = np.full((3, len(rows), width), -1, np.int64)
    ids[:], position[:] = fill, 0
    for n, row in enumerate(rows):
        row_ids = [token_id for text in row for token_id in text]
        ids[n, : len(row_ids)] = row_ids
        position[n, : len(row_ids)] = [at for text in row for at in range(len(text))]
        segment[n, : len(row_ids)] = [k for k, text in enumerate(row) for _ in text]
    # Rows with one text each do not need `lengths`: padded to one width they are a single attention
    # call.
    lengths = (
        tuple(tuple(map(len, row)) for row in rows) if any(len(row) > 1 for row in rows) else None
    )
    tokens = SequenceInfo(
        torch.from_numpy(position), torch.from_numpy(segment), checked=True, lengths=lengths
    )
    return torch.from_numpy(ids), tokens


# --- The task over parallel texts -----------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ParallelTextTask(FileTask):
    """Translation of sentences from parallel texts.

    `path` is two aligned files (source, target), or one file whose tab-separated `columns`, counted
    from 1, hold source and target. `valid` and `test` are shares of the pairs, or files of the same
    kind as `path`. No sentence of either side is trained on and held out; with
    `split_by="sources"`, only source sentences are kept apart. The other fields are described in
    `TranslationOptions`.

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
    split_by: str = "sentences"

    def check(self) -> None:
        check_split_rule(self.split_by)
        for name in ("path", "valid", "test"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != 2:
                files = f"names {len(value)} file{'s' * (len(value) != 1)}"
                raise SpecError(
                    f"{name}={value!r} {files}; give two, (source, target), or one with columns"
                )
        if len(self.columns) != 2 or min(self.columns) < 1:
            raise SpecError(
                f"columns={self.columns!r} must be the two numbers of the source and target "
                "columns, counted from 1; "
                "use for example columns=(1, 2)"
            )
        check_split_shares(*self._shares())
        self._options()

    def _shares(self) -> tuple[float, float]:
        """Shares for validation and test; the default share for a split with files of its own,
        which is not used.
        """
        valid, test = (
            DEFAULT_HELD_OUT if isinstance(value, (str, tuple)) else value
            for value in (self.valid, self.test)
        )
        return valid, test

    def _options(self) -> TranslationOptions:
        return TranslationOptions(self.vocab, self.vocabularies, self.longest, self.form)

    def files(self) -> Sequence[Path]:
        sources = [
            source
            for source in (self.path, self.valid, self.test)
            if not isinstance(source, (int, float))
        ]
        return [existing_file(str(path)) for source in sources for path in _as_tuple(source)]

    def read(self) -> TranslationDataset:
        options = {"valid": self.valid, "test": self.test}
        held_out = {
            split: list(self._read_pairs(value))
            for split, value in options.items()
            if not isinstance(value, (int, float))
        }
        for split, pairs in held_out.items():
            if not pairs:
                raise SpecError(
                    f"{split}={options[split]!r} is empty; give files with sentences, or a share "
                    f"such as {split}=0.05"
                )
        corpus = ParallelCorpus.of(
            self._read_pairs(self.path), self._shares(), held_out, self.split_by
        )
        return TranslationDataset(corpus, self._options())

    def _read_pairs(self, source: str | tuple[str, ...]) -> Iterator[SentencePair]:
        paths = [existing_file(path) for path in _as_tuple(source)]
        return (
            _read_aligned_files(*paths)
            if len(paths) == 2
            else _read_columns(paths[0], self.columns)
        )


def _as_tuple(source: str | tuple[str, ...]) -> tuple[str, ...]:
    return source if isinstance(source, tuple) else (source,)


def _read_aligned_files(source: Path, target: Path) -> Iterator[SentencePair]:
    counts = [0, 0]
    for lines in zip_longest(read_lines(source), read_lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if None not in lines:
            yield SentencePair(lines[0].strip(), lines[1].strip())
    if counts[0] != counts[1]:
        fact = f"{source} has {counts[0]} lines, {target} has {counts[1]}"
        raise SpecError(f"{fact}; line n of one must be the translation of line n of the other")


def _read_columns(path: Path, columns: tuple[int, ...]) -> Iterator[SentencePair]:
    for n, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) < max(columns):
            fact = f"line {n} of {path} has {len(cells)} column{'s' * (len(cells) != 1)}"
            raise SpecError(
                f"{fact}, too few for columns={columns}; separate source and target by a tab"
            )
        yield SentencePair(*(cells[column - 1].strip() for column in columns))
