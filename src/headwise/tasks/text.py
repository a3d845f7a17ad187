"""Plain text as a language model reads it: a file, a folder, or the standard library's own source."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import SpecError, suggest
from .brought import Brought
from .order import HELD, shares
from .reading import decoded, file_at, listed, there, zipped
from .stream import Span, Stream, cuts
from .vocabulary import Bytes, Chars, Vocabulary, learned, read

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
