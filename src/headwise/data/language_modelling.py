"""Language modelling: `TextTask` reads plain text, `TokenStreamDataset` predicts the next token of
a long stream.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SpecError, suggest
from ..model_spec import ModelSpec, ProcessorSpec
from .example_order import DEFAULT_HELD_OUT, check_split_shares, make_rng, strided_batch_indices
from .file_task import Dataset, FileTask, make_language_model
from .task import IGNORE_INDEX, Batch, MetricSums
from .text_files import existing_file, existing_path, is_gzipped, list_files, read_text_chunks
from .vocabulary import ByteVocabulary, CharVocabulary, Vocabulary, read_vocabulary, train_bpe

ROUNDING_SLACK = 1e-6  # because 1 - 0.9 is slightly less than 0.1
SCAN_TOKENS = 1 << 22  # tokens per chunk when a whole stream is scanned


@dataclass(frozen=True, eq=False)
class TokenSpan:
    """The tokens `start` to `stop` of `ids`: any object that can be sliced, such as an array on
    disk.
    """

    ids: Any
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Number of occurrences of each id, counted in chunks."""
        counts = np.zeros(vocab_size, np.int64)
        for start in range(self.start, self.stop, SCAN_TOKENS):
            chunk = np.asarray(self.ids[start : min(start + SCAN_TOKENS, self.stop)])
            counts += np.bincount(chunk.astype(np.int64), minlength=vocab_size)
        return counts


