"""One JSON object a line: texts, translations, or texts with a label, by the names of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.sequence_info import SequenceInfo
from ..model_spec import EmbeddingSpec, ModelSpec, ProcessorSpec
from .example_order import DEFAULT_HELD_OUT, IndexArray, check_split_shares, split_examples
from .file_task import Dataset, FileTask, make_classifier
from .labelled_examples import ClassifierInputs, LabelledDataset, number_labels
from .language_modelling import TokenSpan, TokenStreamDataset, split_ranges
from .text_files import existing_path, find_splits, read_lines
from .translation import ParallelCorpus, SentencePair, TranslationDataset, TranslationOptions, normalise_sentence
from .vocabulary import IdArray, SubwordVocabulary, train_bpe

END_OF_TEXT = "<|end|>"
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")

FieldRows = list[list[str]]  # what the wanted fields of each object say


@dataclass(frozen=True, repr=False)
class JsonlTask(FileTask):
    """Lines of JSON objects: texts one after the other, each with an end; with `source_field` and `target_field`
    translations; with `label_field` the class of each text.

    `path` is a file, of which `valid` and `test` are held out (of texts the last ones, else drawn by what is read), or
    a folder with train.jsonl, valid.jsonl and perhaps test.jsonl. `vocab` pieces are learnt from the train split.
    `length` is how many tokens are read at once: texts with a label are cut there, longer pairs are left out.
    """

    name: ClassVar[str] = "jsonl"
    path: str
    text_field: str = "text"
    label_field: str = ""
    source_field: str = ""
    target_field: str = ""
    valid: float = DEFAULT_HELD_OUT
    test: float = DEFAULT_HELD_OUT
    vocab: int = 4096
    length: int = 128

    def check(self) -> None:
        check_split_shares(self.valid, self.test)
        if bool(self.source_field) != bool(self.target_field):
            raise SpecError("a translation has two sides; give both source_field= and target_field=")
        if self.source_field and self.label_field:
            raise SpecError("a translation has no label; leave out label_field=, or source_field= and target_field=")
        if self.length < 2:
            raise SpecError(f"Jsonl(length={self.length}) is no number of tokens; give length=64, say")

    def _split_paths(self) -> dict[str, Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return {"train": path}
        if len(found := find_splits(path, JSONL_SUFFIXES)) < 2:
            raise SpecError(f"{path} has no train.jsonl with a valid.jsonl; name them so, or give one file")
        return found

    def files(self) -> Sequence[Path]:
        return list(self._split_paths().values())

    def read(self) -> Dataset:
        if self.source_field:
            both = {
                split: self._read_fields(path, "source_field", "target_field")
                for split, path in self._split_paths().items()
            }
            pairs = {split: [SentencePair(*row) for row in rows] for split, rows in both.items()}
            making = TranslationOptions(self.vocab, longest=self.length)
            return TranslationDataset(ParallelCorpus.of(pairs.pop("train"), (self.valid, self.test), pairs), making)
        if self.label_field:
            paths = self._split_paths().items()
            return self._labelled_dataset(
                {split: list(self._read_fields(path, "text_field", "label_field")) for split, path in paths}
            )
        return self._token_stream()

    def _read_fields(self, path: Path, *names: str) -> Iterator[list[str]]:
        """What these fields say in each object, one object after the other."""
        wanted, empty = [(name, getattr(self, name)) for name in names], True
        for n, line in enumerate(read_lines(path), 1):
            if line.strip():
                row, empty = _parse_object(line, n, path), False
                yield [_field_text(row, *field, n, path) for field in wanted]
        if empty:
            raise SpecError(f"{path} is empty; give one JSON object a line")

    def _token_stream(self) -> TokenStreamDataset:
        """The ids of all texts; of the texts themselves there are only ever a few in memory."""
        paths = self._split_paths()
        counts = {split: sum(1 for _ in self._read_texts(path)) for split, path in paths.items()}
        told = split_ranges(counts, (self.valid, self.test))
        vocabulary = train_bpe(islice(self._read_texts(paths["train"]), told["train"][2]), self.vocab, (END_OF_TEXT,))
        end = np.array([vocabulary.special(END_OF_TEXT)], vocabulary.dtype)
        coded = {split: vocabulary.encode(self._read_texts(path)) for split, path in paths.items()}
        spans: dict[str, TokenSpan] = {}
        for split, (owner, start, stop) in told.items():
            ids = np.concatenate([end[:0], *(one for text in coded[owner][start:stop] for one in (text, end))])
            spans[split] = TokenSpan(ids, 0, len(ids))
        widths, stop = vocabulary.bytes_per_id, vocabulary.special(END_OF_TEXT)
        return TokenStreamDataset(
            spans, self.length, vocabulary.size, vocabulary=vocabulary, bytes_per_id=widths, end_id=stop
        )

    def _read_texts(self, path: Path) -> Iterator[str]:
        return (row[0] for row in self._read_fields(path, "text_field"))

    def _labelled_dataset(self, found: Mapping[str, FieldRows]) -> LabelledDataset:
        rows = [row for own in found.values() for row in own]
        counts = {split: len(own) for split, own in found.items()}
        splits = split_examples(counts, [normalise_sentence(text) for text, _ in rows], self.valid, self.test)
        texts = [text for text, _ in rows]
        vocabulary = train_bpe([texts[n] for n in splits["train"]], self.vocab, (END_OF_TEXT,))
        labels, names = number_labels([label for _, label in rows])
        coded = vocabulary.encode(texts)
        data = LabelledDataset(TextInputs(coded, vocabulary, self.length), labels, names, splits)
        if long := sum(len(ids) >= self.length for ids in coded):
            data.notes = (f"cut, for they have more than length={self.length} tokens: {long} of {len(texts)} texts",)
        return data


class TextInputs(ClassifierInputs):
    """Texts as ids, each with an end, so that none is without a token."""

    def __init__(self, encoded: list[IdArray], vocabulary: SubwordVocabulary, length: int) -> None:
        self.vocabulary, self.size, self.end = vocabulary, vocabulary.size, vocabulary.special(END_OF_TEXT)
        self.document = vocabulary.document
        self.encoded, self.length = encoded, length

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        rows = [[*self.encoded[n][: self.length - 1], self.end] for n in indices]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for place, row in zip(ids, rows, strict=True):
            place[: len(row)] = row
        x = torch.from_numpy(ids)
        return x, SequenceInfo.from_batch(x, lengths=[len(row) for row in rows])

    @property
    def usage(self) -> ProcessorSpec:
        return ProcessorSpec(behind=(self.end,), tokenizer=self.document)

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        return make_classifier("reader", EmbeddingSpec(self.size), num_classes, pooling)


def _parse_object(line: str, n: int, path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"line {n} of {path} is no JSON: {error}; give one object a line") from None
    if not isinstance(found, dict):
        raise SpecError(f"line {n} of {path} holds {type(found).__name__}; give one object a line")
    return found


def _field_text(row: dict[str, Any], name: str, field: str, n: int, path: Path) -> str:
    if field not in row:
        raise SpecError(f"line {n} of {path} has no {field!r}; {suggest(field, row)}, as {name}=")
    value = row[field]
    kinds = {str: "text", int: "a whole number", bool: "true or false"} if name == "label_field" else {str: "text"}
    if type(value) not in kinds:
        fact = f"{field!r} in line {n} of {path} is of type {type(value).__name__}"
        raise SpecError(f"{fact}; give {', '.join(kinds.values())}")
    return str(value).strip() if name in ("source_field", "target_field") else str(value)
