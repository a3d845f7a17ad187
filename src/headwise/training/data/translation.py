"""Translation from parallel texts, and BLEU and chrF."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import ModelSpec, ProcessorSpec
from ...models.vocabulary import IdArray, train_bpe
from ...util.errors import SpecError, pluralise, suggest
from .file_task import (
    DEFAULT_HELD_OUT,
    BatchPlan,
    Dataset,
    FileTask,
    IndexArray,
    check_split_shares,
    split_by_key,
)
from .synthetic_task import ModelShape, make_small_translator
from .task import MetricSums
from .text_files import existing_file, read_lines

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
    scripts: Counter[str] = Counter()
    for text in references:
        letters = filter(str.isalpha, text)
        scripts.update(unicodedata.name(char, "").partition(" ")[0] for char in letters)
    threshold = MIN_SCRIPT_SHARE * scripts.total()
    if sum(scripts[name] for name in CHARACTER_SCRIPTS) > threshold:
        return "char"
    return "zh" if scripts["CJK"] > threshold else DEFAULT_BLEU_TOKENIZER


def join_words(line: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text of words separated by spaces, as its language is written, and the words'
    character spans.

    Two words are joined if one ends and the other begins with a character of a script without
    spaces (Chinese, Japanese, Thai, Lao, Khmer or Burmese), or if one of these characters is its
    punctuation.

    >>> join_words("我 用 Visual Studio 。")
    ('我用 Visual Studio。', ((0, 1), (1, 2), (3, 9), (10, 16), (16, 17)))
    >>> join_words("the dog")
    ('the dog', ((0, 3), (4, 7)))
    """
    text = ""
    spans: list[tuple[int, int]] = []
    for word in line.split():
        if text and not _are_written_joined(text[-1], word[0]):
            text += " "
        spans.append((len(text), len(text) + len(word)))
        text += word
    return text, tuple(spans)


def _are_written_joined(*chars: str) -> bool:
    """True if no space is between the last and the first character of two words."""
    prefixes = ("CJK", *FULLWIDTH_NAMES, *CHARACTER_SCRIPTS)
    unspaced = [char for char in chars if unicodedata.name(char, "").startswith(prefixes)]
    is_punctuation = [unicodedata.category(char).startswith("P") for char in unspaced]
    return len(unspaced) == len(chars) or any(is_punctuation)


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
    bleu = make_bleu(tokenize or choose_bleu_tokenizer(references))
    chrf = _sacrebleu_metrics().CHRF()
    has_bleu = max(count_bleu_tokens(bleu, references)) >= BLEU_ORDER
    score = bleu.corpus_score(list(hypotheses), [list(references)]).score
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)]).score
    return SacreBleuScores(
        score if has_bleu else None,
        chrf_score,
        str(bleu.get_signature()),
        str(chrf.get_signature()),
    )


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


# --- Splits that share no sentence ----------------------------------------------------------------

SPLIT_RULES = ("sentences", "sources")
SideKey = tuple[str, str]  # the side and the normalised sentence


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def split_pairs(
    train: Iterable[SentencePair],
    shares: tuple[float, float],
    held_out: Mapping[str, list[SentencePair]],
    split_by: str = "sentences",
) -> tuple[dict[str, list[SentencePair]], list[str]]:
    """Return the pairs of each split, and notes about those that were left out.

    Held-out pairs are given, or are a share of `train`. No source and no target sentence is trained
    on and held out; with `split_by="sources"` targets may be. Sentences that differ only in case,
    punctuation and spaces count as equal.
    """
    all_pairs = list(train)
    notes: list[str] = []
    pairs = [pair for pair in all_pairs if pair.source and pair.target]
    if len(pairs) < len(all_pairs):
        num_empty = len(all_pairs) - len(pairs)
        notes.append(f"{num_empty} of {len(all_pairs)} pairs are left out because a side is empty")
    if not pairs:
        raise SpecError("no pair has text on both sides; give source and target sentences")
    splits = dict(held_out)
    if "valid" not in held_out:
        valid, test = shares
        held_out_pairs = _draw_held_out(
            pairs, (valid, 0.0 if "test" in held_out else test), split_by
        )
        pairs = held_out_pairs.pop("train")
        splits = held_out_pairs | splits
    held_out_keys: set[SideKey] = set()
    for split_values in splits.values():
        for pair in split_values:
            held_out_keys.update(_side_keys(pair, split_by))
    train_pairs = [pair for pair in pairs if held_out_keys.isdisjoint(_side_keys(pair, split_by))]
    if len(train_pairs) < len(pairs):
        num_shared = len(pairs) - len(train_pairs)
        notes.append(
            f"{num_shared} of {len(pairs)} pairs are not trained on because their {split_by} are "
            "held out"
        )
    if not train_pairs:
        remedy = "" if split_by == "sources" else ", or use split_by='sources'"
        raise SpecError(
            f"the {split_by} of every training pair are held out; give other files{remedy}"
        )
    return {"train": train_pairs, **splits}, notes