class TokenStreamDataset(Dataset):
    """Next-token prediction on a stream of tokens.

    Training batches are random crops of `length` tokens. Held-out splits are cut into rows that
    predict each token exactly once; each batch takes rows from all over the split. The first token
    of a split is predicted from the one before it, if there is one in the same array.
    `bytes_per_id` is the number of text bytes per id; without it the metric bits_per_byte is left
    out. `end_id` is the token after every text of the stream, if there is one.
    """

    def __init__(
        self,
        spans: Mapping[str, TokenSpan],
        length: int,
        vocab_size: int,
        *,
        vocabulary: Vocabulary | None = None,
        bytes_per_id: NDArray[np.int64] | None = None,
        end_id: int | None = None,
    ) -> None:
        self.spans, self.length, self.size, self.vocabulary, self.end = (
            spans,
            length,
            vocab_size,
            vocabulary,
            end_id,
        )
        if len(spans["train"]) <= length:
            count = len(spans["train"])
            raise SpecError(
                f"the train split has {count} tokens, too few for length={length}; use more text "
                "or a smaller length="
            )
        self.sizes = {split: self._num_rows(split) for split in spans}
        self.sizes["train"] = len(spans["train"]) // length
        if not self.sizes["valid"]:
            raise SpecError(
                f"none of {len(spans['train'])} tokens are left for validation; use a larger valid="
            )
        self._bytes_per_id = None if bytes_per_id is None else torch.from_numpy(bytes_per_id)

    def _first_target(self, split: str) -> int:
        """Index of the first token that is predicted; the first of an array cannot be, nothing is
        before it.
        """
        return max(1, self.spans[split].start)

    def _num_rows(self, split: str) -> int:
        return -(-max(0, self.spans[split].stop - self._first_target(split)) // self.length)

    def batches(self, size: int, split: str) -> int:
        return -(-self.sizes[split] // size)

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        if split == "train":
            return self._random_crops(index, size, seed)
        first, stop = self._first_target(split), self.spans[split].stop
        targets = [
            first + n * self.length for n in strided_batch_indices(self.sizes[split], index, size)
        ]
        return self._next_token_batch(
            split, [(at - 1, min(at + self.length, stop)) for at in targets]
        )

    def _random_crops(self, index: int, size: int, seed: int) -> Batch:
        span = self.spans["train"]
        starts = make_rng(seed, index).integers(span.start, span.stop - self.length, size)
        return self._next_token_batch(
            "train", [(int(at), int(at) + self.length + 1) for at in starts]
        )

    def _next_token_batch(self, split: str, ranges: list[tuple[int, int]]) -> Batch:
        """Inputs and next-token labels for (start, stop) ranges; rows at the end of a split are
        padded.
        """
        ids = np.zeros((len(ranges), self.length), np.int64)
        labels = np.full((len(ranges), self.length), IGNORE_INDEX, np.int64)
        for row, (start, stop) in enumerate(ranges):
            crop = self.spans[split].ids[start:stop]
            ids[row, : len(crop) - 1], labels[row, : len(crop) - 1] = crop[:-1], crop[1:]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Negative log-likelihood in nats per token, and in bits per byte of text."""
        has_label = batch.labels != IGNORE_INDEX
        labels = batch.labels[has_label]
        log_probs = logits[has_label].float().log_softmax(-1).gather(-1, labels[:, None])
        nats = -float(log_probs.double().sum())
        sums: dict[str, tuple[float, int]] = {"nats": (nats, len(labels))}
        if self._bytes_per_id is not None:
            num_bytes = int(self._bytes_per_id[labels.cpu()].sum())
            sums["bits_per_byte"] = nats / math.log(2), num_bytes
        return sums

    @property
    def chance(self) -> Mapping[str, float]:
        metrics = {"nats": math.log(self.size)}
        if self._bytes_per_id is None:
            return metrics
        train = self.spans["train"]
        bytes_per_token = float(train.counts(self.size) @ self._bytes_per_id.numpy()) / len(train)
        return metrics | {"bits_per_byte": metrics["nats"] / math.log(2) / bytes_per_token}

    @property
    def usage(self) -> ProcessorSpec:
        end_ids = () if self.end is None else (self.end,)
        return replace(super().usage, before=end_ids, end=end_ids)

    def model(self) -> ModelSpec:
        return make_language_model(self.size)


def split_ranges(
    counts: Mapping[str, int], shares: tuple[float, float]
) -> dict[str, tuple[str, int, int]]:
    """For each split the file that holds it, and its first and last token there.

    A split without a file of its own is taken from the end of the train file.

    >>> split_ranges({"train": 10}, (0.2, 0.1))
    {'train': ('train', 0, 7), 'valid': ('train', 7, 9), 'test': ('train', 9, 10)}
    """
    full_files = {split: (split, 0, count) for split, count in counts.items()}
    if "valid" in counts:
        return full_files
    valid, test = shares
    count = counts["train"]
    first, second = split_points(count, (valid, 0.0 if "test" in counts else test))
    divided = {
        "train": ("train", 0, first),
        "valid": ("train", first, second),
        "test": ("train", second, count),
    }
    return divided | {split: full_files[split] for split in full_files if split != "train"}


def split_points(count: int, shares: tuple[float, float]) -> tuple[int, int]:
    """Indices where the validation and test splits begin, rounded down as in nanoGPT."""
    valid, test = shares
    return int(count * (1 - valid - test) + ROUNDING_SLACK), int(
        count * (1 - test) + ROUNDING_SLACK
    )


# --- Plain text -----------------------------------------------------------------------------------

ByteArray = NDArray[np.uint8]

STDLIB = "stdlib"
# Folders of the standard library's path that hold tests and installed packages.
SKIPPED_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
TOKENIZATIONS = ("bytes", "chars", "bpe")
BLOCK_BYTES = 1 << 16  # bytes of text per call of the tokeniser


@dataclass(frozen=True, repr=False)
class TextTask(FileTask):
    """Language modelling on plain text, in rows of `length` tokens.

    `path` is a file; a folder, whose files with one of the `suffixes` are joined in the order of
    their names; or "stdlib", the source of Python's standard library. `tokens` is "bytes", "chars",
    "bpe" or the path of a tokenizer.json; `vocab` is the vocabulary size that "bpe" trains on the
    train split. The shares `valid` and `test` of the bytes are held out from the end of the text.

    >>> TextTask("stdlib", length=32).batch(0, 4).x.shape
    torch.Size([4, 32])
    """

    name: ClassVar[str] = "text"
    path: str
    tokens: str = "bytes"
    vocab: int = 4096
    length: int = 64
    valid: float = DEFAULT_HELD_OUT
    test: float = DEFAULT_HELD_OUT
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")

    def check(self) -> None:
        check_split_shares(self.valid, self.test)
        if self.length < 1:
            raise SpecError(
                f"length={self.length} must be at least 1 token; use for example length=64"
            )
        if self.tokens not in TOKENIZATIONS and not self.tokens.endswith(".json"):
            remedy = suggest(self.tokens, TOKENIZATIONS)
            raise SpecError(
                f"tokens={self.tokens!r} is unknown; {remedy}, or give the path of a tokenizer.json"
            )

    def files(self) -> Sequence[Path]:
        return [
            *self._text_files(),
            *([] if self.tokens in TOKENIZATIONS else [existing_file(self.tokens)]),
        ]

    def _text_files(self) -> list[Path]:
        if self.path == STDLIB:
            return list_files(Path(sysconfig.get_paths()["stdlib"]), (".py",), SKIPPED_FOLDERS)
        if not (path := existing_path(self.path)).is_dir():
            return [path]
        if not (paths := list_files(path, self.suffixes)):
            suffixes = ", ".join(self.suffixes)
            raise SpecError(
                f"{self.path} has no files with the suffixes {suffixes}; give others, as in "
                "suffixes=('.c',)"
            )
        return paths

    def read(self) -> TokenStreamDataset:
        raw = read_files(self._text_files())
        if not len(raw):
            raise SpecError(f"{self.path} is empty; give a file with text")
        first, second = (
            _end_of_character(raw, at) for at in split_points(len(raw), (self.valid, self.test))
        )
        vocabulary = self._make_vocabulary(raw, first)
        texts = [raw[:first], raw[first:second], raw[second:]]
        encoded = [
            text if isinstance(vocabulary, ByteVocabulary) else _encode_text(vocabulary, text)
            for text in texts
        ]
        ids = raw if isinstance(vocabulary, ByteVocabulary) else np.concatenate(encoded)
        ends = np.cumsum([len(split_ids) for split_ids in encoded]).tolist()
        spans = [TokenSpan(ids, start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
        bytes_per_id, num_bytes = vocabulary.bytes_per_id, len(raw)
        if bytes_per_id is not None and self.tokens not in TOKENIZATIONS:
            num_bytes = sum(int(span.counts(len(bytes_per_id)) @ bytes_per_id) for span in spans)
        if num_bytes != len(raw):
            bytes_per_id = (
                None  # this tokenizer normalises the text, so bits per byte would not be exact
            )
        splits: dict[str, TokenSpan] = dict(zip(("train", "valid", "test"), spans, strict=True))
        return TokenStreamDataset(
            splits, self.length, vocabulary.size, vocabulary=vocabulary, bytes_per_id=bytes_per_id
        )

    def _make_vocabulary(self, raw: ByteArray, first: int) -> Vocabulary:
        if self.tokens == "bytes":
            return ByteVocabulary()
        if self.tokens == "chars":
            alphabet: set[str] = set()
            for block in iter_text_blocks(
                raw
            ):  # of all splits, so that no held-out character is unknown
                alphabet |= set(block)
            return CharVocabulary(alphabet)
        if self.tokens == "bpe":
            return train_bpe(iter_text_blocks(raw[:first]), self.vocab)
        return read_vocabulary(existing_file(self.tokens))


def read_files(paths: Sequence[Path]) -> ByteArray:
    """The concatenated bytes of text files, all checked to be UTF-8; a single uncompressed file is
    memory-mapped.
    """
    use_memmap = len(paths) == 1 and paths[0].stat().st_size and not is_gzipped(paths[0])
    buffer = bytearray()
    for path in paths:
        for text in read_text_chunks(path):
            buffer += b"" if use_memmap else text.encode()
    return (
        np.memmap(paths[0], np.uint8, "r") if use_memmap else np.frombuffer(bytes(buffer), np.uint8)
    )


def iter_text_blocks(raw: ByteArray) -> Iterator[str]:
    """A text in blocks that end with a line, or with a character if a line is
    longer than a block.
    """
    start = 0
    while start < len(raw):
        block = raw[start : start + BLOCK_BYTES].tobytes()
        if start + BLOCK_BYTES < len(raw):
            block = block[
                : block.rfind(b"\n") + 1 or _end_of_character(raw, start + BLOCK_BYTES) - start
            ]
        yield block.decode()
        start += len(block)


def _end_of_character(raw: ByteArray, at: int) -> int:
    """The first index from `at` on that does not cut a UTF-8 character in two."""
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _encode_text(vocabulary: Vocabulary, text: ByteArray) -> NDArray[np.generic]:
    return np.concatenate(
        [*vocabulary.encode(iter_text_blocks(text)), np.empty(0, vocabulary.dtype)]
    )
