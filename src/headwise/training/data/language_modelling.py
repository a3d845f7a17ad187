"""Language modelling: `TextTask` predicts the next token of plain text."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.devices import to_float64
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import ModelSpec, ProcessorSpec
from ...models.vocabulary import (
    ByteVocabulary,
    CharVocabulary,
    Vocabulary,
    read_vocabulary,
    train_bpe,
)
from ...util.errors import SpecError, suggest
from .file_task import (
    DEFAULT_HELD_OUT,
    DEFAULT_SHAPE,
    Dataset,
    FileTask,
    check_split_shares,
    make_rng,
    strided_batch_indices,
)
from .synthetic_task import make_small_decoder
from .task import MetricSums
from .text_files import existing_file, existing_path, is_gzipped, list_files, read_text_chunks

ByteArray = NDArray[np.uint8]

STDLIB = "stdlib"
# Folders of the standard library's path that hold tests and installed packages.
SKIPPED_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
TOKENIZATIONS = ("bytes", "chars", "bpe")
BLOCK_BYTES = 1 << 16  # bytes of text per call of the tokeniser
SCAN_TOKENS = 1 << 22  # tokens per chunk when a whole stream is scanned
ROUNDING_SLACK = 1e-6  # because 1 - 0.9 is slightly less than 0.1


@dataclass(frozen=True, eq=False)
class TokenSpan:
    """The tokens `start` to `stop` of `ids`."""

    ids: NDArray[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Count occurrences of each id, in chunks."""
        counts = np.zeros(vocab_size, np.int64)
        for start in range(self.start, self.stop, SCAN_TOKENS):
            chunk = self.ids[start : min(start + SCAN_TOKENS, self.stop)]
            counts += np.bincount(chunk.astype(np.int64), minlength=vocab_size)
        return counts

    @property
    def first_target(self) -> int:
        """Index of the first token that is predicted; before the first of an array is nothing."""
        return max(1, self.start)


