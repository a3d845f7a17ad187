"""Text without end: tokens in a row, of which the next one is asked."""

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

ROUNDING_SLACK = 1e-6  # 1 - 0.9 is a little less than 0.1
SCAN_TOKENS = 1 << 22  # tokens that are looked at together


@dataclass(frozen=True, eq=False)
class TokenSpan:
    """The tokens `start` to `stop` of an array that may lie on disk: anything that slices will do."""

    ids: Any
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each id stands there, a piece at a time."""
        found = np.zeros(vocab_size, np.int64)
        for at in range(self.start, self.stop, SCAN_TOKENS):
            piece = np.asarray(self.ids[at : min(at + SCAN_TOKENS, self.stop)])
            found += np.bincount(piece.astype(np.int64), minlength=vocab_size)
        return found


class TokenStreamDataset(Dataset):
    """Training takes crops of `length` tokens from anywhere; held-out splits are cut into rows that ask each token
    once, and a batch has rows from all over.

    The first token of a split is asked with the one before it in view, where there is one in the same array. `widths`
    are the bytes of text that each id stands for, without which bits per byte are not measured. `end` stands behind
    every text, and so before the next.
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
        self.spans, self.length, self.size, self.vocabulary, self.end = spans, length, vocab_size, vocabulary, end_id
        if len(spans["train"]) <= length:
            have = len(spans["train"])
            raise SpecError(f"the train split has {have} tokens, too few for length={length}; bring more text")
        self.sizes = {split: self._num_rows(split) for split in spans}
        self.sizes["train"] = len(spans["train"]) // length
        if not self.sizes["valid"]:
            raise SpecError(f"of {len(spans['train'])} tokens none are left for validation; give a larger valid=")
        self._bytes_per_id = None if bytes_per_id is None else torch.from_numpy(bytes_per_id)

    def _first_target(self, split: str) -> int:
        """The first token that is asked: the first of all has none before it."""
        return max(1, self.spans[split].start)

    def _num_rows(self, split: str) -> int:
        return -(-max(0, self.spans[split].stop - self._first_target(split)) // self.length)

    def batches(self, size: int, split: str) -> int:
        return -(-self.sizes[split] // size)

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        if split == "train":
            return self._random_crops(index, size, seed)
        first, stop = self._first_target(split), self.spans[split].stop
        asked = [first + n * self.length for n in strided_batch_indices(self.sizes[split], index, size)]
        return self._next_token_batch(split, [(at - 1, min(at + self.length, stop)) for at in asked])

    def _random_crops(self, index: int, size: int, seed: int) -> Batch:
        span = self.spans["train"]
        starts = make_rng(seed, index).integers(span.start, span.stop - self.length, size)
        return self._next_token_batch("train", [(int(at), int(at) + self.length + 1) for at in starts])

    def _next_token_batch(self, split: str, cuts: list[tuple[int, int]]) -> Batch:
        """Each token of these cuts but the last, and the one after it; nothing is asked behind the end of a split."""
        ids = np.zeros((len(cuts), self.length), np.int64)
        labels = np.full((len(cuts), self.length), IGNORE_INDEX, np.int64)
        for row, (start, stop) in enumerate(cuts):
            cut = self.spans[split].ids[start:stop]
            ids[row, : len(cut) - 1], labels[row, : len(cut) - 1] = cut[:-1], cut[1:]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Nats for each token, and bits for each byte of text that the tokens stand for."""
        asked = batch.labels != IGNORE_INDEX
        labels = batch.labels[asked]
        chosen = logits[asked].float().log_softmax(-1).gather(-1, labels[:, None])
        nats = -float(chosen.double().sum())
        tally: dict[str, tuple[float, int]] = {"nats": (nats, len(labels))}
        if self._bytes_per_id is not None:
            count = int(self._bytes_per_id[labels.cpu()].sum())
            tally["bits_per_byte"] = nats / math.log(2), count
        return tally

    @property
    def chance(self) -> Mapping[str, float]:
        told = {"nats": math.log(self.size)}
        if self._bytes_per_id is None:
            return told
        train = self.spans["train"]
        width = float(train.counts(self.size) @ self._bytes_per_id.numpy()) / len(train)  # of a token, on average
        return told | {"bits_per_byte": told["nats"] / math.log(2) / width}

    @property
    def usage(self) -> ProcessorSpec:
        around = () if self.end is None else (self.end,)
        return replace(super().usage, before=around, end=around)

    def model(self) -> ModelSpec:
        return make_language_model(self.size)


def split_ranges(counts: Mapping[str, int], shares: tuple[float, float]) -> dict[str, tuple[str, int, int]]:
    """Whose file each split is in, and from where to where: its own, or the end of the one to train on.

    >>> split_ranges({"train": 10}, (0.2, 0.1))
    {'train': ('train', 0, 7), 'valid': ('train', 7, 9), 'test': ('train', 9, 10)}
    """
    own = {split: (split, 0, count) for split, count in counts.items()}
    if "valid" in counts:
        return own
    valid, test = shares
    count = counts["train"]
    first, second = split_points(count, (valid, 0.0 if "test" in counts else test))
    divided = {"train": ("train", 0, first), "valid": ("train", first, second), "test": ("train", second, count)}
    return divided | {split: own[split] for split in own if split != "train"}


def split_points(count: int, shares: tuple[float, float]) -> tuple[int, int]:
    """Where the splits for validation and test begin; as in nanoGPT, a train split has its whole share."""
    valid, test = shares
    return int(count * (1 - valid - test) + ROUNDING_SLACK), int(count * (1 - test) + ROUNDING_SLACK)


# --- Plain text as a language model reads it -----------------------------------------------------------

ByteArray = NDArray[np.uint8]

STDLIB = "stdlib"
# Tests and what was installed besides are not the library.
SKIPPED_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
TOKENIZATIONS = ("bytes", "chars", "bpe")
BLOCK_BYTES = 1 << 16  # bytes of text that are encoded as one


@dataclass(frozen=True, repr=False)
class TextTask(FileTask):
    """The next token of a text, from `length` of them: its bytes, its characters, or pieces learnt from its beginning.

    `path` is a file, a folder, whose files of these `suffixes` are joined in the order of their names, or "stdlib",
    the source of Python's standard library. The text is split where it stands: the last shares, `valid` and `test` of
    its bytes, are held out. `tokens` may also be the path of a tokenizer.json; `vocab` is the number of pieces that
    tokens="bpe" learns, from the train split alone.

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
            raise SpecError(f"Text(length={self.length}) is no number of tokens; give length=64, say")
        if self.tokens not in TOKENIZATIONS and not self.tokens.endswith(".json"):
            remedy = suggest(self.tokens, TOKENIZATIONS)
            raise SpecError(f"Text(tokens={self.tokens!r}) is unknown; {remedy}, or give the path of a tokenizer.json")

    def files(self) -> Sequence[Path]:
        return [*self._text_files(), *([] if self.tokens in TOKENIZATIONS else [existing_file(self.tokens)])]

    def _text_files(self) -> list[Path]:
        if self.path == STDLIB:
            return list_files(Path(sysconfig.get_paths()["stdlib"]), (".py",), SKIPPED_FOLDERS)
        if not (path := existing_path(self.path)).is_dir():
            return [path]
        if not (found := list_files(path, self.suffixes)):
            known = ", ".join(self.suffixes)
            raise SpecError(f"{self.path} has no file that ends in {known}; say suffixes=('.c',), or give another path")
        return found

    def read(self) -> TokenStreamDataset:
        raw = read_files(self._text_files())
        if not len(raw):
            raise SpecError(f"{self.path} is empty; give a text")
        first, second = (_end_of_character(raw, at) for at in split_points(len(raw), (self.valid, self.test)))
        vocabulary = self._make_vocabulary(raw, first)
        texts = [raw[:first], raw[first:second], raw[second:]]
        coded = [text if isinstance(vocabulary, ByteVocabulary) else _encode_text(vocabulary, text) for text in texts]
        ids = raw if isinstance(vocabulary, ByteVocabulary) else np.concatenate(coded)
        ends = np.cumsum([len(own) for own in coded]).tolist()
        spans = [TokenSpan(ids, start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
        widths, told = vocabulary.bytes_per_id, len(raw)
        if widths is not None and self.tokens not in TOKENIZATIONS:
            told = sum(int(span.counts(len(widths)) @ widths) for span in spans)
        if told != len(raw):
            widths = None  # a tokenizer from elsewhere changed the text before it cut it into pieces
        named: dict[str, TokenSpan] = dict(zip(("train", "valid", "test"), spans, strict=True))
        return TokenStreamDataset(named, self.length, vocabulary.size, vocabulary=vocabulary, bytes_per_id=widths)

    def _make_vocabulary(self, raw: ByteArray, first: int) -> Vocabulary:
        if self.tokens == "bytes":
            return ByteVocabulary()
        if self.tokens == "chars":
            alphabet: set[str] = set()
            for block in iter_text_blocks(raw):  # of all splits, so that none is unknown
                alphabet |= set(block)
            return CharVocabulary(alphabet)
        if self.tokens == "bpe":
            return train_bpe(iter_text_blocks(raw[:first]), self.vocab)
        return read_vocabulary(existing_file(self.tokens))


def read_files(paths: Sequence[Path]) -> ByteArray:
    """The bytes of files one after the other, all of them text; a single plain file stays where it is."""
    alone = len(paths) == 1 and paths[0].stat().st_size and not is_gzipped(paths[0])
    held = bytearray()
    for path in paths:
        for text in read_text_chunks(path):
            held += b"" if alone else text.encode()
    return np.memmap(paths[0], np.uint8, "r") if alone else np.frombuffer(bytes(held), np.uint8)


def iter_text_blocks(raw: ByteArray) -> Iterator[str]:
    """A text in pieces that end with a line, or with a character where a line is very long."""
    at = 0
    while at < len(raw):
        piece = raw[at : at + BLOCK_BYTES].tobytes()
        if at + BLOCK_BYTES < len(raw):
            piece = piece[: piece.rfind(b"\n") + 1 or _end_of_character(raw, at + BLOCK_BYTES) - at]
        yield piece.decode()
        at += len(piece)


def _end_of_character(raw: ByteArray, at: int) -> int:
    """Where the character ends that this place would cut in two."""
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _encode_text(vocabulary: Vocabulary, text: ByteArray) -> NDArray[np.generic]:
    return np.concatenate([*vocabulary.encode(iter_text_blocks(text)), np.empty(0, vocabulary.dtype)])
