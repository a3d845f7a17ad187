"""A tokenizer as llama2.c keeps it, pieces of text with scores, as a document of `tokenizers` that cuts text alike."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from ..errors import SpecError

SPECIALS = ("<unk>", "<s>", "</s>")  # what the first ids are called elsewhere
BEGIN = 1
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
LONGEST, EACH = struct.Struct("<i"), struct.Struct("<fi")


class Scored(NamedTuple):
    """A piece of text, and how early it is put together: the highest score first."""

    text: str
    score: float


def document(path: Path, count: int) -> str:
    """The tokenizer in a file of so many pieces.

    Text becomes characters, those that are no piece their bytes, with a space before the first; then the two
    neighbours that make the piece of the best score are joined, the leftmost first, until none do.
    """
    pieces = scored(path, count)
    tokenizer = Tokenizer(
        BPE(
            {piece.text: number for number, piece in enumerate(pieces)},
            merges(path, pieces),
            unk_token=SPECIALS[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[BEGIN]} $A", special_tokens=[(SPECIALS[BEGIN], BEGIN)]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer.to_str()


def scored(path: Path, count: int) -> list[Scored]:
    """Every piece with its score, by number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; give the tokenizer of the model") from None
    found, at = list[Scored](), LONGEST.size
    while len(found) < count and at + EACH.size <= len(data):
        score, size = EACH.unpack_from(data, at)
        at += EACH.size
        text = data[at : at + size] if 0 <= size <= len(data) - at else None
        if text is None:
            break
        found.append(Scored(_text(path, text, len(found)), score))
        at += size
    if len(found) < count or at != len(data):
        more = "" if len(found) < count else ", and more follows"
        raise SpecError(f"{path} holds {len(found)} whole pieces{more}, the model has {count}; give its own tokenizer")
    pieces = [Scored(name, 0.0) for name in SPECIALS] + found[len(SPECIALS) :]
    if len({piece.text for piece in pieces}) < count:
        raise SpecError(f"{path} holds a piece twice, and which number it has nobody can say; give another tokenizer")
    return pieces


def merges(path: Path, pieces: Sequence[Scored]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best score first.

    >>> merges(Path("-"), [Scored(text, -n) for n, text in enumerate(("b", "a", "ab", "aba", "ba"))])
    [('a', 'b'), ('a', 'ba'), ('ab', 'a'), ('b', 'a')]
    """
    known = {piece.text for piece in pieces if not BYTE.fullmatch(piece.text)} - set(SPECIALS)
    found, by_score = list[tuple[str, str]](), dict[float, str]()
    for text, score in sorted(pieces, key=lambda piece: -piece.score):
        pairs = [(text[:at], text[at:]) for at in range(1, len(text)) if {text, text[:at], text[at:]} <= known]
        if pairs and (first := by_score.setdefault(score, text)) != text:
            raise SpecError(f"{path}: {first!r} and {text!r} both score {score}; which comes first nobody can say")
        found += pairs
    return found


def _text(path: Path, data: bytes, number: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SpecError(f"{path}: piece {number} is no text; give the tokenizer of the model") from None