class TokenStream(Dataset):
    """A stream of token ids in rows of `length`, divided into splits.

    `bytes_per_id` is the number of text bytes per id, needed to compute bits per byte.
    """

    def __init__(
        self,
        spans: Mapping[str, TokenSpan],
        length: int,
        vocabulary: Vocabulary,
        bytes_per_id: NDArray[np.int64] | None,
    ) -> None:
        self.spans = spans
        self.vocabulary = vocabulary
        self.size = vocabulary.size
        self.bytes_per_id = None if bytes_per_id is None else torch.from_numpy(bytes_per_id)
        count = len(spans["train"])
        if count <= length:
            raise SpecError(
                f"the train split has {count} tokens, too few for length={length}; use more text "
                "or a smaller length="
            )
        self.sizes: dict[str, int] = {}
        for split, span in spans.items():
            self.sizes[split] = -(-max(0, span.stop - span.first_target) // length)
        self.sizes["train"] = count // length
        if not self.sizes["valid"]:
            raise SpecError(f"none of {count} tokens are left for validation; use a larger valid=")


@dataclass(frozen=True, repr=False)
class TextTask(FileTask):
    """Language modelling on plain text, in rows of `length` tokens.

    `path` is a file; a folder, to join its files with one of the `suffixes` in the order of their
    names; or "stdlib", the source of Python's standard library. `tokens` is "bytes", "chars",
    "bpe" or the path of a tokenizer.json; `vocab` is the vocabulary size that "bpe" trains on the
    train split. The shares `valid` and `test` of the bytes are held out from the end of the text.

    Training batches are random crops. Held-out splits are cut into rows that predict each token
    once; the first token of a split is predicted from the one before it.

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
        tokenizers = [] if self.tokens in TOKENIZATIONS else [existing_file(self.tokens)]
        return [*self._text_files(), *tokenizers]

    def _text_files(self) -> list[Path]:
        if self.path == STDLIB:
            return list_files(Path(sysconfig.get_paths()["stdlib"]), (".py",), SKIPPED_FOLDERS)
        path = existing_path(self.path)
        if not path.is_dir():
            return [path]
        paths = list_files(path, self.suffixes)
        if not paths:
            suffixes = ", ".join(self.suffixes)
            raise SpecError(
                f"{self.path} has no files with the suffixes {suffixes}; give others, as in "
                "suffixes=('.c',)"
            )
        return paths

    # --- Reading ---

    def read(self) -> TokenStream:
        raw = read_files(self._text_files())
        if not len(raw):
            raise SpecError(f"{self.path} is empty; give a file with text")
        # rounded down as in nanoGPT
        first = int(len(raw) * (1 - self.valid - self.test) + ROUNDING_SLACK)
        second = int(len(raw) * (1 - self.test) + ROUNDING_SLACK)
        first = _end_of_character(raw, first)
        second = _end_of_character(raw, second)
        vocabulary = self._make_vocabulary(raw, first)
        encoded: list[NDArray[Any]] = [raw[:first], raw[first:second], raw[second:]]
        ids: NDArray[Any] = raw
        if not isinstance(vocabulary, ByteVocabulary):
            for n, text in enumerate(encoded):
                parts = vocabulary.encode(iter_text_blocks(text))
                encoded[n] = np.concatenate([*parts, np.empty(0, vocabulary.dtype)])
            ids = np.concatenate(encoded)
        spans: dict[str, TokenSpan] = {}
        start = 0
        for split, split_ids in zip(("train", "valid", "test"), encoded, strict=True):
            spans[split] = TokenSpan(ids, start, start + len(split_ids))
            start += len(split_ids)
        bytes_per_id = vocabulary.bytes_per_id
        if bytes_per_id is not None and self.tokens not in TOKENIZATIONS:
            sizes = [int(span.counts(len(bytes_per_id)) @ bytes_per_id) for span in spans.values()]
            if sum(sizes) != len(raw):  # the tokenizer normalises the text
                bytes_per_id = None
        return TokenStream(spans, self.length, vocabulary, bytes_per_id)

    def _make_vocabulary(self, raw: ByteArray, first: int) -> Vocabulary:
        if self.tokens == "bytes":
            return ByteVocabulary()
        if self.tokens == "chars":  # of all splits, so that no held-out character is unknown
            return CharVocabulary(set().union(*iter_text_blocks(raw)))
        if self.tokens == "bpe":
            return train_bpe(iter_text_blocks(raw[:first]), self.vocab)
        return read_vocabulary(existing_file(self.tokens))

    # --- Batches and metrics ---

    def read_batch(self, index: int, size: int, split: str) -> Batch:
        span: TokenSpan = self.data.spans[split]
        if split == "train":
            rng = make_rng(self.seed, index)
            starts = rng.integers(span.start, span.stop - self.length, size)
        else:
            rows = np.array(strided_batch_indices(self.data.sizes[split], index, size))
            starts = span.first_target - 1 + rows * self.length
        ids = np.zeros((len(starts), self.length), np.int64)
        labels = np.full_like(ids, IGNORE_INDEX)
        for row, start in enumerate(starts.tolist()):  # the last row of a split may be shorter
            crop = span.ids[start : min(start + self.length + 1, span.stop)]
            ids[row, : len(crop) - 1] = crop[:-1]
            labels[row, : len(crop) - 1] = crop[1:]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Negative log-likelihood in nats per token, and in bits per byte of text."""
        has_label = batch.labels != IGNORE_INDEX
        labels = batch.labels[has_label]
        log_probs = logits[has_label].float().log_softmax(-1).gather(-1, labels[:, None])
        nats = -float(to_float64(log_probs).sum())
        sums = {"nats": (nats, len(labels))}
        if self.data.bytes_per_id is not None:
            num_bytes = int(self.data.bytes_per_id[labels.cpu()].sum())
            sums["bits_per_byte"] = (nats / math.log(2), num_bytes)
        return sums

    @property
    def chance(self) -> Mapping[str, float]:
        nats = math.log(self.data.size)
        if self.data.bytes_per_id is None:
            return {"nats": nats}
        train: TokenSpan = self.data.spans["train"]
        num_bytes = float(train.counts(self.data.size) @ self.data.bytes_per_id.numpy())
        return {"nats": nats, "bits_per_byte": nats / math.log(2) / (num_bytes / len(train))}

    @property
    def usage(self) -> ProcessorSpec:
        return ProcessorSpec(tokenizer=self.tokenizer)

    def model(self) -> ModelSpec:
        """Return a causal decoder of four layers with 128 channels, embedding and output weights
        tied.
        """
        return make_small_decoder("text", self.data.size, DEFAULT_SHAPE, table="decoder")


# --- Bytes and text ---


def read_files(paths: Sequence[Path]) -> ByteArray:
    """Concatenate the bytes of text files, all checked to be UTF-8; a single uncompressed file is
    memory-mapped.
    """
    use_memmap = len(paths) == 1 and paths[0].stat().st_size and not is_gzipped(paths[0])
    buffer = bytearray()
    for path in paths:
        for text in read_text_chunks(path):
            buffer += b"" if use_memmap else text.encode()
    if use_memmap:
        return np.memmap(paths[0], np.uint8, "r")
    return np.frombuffer(bytes(buffer), np.uint8)


def iter_text_blocks(raw: ByteArray) -> Iterator[str]:
    """Split a text into blocks that end with a line, or with a character if a line is longer."""
    start = 0
    while start < len(raw):
        block = raw[start : start + BLOCK_BYTES].tobytes()
        if start + BLOCK_BYTES < len(raw):
            end_of_line = block.rfind(b"\n") + 1
            block = block[: end_of_line or _end_of_character(raw, start + BLOCK_BYTES) - start]
        yield block.decode()
        start += len(block)


def _end_of_character(raw: ByteArray, at: int) -> int:
    """Return the first index from `at` on that does not cut a UTF-8 character in two."""
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at
