"""`JsonlTask`: JSON Lines files with texts, labelled texts, or translations."""

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
from .file_task import (
    ClassifierInputs,
    Dataset,
    FileTask,
    LabelledDataset,
    make_classifier,
    number_labels,
)
from .language_modelling import TokenSpan, TokenStreamDataset, split_ranges
from .text_files import existing_path, find_splits, read_lines
from .translation import (
    ParallelCorpus,
    SentencePair,
    TranslationDataset,
    TranslationOptions,
    check_split_rule,
    normalise_sentence,
)
from .vocabulary import IdArray, SubwordVocabulary, train_bpe

END_OF_TEXT = "<|end|>"
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")

FieldRows = list[list[str]]  # for each object the values of the selected fields


@dataclass(frozen=True, repr=False)
class JsonlTask(FileTask):
    """Task over files with one JSON object per line; the fields that are given choose the kind of
    task.

    With `text_field` alone: language modelling on the texts, each followed by an end token. With
    `label_field`: classification of the texts. With `source_field` and `target_field`: translation.

    `path` is a file, or a folder with train.jsonl, valid.jsonl and optionally test.jsonl. From a
    single file the shares `valid` and `test` are held out: the last texts for language modelling,
    otherwise by a hash of the text. A subword vocabulary of `vocab` tokens is trained on the train
    split. `length` is the number of tokens per row: labelled texts are cut there, and longer
    translation pairs are not trained on. `split_by` is that of `ParallelTextTask`.
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
    split_by: str = "sentences"

    def check(self) -> None:
        check_split_shares(self.valid, self.test)
        check_split_rule(self.split_by)
        if bool(self.source_field) != bool(self.target_field):
            raise SpecError(
                "a translation needs two fields; give both source_field= and target_field="
            )
        if self.source_field and self.label_field:
            raise SpecError(
                "a translation has no label; leave out label_field=, or source_field= and "
                "target_field="
            )
        if self.length < 2:
            raise SpecError(
                f"length={self.length} must be at least 2 tokens; use for example length=64"
            )

    def _split_paths(self) -> dict[str, Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return {"train": path}
        if len(paths := find_splits(path, JSONL_SUFFIXES)) < 2:
            raise SpecError(
                f"{path} needs train.jsonl and valid.jsonl; rename the files, or give a single file"
            )
        return paths

    def files(self) -> Sequence[Path]:
        return list(self._split_paths().values())

    def read(self) -> Dataset:
        if self.source_field:
            fields = {
                split: self._read_fields(path, "source_field", "target_field")
                for split, path in self._split_paths().items()
            }
            pairs = {split: [SentencePair(*row) for row in rows] for split, rows in fields.items()}
            options = TranslationOptions(self.vocab, longest=self.length)
            corpus = ParallelCorpus.of(
                pairs.pop("train"), (self.valid, self.test), pairs, self.split_by
            )
            return TranslationDataset(corpus, options)
        if self.label_field:
            paths = self._split_paths().items()
            return self._labelled_dataset(
                {
                    split: list(self._read_fields(path, "text_field", "label_field"))
                    for split, path in paths
                }
            )
        return self._token_stream()

    def _read_fields(self, path: Path, *names: str) -> Iterator[list[str]]:
        """The values of the fields that these options name, for each object of a file."""
        fields = [(name, getattr(self, name)) for name in names]
        is_empty = True
        for n, line in enumerate(read_lines(path), 1):
            if line.strip():
                row, is_empty = _parse_object(line, n, path), False
                yield [_field_text(row, *field, n, path) for field in fields]
        if is_empty:
            raise SpecError(f"{path} is empty; write one JSON object per line")

    def _token_stream(self) -> TokenStreamDataset:
        """Language-modelling data; the ids of all texts are in memory, but only a few of the texts
        at a time.
        """
        paths = self._split_paths()
        counts = {split: sum(1 for _ in self._read_texts(path)) for split, path in paths.items()}
        ranges = split_ranges(counts, (self.valid, self.test))
        vocabulary = train_bpe(
            islice(self._read_texts(paths["train"]), ranges["train"][2]), self.vocab, (END_OF_TEXT,)
        )
        end = np.array([vocabulary.special(END_OF_TEXT)], vocabulary.dtype)
        encoded = {
            split: vocabulary.encode(self._read_texts(path)) for split, path in paths.items()
        }
        spans: dict[str, TokenSpan] = {}
        for split, (owner, start, stop) in ranges.items():
            ids = np.concatenate(
                [end[:0], *(part for text in encoded[owner][start:stop] for part in (text, end))]
            )
            spans[split] = TokenSpan(ids, 0, len(ids))
        bytes_per_id, end_id = vocabulary.bytes_per_id, vocabulary.special(END_OF_TEXT)
        return TokenStreamDataset(
            spans,
            self.length,
            vocabulary.size,
            vocabulary=vocabulary,
            bytes_per_id=bytes_per_id,
            end_id=end_id,
        )

    def _read_texts(self, path: Path) -> Iterator[str]:
        return (row[0] for row in self._read_fields(path, "text_field"))

    def _labelled_dataset(self, rows_of_split: Mapping[str, FieldRows]) -> LabelledDataset:
        rows = [row for split_rows in rows_of_split.values() for row in split_rows]
        counts = {split: len(split_rows) for split, split_rows in rows_of_split.items()}
        splits = split_examples(
            counts, [normalise_sentence(text) for text, _ in rows], self.valid, self.test
        )
        texts = [text for text, _ in rows]
        vocabulary = train_bpe([texts[n] for n in splits["train"]], self.vocab, (END_OF_TEXT,))
        labels, names = number_labels([label for _, label in rows])
        encoded = vocabulary.encode(texts)
        data = LabelledDataset(TextInputs(encoded, vocabulary, self.length), labels, names, splits)
        if num_long := sum(
            len(ids) >= self.length for ids in encoded
        ):  # with the end token longer than `length`
            data.notes = (
                f"{num_long} of {len(texts)} texts have more than length={self.length} tokens and "
                "are cut",
            )
        return data


class TextInputs(ClassifierInputs):
    """Texts as token ids, each followed by an end token, so that an empty text has one token as
    well.
    """

    def __init__(self, encoded: list[IdArray], vocabulary: SubwordVocabulary, length: int) -> None:
        self.vocabulary, self.size, self.end = (
            vocabulary,
            vocabulary.size,
            vocabulary.special(END_OF_TEXT),
        )
        self.document = vocabulary.document
        self.encoded, self.length = encoded, length

    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        rows = [[*self.encoded[n][: self.length - 1], self.end] for n in indices]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for padded, row in zip(ids, rows, strict=True):
            padded[: len(row)] = row
        x = torch.from_numpy(ids)
        return x, SequenceInfo.from_batch(x, lengths=[len(row) for row in rows])

    @property
    def usage(self) -> ProcessorSpec:
        return ProcessorSpec(behind=(self.end,), tokenizer=self.document)

    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        return make_classifier("reader", EmbeddingSpec(self.size), num_classes, pooling)


def _parse_object(line: str, n: int, path: Path) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"line {n} of {path} is not valid JSON: {error}; write one object per line"
        ) from None
    if not isinstance(row, dict):
        raise SpecError(f"line {n} of {path} holds {type(row).__name__}; write one object per line")
    return row


def _field_text(row: dict[str, Any], name: str, field: str, n: int, path: Path) -> str:
    if field not in row:
        raise SpecError(
            f"line {n} of {path} has no field {field!r}; {suggest(field, row)}, as {name}="
        )
    value = row[field]
    types = (
        {str: "text", int: "an integer", bool: "true or false"}
        if name == "label_field"
        else {str: "text"}
    )
    if type(value) not in types:
        fact = f"{field!r} in line {n} of {path} is of type {type(value).__name__}"
        raise SpecError(f"{fact}; write {' or '.join(types.values())}")
    return str(value).strip() if name in ("source_field", "target_field") else str(value)
