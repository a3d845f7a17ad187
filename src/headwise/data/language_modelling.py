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
from .example_order import HELD, drawn, shares, swept
from .file_task import Brought, Data, decoder
from .task import IGNORED, Batch, Tally
from .text_files import decoded, file_at, listed, there, zipped
from .vocabulary import Bytes, Chars, Vocabulary, learned, read

ROUNDING = 1e-6  # 1 - 0.9 is a little less than 0.1
SCANNED = 1 << 22  # tokens that are looked at together


@dataclass(frozen=True, eq=False)
class Span:
    """The tokens `start` to `stop` of an array that may lie on disk: anything that slices will do."""

    ids: Any
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def counts(self, size: int) -> NDArray[np.int64]:
        """How often each id stands there, a piece at a time."""
        found = np.zeros(size, np.int64)
        for at in range(self.start, self.stop, SCANNED):
            piece = np.asarray(self.ids[at : min(at + SCANNED, self.stop)])
            found += np.bincount(piece.astype(np.int64), minlength=size)
        return found


class Stream(Data):
    """Training takes crops of `length` tokens from anywhere; held-out splits are cut into rows that ask each token
    once, and a batch has rows from all over.

    The first token of a split is asked with the one before it in view, where there is one in the same array. `widths`
    are the bytes of text that each id stands for, without which bits per byte are not measured. `end` stands behind
    every text, and so before the next.
    """

    def __init__(
        self,
        spans: Mapping[str, Span],
        length: int,
        size: int,
        *,
        vocabulary: Vocabulary | None = None,
        widths: NDArray[np.int64] | None = None,
        end: int | None = None,
    ) -> None:
        self.spans, self.length, self.size, self.vocabulary, self.end = spans, length, size, vocabulary, end
        if len(spans["train"]) <= length:
            have = len(spans["train"])
            raise SpecError(f"the train split has {have} tokens, too few for length={length}; bring more text")
        self.sizes = {split: self._rows_of(split) for split in spans}
        self.sizes["train"] = len(spans["train"]) // length
        if not self.sizes["valid"]:
            raise SpecError(f"of {len(spans['train'])} tokens none are left for validation; give a larger valid=")
        self._widths = None if widths is None else torch.from_numpy(widths)

    def _first(self, split: str) -> int:
        """The first token that is asked: the first of all has none before it."""
        return max(1, self.spans[split].start)

    def _rows_of(self, split: str) -> int:
        return -(-max(0, self.spans[split].stop - self._first(split)) // self.length)

    def batches(self, size: int, split: str) -> int:
        return -(-self.sizes[split] // size)

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        if split == "train":
            return self._crops(index, size, seed)
        first, stop = self._first(split), self.spans[split].stop
        asked = [first + n * self.length for n in swept(self.sizes[split], index, size)]
        return self._rows(split, [(at - 1, min(at + self.length, stop)) for at in asked])

    def _crops(self, index: int, size: int, seed: int) -> Batch:
        span = self.spans["train"]
        starts = drawn(seed, index).integers(span.start, span.stop - self.length, size)
        return self._rows("train", [(int(at), int(at) + self.length + 1) for at in starts])

    def _rows(self, split: str, cuts: list[tuple[int, int]]) -> Batch:
        """Each token of these cuts but the last, and the one after it; nothing is asked behind the end of a split."""
        ids = np.zeros((len(cuts), self.length), np.int64)
        labels = np.full((len(cuts), self.length), IGNORED, np.int64)
        for row, (start, stop) in enumerate(cuts):
            cut = self.spans[split].ids[start:stop]
            ids[row, : len(cut) - 1], labels[row, : len(cut) - 1] = cut[:-1], cut[1:]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> Tally:
        """Nats for each token, and bits for each byte of text that the tokens stand for."""
        asked = batch.labels != IGNORED
        labels = batch.labels[asked]
        chosen = logits[asked].float().log_softmax(-1).gather(-1, labels[:, None])
        nats = -float(chosen.double().sum())
        tally: dict[str, tuple[float, int]] = {"nats": (nats, len(labels))}
        if self._widths is not None:
            count = int(self._widths[labels.cpu()].sum())
            tally["bits_per_byte"] = nats / math.log(2), count
        return tally

    @property
    def chance(self) -> Mapping[str, float]:
        told = {"nats": math.log(self.size)}
        if self._widths is None:
            return told
        train = self.spans["train"]
        width = float(train.counts(self.size) @ self._widths.numpy()) / len(train)  # of a token, on average
        return told | {"bits_per_byte": told["nats"] / math.log(2) / width}

    @property
    def usage(self) -> ProcessorSpec:
        around = () if self.end is None else (self.end,)
        return replace(super().usage, before=around, end=around)

    def model(self) -> ModelSpec:
        return decoder(self.size)


def ranges(counts: Mapping[str, int], shares: tuple[float, float]) -> dict[str, tuple[str, int, int]]:
    """Whose file each split is in, and from where to where: its own, or the end of the one to train on.

    >>> ranges({"train": 10}, (0.2, 0.1))
    {'train': ('train', 0, 7), 'valid': ('train', 7, 9), 'test': ('train', 9, 10)}
    """
    own = {split: (split, 0, count) for split, count in counts.items()}
    if "valid" in counts:
        return own
    valid, test = shares
    count = counts["train"]
    first, second = cuts(count, (valid, 0.0 if "test" in counts else test))
    divided = {"train": ("train", 0, first), "valid": ("train", first, second), "test": ("train", second, count)}
    return divided | {split: own[split] for split in own if split != "train"}


def cuts(count: int, shares: tuple[float, float]) -> tuple[int, int]:
    """Where the splits for validation and test begin; as in nanoGPT, a train split has its whole share."""
    valid, test = shares
    return int(count * (1 - valid - test) + ROUNDING), int(count * (1 - test) + ROUNDING)


# SECTION: Plain text as a language model reads it: a file, a folder, or the standard library's own source.

Raw = NDArray[np.uint8]

STDLIB = "stdlib"
# Tests and what was installed besides are not the library.
OUTSIDE = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
TOKENS = ("bytes", "chars", "bpe")
BLOCK = 1 << 16  # bytes of text that are encoded as one


@dataclass(frozen=True, repr=False)
class Text(Brought):
    """The next token of a text, from `length` of them: its bytes, its characters, or pieces learnt from its beginning.

    `path` is a file, a folder, whose files of these `suffixes` are joined in the order of their names, or "stdlib",
    the source of Python's standard library. The text is split where it stands: the last shares, `valid` and `test` of
    its bytes, are held out. `tokens` may also be the path of a tokenizer.json; `vocab` is the number of pieces that
    tokens="bpe" learns, from the train split alone.

    >>> Text("stdlib", length=32).batch(0, 4).x.shape
    torch.Size([4, 32])
    """

    name: ClassVar[str] = "text"
    path: str
    tokens: str = "bytes"
    vocab: int = 4096
    length: int = 64
    valid: float = HELD
    test: float = HELD
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")

    def check(self) -> None:
        shares(self.valid, self.test)
        if self.length < 1:
            raise SpecError(f"Text(length={self.length}) is no number of tokens; give length=64, say")
        if self.tokens not in TOKENS and not self.tokens.endswith(".json"):
            remedy = suggest(self.tokens, TOKENS)
            raise SpecError(f"Text(tokens={self.tokens!r}) is unknown; {remedy}, or give the path of a tokenizer.json")

    def files(self) -> Sequence[Path]:
        return [*self._texts(), *([] if self.tokens in TOKENS else [file_at(self.tokens)])]

    def _texts(self) -> list[Path]:
        if self.path == STDLIB:
            return listed(Path(sysconfig.get_paths()["stdlib"]), (".py",), OUTSIDE)
        if not (path := there(self.path)).is_dir():
            return [path]
        if not (found := listed(path, self.suffixes)):
            known = ", ".join(self.suffixes)
            raise SpecError(f"{self.path} has no file that ends in {known}; say suffixes=('.c',), or give another path")
        return found

    def read(self) -> Stream:
        raw = gathered(self._texts())
        if not len(raw):
            raise SpecError(f"{self.path} is empty; give a text")
        first, second = (_whole(raw, at) for at in cuts(len(raw), (self.valid, self.test)))
        vocabulary = self._vocabulary(raw, first)
        texts = [raw[:first], raw[first:second], raw[second:]]
        coded = [text if isinstance(vocabulary, Bytes) else _encoded(vocabulary, text) for text in texts]
        ids = raw if isinstance(vocabulary, Bytes) else np.concatenate(coded)
        ends = np.cumsum([len(own) for own in coded]).tolist()
        spans = [Span(ids, start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
        widths, told = vocabulary.widths, len(raw)
        if widths is not None and self.tokens not in TOKENS:
            told = sum(int(span.counts(len(widths)) @ widths) for span in spans)
        if told != len(raw):
            widths = None  # a tokenizer from elsewhere changed the text before it cut it into pieces
        named: dict[str, Span] = dict(zip(("train", "valid", "test"), spans, strict=True))
        return Stream(named, self.length, vocabulary.size, vocabulary=vocabulary, widths=widths)

    def _vocabulary(self, raw: Raw, first: int) -> Vocabulary:
        if self.tokens == "bytes":
            return Bytes()
        if self.tokens == "chars":
            alphabet: set[str] = set()
            for block in blocks(raw):  # of all splits, so that none is unknown
                alphabet |= set(block)
            return Chars(alphabet)
        if self.tokens == "bpe":
            return learned(blocks(raw[:first]), self.vocab)
        return read(file_at(self.tokens))


def gathered(paths: Sequence[Path]) -> Raw:
    """The bytes of files one after the other, all of them text; a single plain file stays where it is."""
    alone = len(paths) == 1 and paths[0].stat().st_size and not zipped(paths[0])
    held = bytearray()
    for path in paths:
        for text in decoded(path):
            held += b"" if alone else text.encode()
    return np.memmap(paths[0], np.uint8, "r") if alone else np.frombuffer(bytes(held), np.uint8)


def blocks(raw: Raw) -> Iterator[str]:
    """A text in pieces that end with a line, or with a character where a line is very long."""
    at = 0
    while at < len(raw):
        piece = raw[at : at + BLOCK].tobytes()
        if at + BLOCK < len(raw):
            piece = piece[: piece.rfind(b"\n") + 1 or _whole(raw, at + BLOCK) - at]
        yield piece.decode()
        at += len(piece)


def _whole(raw: Raw, at: int) -> int:
    """Where the character ends that this place would cut in two."""
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _encoded(vocabulary: Vocabulary, text: Raw) -> NDArray[np.generic]:
    return np.concatenate([*vocabulary.encode(blocks(text)), np.empty(0, vocabulary.dtype)])