def _draw_held_out(
    pairs: list[SentencePair], shares: tuple[float, float], split_by: str
) -> dict[str, list[SentencePair]]:
    """Divide pairs into splits, so that pairs that share a sentence are in the same one.

    Raises SpecError if groups of such pairs are so large that a split is far from its share.
    """
    valid, test = shares
    keys = [_side_keys(pair, split_by) for pair in pairs]
    indices = split_by_key(_group_keys(keys, 2 + (test > 0)), valid, test)
    for split, share in (("valid", valid), ("test", test)):
        size = len(indices[split])
        if split_by == "sentences" and size > 2 * share * len(pairs) + 10:
            raise SpecError(
                f"split {split} has {size} of {len(pairs)} pairs instead of {share:.0%}, because "
                "many pairs share a sentence; use split_by='sources', which lets targets be in both"
            )
    splits: dict[str, list[SentencePair]] = {}
    for split, rows in indices.items():
        splits[split] = [pairs[n] for n in rows]
    return splits


def normalise_sentence(sentence: str) -> str:
    """Case-folded letters and digits of a sentence, for finding duplicates; the sentence itself if
    it has none.

    >>> normalise_sentence("Hi, Tom!") == normalise_sentence("hi tom."), normalise_sentence("?!")
    (True, '?!')
    """
    folded = unicodedata.normalize("NFKC", sentence).casefold()
    return re.sub(r"[\W_]+", "", folded) or sentence


def _side_keys(pair: SentencePair, split_by: str) -> list[SideKey]:
    """Return the normalised sentences of a pair that must not be trained on and held out."""
    sides = ("source", "target") if split_by == "sentences" else ("source",)
    return [(side, normalise_sentence(getattr(pair, side))) for side in sides]


def _group_keys(keys: Sequence[Sequence[SideKey]], num_splits: int) -> list[str]:
    """Return the first source of the group of each pair; pairs that share a sentence, also by way
    of others, are a group.

    Raises SpecError if there are fewer groups than splits, but enough sources.
    """
    parents: dict[SideKey, SideKey] = {}

    def find_root(key: SideKey) -> SideKey:
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = parents[parent]
            key = parents[key]
        return key

    for sides in keys:
        roots = sorted(map(find_root, sides))  # a source comes before a target
        parents |= dict.fromkeys(roots, roots[0])
    groups = [find_root(sides[0])[1] for sides in keys]
    if len(set(groups)) < num_splits <= len({sides[0] for sides in keys}):
        raise SpecError(
            f"{len(keys)} pairs share so many sentences that they form "
            f"{pluralise(len(set(groups)), 'group')}, too few for {num_splits} splits; use "
            "split_by='sources', which lets targets be in both"
        )
    return groups


# --- The task over parallel texts -----------------------------------------------------------------

START_TOKEN = "<s>"
END_TOKEN = "</s>"
CHOICES = {"vocabularies": ("shared", "separate"), "split_by": SPLIT_RULES}
LARGE_CORPUS_PAIRS = 10_000  # pairs from which on a wider model pays
SPARE_ANSWER_TOKENS = 8  # for answers longer than the reference


@dataclass
class EncodedPairs:
    """Pairs of a split, their ids, and the lengths of both sides with the start or end token."""

    pairs: list[SentencePair]
    sources: list[IdArray]
    targets: list[IdArray]

    @property
    def lengths(self) -> IndexArray:
        """The length of the longer side of each pair."""
        sides = zip(self.sources, self.targets, strict=True)
        return np.array([1 + max(map(len, pair)) for pair in sides], np.int64)


class TranslationDataset(Dataset):
    """Encoded sentence pairs of each split, and the vocabularies of source and target."""

    def __init__(self, task: ParallelTextTask, splits: Mapping[str, list[SentencePair]]) -> None:
        texts = [
            [pair.source for pair in splits["train"]],
            [pair.target for pair in splits["train"]],
        ]
        if task.vocabularies == "shared":
            texts = [texts[0] + texts[1]]
        trained = [train_bpe(side, task.vocab, (START_TOKEN, END_TOKEN)) for side in texts]
        self.vocabularies = (trained[0], trained[-1])
        self.vocabulary = self.vocabularies[1]
        self.encoded: dict[str, EncodedPairs] = {}
        for split, pairs in splits.items():
            self.encoded[split] = EncodedPairs(
                pairs,
                self.vocabularies[0].encode([pair.source for pair in pairs]),
                self.vocabularies[1].encode([pair.target for pair in pairs]),
            )
        self._drop_long_pairs(task.longest)
        longest = [max(map(len, split.targets), default=0) for split in self.encoded.values()]
        self.longest_target = 1 + max(longest)
        self.plans: dict[tuple[str, int], BatchPlan] = {}

    def _drop_long_pairs(self, longest: int) -> None:
        train = self.encoded["train"]
        indices = np.flatnonzero(train.lengths <= longest).tolist()
        count = len(train.pairs)
        if not indices:
            raise SpecError(
                f"no training pair has at most longest={longest} tokens on each side; use a larger "
                "longest="
            )
        if len(indices) < count:
            self.notes += (
                f"{count - len(indices)} of {count} pairs are not trained on because a side has "
                f"more than longest={longest} tokens",
            )
            self.encoded["train"] = EncodedPairs(
                [train.pairs[n] for n in indices],
                [train.sources[n] for n in indices],
                [train.targets[n] for n in indices],
            )

    @property
    def pairs(self) -> dict[str, list[SentencePair]]:
        """The pairs of each split."""
        return {split: encoded.pairs for split, encoded in self.encoded.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of pairs in each split."""
        return {split: len(pairs) for split, pairs in self.pairs.items()}


@dataclass(frozen=True, repr=False)
class ParallelTextTask(FileTask):
    """Translation of sentences from parallel texts.

    `path` is two aligned files (source, target), or one tab-separated file with source and target
    in `columns`, counted from 1. `valid` and `test` are shares of the pairs, or files of the same
    kind as `path`. No sentence of either side is trained on and held out; with
    `split_by="sources"`, only source sentences are kept apart.

    Subword vocabularies of `vocab` tokens are trained on the train split: a "shared" one, or
    "separate" ones for source and target. Pairs with more than `longest` tokens on a side are not
    trained on. A batch has pairs of similar lengths. A source ends with `</s>`; a target is `<s>
    ...` as input and `... </s>` as labels.

    >>> ParallelTextTask(("train.de", "train.en"), valid=("val.de",))
    Traceback (most recent call last):
    headwise.util.errors.SpecError: valid=('val.de',) names 1 file; give two, (source, target), or
    one with columns
    """

    name: ClassVar[str] = "parallel"
    path: str | tuple[str, ...]
    columns: tuple[int, ...] = (1, 2)
    valid: float | str | tuple[str, ...] = DEFAULT_HELD_OUT
    test: float | str | tuple[str, ...] = DEFAULT_HELD_OUT
    vocab: int = 8000
    vocabularies: str = "shared"
    longest: int = 128
    split_by: str = "sentences"

    def check(self) -> None:
        for name in ("path", "valid", "test"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != 2:
                raise SpecError(
                    f"{name}={value!r} names {pluralise(len(value), 'file')}; give two, (source, "
                    "target), or one with columns"
                )
        if len(self.columns) != 2 or min(self.columns) < 1:
            raise SpecError(
                f"columns={self.columns!r} must be the two numbers of the source and target "
                "columns, counted from 1; use for example columns=(1, 2)"
            )
        check_split_shares(*self._shares)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise SpecError(f"{name}={value!r} is unknown; {suggest(value, choices)}")
        if self.longest < 2:
            raise SpecError(
                f"longest={self.longest} has no room for a token and the end token; use longest=2 "
                "or more"
            )

    @property
    def _held_out_files(self) -> dict[str, str | tuple[str, ...]]:
        values = {"valid": self.valid, "test": self.test}
        return {split: value for split, value in values.items() if isinstance(value, (str, tuple))}

    @property
    def _shares(self) -> tuple[float, float]:
        """Shares for validation and test; a split with separate files has the default, which is not
        used.
        """
        valid = self.valid if isinstance(self.valid, (int, float)) else DEFAULT_HELD_OUT
        test = self.test if isinstance(self.test, (int, float)) else DEFAULT_HELD_OUT
        return valid, test

    def files(self) -> Sequence[Path]:
        paths: list[Path] = []
        for source in (self.path, *self._held_out_files.values()):
            paths += _existing_files(source)
        return paths

    def read(self) -> TranslationDataset:
        held_out: dict[str, list[SentencePair]] = {}
        for split, source in self._held_out_files.items():
            held_out[split] = list(self._read_pairs(source))
            if not held_out[split]:
                raise SpecError(
                    f"{split}={source!r} is empty; give files with sentences, or a share such as "
                    f"{split}=0.05"
                )
        train = self._read_pairs(self.path)
        splits, notes = split_pairs(train, self._shares, held_out, self.split_by)
        data = TranslationDataset(self, splits)
        data.notes = (*notes, *data.notes)
        return data

    def _read_pairs(self, source: str | tuple[str, ...]) -> Iterator[SentencePair]:
        paths = _existing_files(source)
        if len(paths) == 2:
            return _read_aligned_files(*paths)
        return _read_columns(paths[0], self.columns)

    # --- Batches, answers and the model ---

    def _batch_plan(self, size: int, split: str) -> BatchPlan:
        """Assignment of pairs to batches, the same for every seed."""
        key = (split, size)
        plans: dict[tuple[str, int], BatchPlan] = self.data.plans
        if key not in plans:
            plans[key] = BatchPlan(self.data.encoded[split].lengths, size)
        return plans[key]

    def count_batches(self, size: int, split: str) -> int:
        return self._batch_plan(size, split).batches

    def read_batch(self, index: int, size: int, split: str) -> Batch:
        plan = self._batch_plan(size, split)
        seed = self.seed if split == "train" else None
        examples = plan.take(index, seed)
        encoded: EncodedPairs = self.data.encoded[split]
        stop = self.data.vocabularies[0].special(END_TOKEN)
        source, source_tokens = _pad_rows([[*encoded.sources[n], stop] for n in examples])
        targets = [encoded.targets[n] for n in examples]
        x, tokens = _pad_rows([[self._start, *target] for target in targets])
        labels, _ = _pad_rows([[*target, self.end] for target in targets], IGNORE_INDEX)
        gold = [encoded.pairs[n].target for n in examples]
        return Batch(x, labels, tokens, source, source_tokens, gold)

    @property
    def _start(self) -> int:
        return self.data.vocabulary.special(START_TOKEN)

    @property
    def end(self) -> int:
        return self.data.vocabulary.special(END_TOKEN)

    @property
    def answers(self) -> int:
        """Tokens of the longest target, and a few more."""
        return self.data.longest_target + SPARE_ANSWER_TOKENS

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        return batch.x[:, :1], None

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """Count answers that equal the reference translation, character for character."""
        answers = [self.text(row) for row in generated]
        correct = sum(answer == target for answer, target in zip(answers, batch.gold, strict=True))
        return {"exact_match": (float(correct), len(answers))}

    @property
    def usage(self) -> ProcessorSpec:
        source, target = self.data.vocabularies
        return ProcessorSpec(
            suffix_ids=(source.special(END_TOKEN),),
            bos=(self._start,),
            eos=(self.end,),
            tokenizer=target.document,
            source_tokenizer=None if source is target else source.document,
        )

    @property
    def chance(self) -> Mapping[str, float]:
        return {"accuracy": 1 / self.data.vocabulary.size, "exact_match": 0.0}

    def model(self) -> ModelSpec:
        """Encoder and decoder with 32 channels per head; their size depends on the corpus."""
        source, target = self.data.vocabularies
        is_large = self.data.sizes["train"] >= LARGE_CORPUS_PAIRS
        width, layers = (256, 3) if is_large else (128, 2)
        shape = ModelShape(width, width // 32, layers, 4 * width)
        source_size = 0 if source is target else source.size
        return make_small_translator("translator", target.size, shape, source_size)


def _pad_rows(rows: list[list[int]], fill: int = 0) -> tuple[Tensor, SequenceInfo]:
    """Ids [B, T] of rows, padded with `fill`, and their positions and segments."""
    tensors = [torch.from_numpy(np.array(row, np.int64)) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, True, fill)
    return ids, SequenceInfo.from_batch(ids, lengths=list(map(len, rows)))


def _existing_files(source: str | tuple[str, ...]) -> list[Path]:
    return [existing_file(path) for path in (source if isinstance(source, tuple) else (source,))]


def _read_aligned_files(source: Path, target: Path) -> Iterator[SentencePair]:
    counts = [0, 0]
    for lines in zip_longest(read_lines(source), read_lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if None not in lines:
            yield SentencePair(lines[0].strip(), lines[1].strip())
    if counts[0] != counts[1]:
        raise SpecError(
            f"{source} has {counts[0]} lines, {target} has {counts[1]}; line n of one must be the "
            "translation of line n of the other"
        )


def _read_columns(path: Path, columns: tuple[int, ...]) -> Iterator[SentencePair]:
    for n, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) < max(columns):
            raise SpecError(
                f"line {n} of {path} has {pluralise(len(cells), 'column')}, too few for "
                f"columns={columns}; separate source and target by a tab"
            )
        yield SentencePair(*(cells[column - 1].strip() for column in columns))
