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

SPECIAL_PIECES = ("<unk>", "<s>", "</s>")  # what the first ids are called elsewhere
BOS_ID = 1
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
MAX_PIECE_LENGTH, PIECE_HEADER = struct.Struct("<i"), struct.Struct("<fi")


class ScoredPiece(NamedTuple):
    """A piece of text, and how early it is put together: the highest score first."""

    text: str
    score: float


def make_tokenizer_json(path: Path, vocab_size: int) -> str:
    """The tokenizer in a file of so many pieces.

    Text becomes characters, those that are no piece their bytes, with a space before the first; then the two
    neighbours that make the piece of the best score are joined, the leftmost first, until none do.
    """
    pieces = read_pieces(path, vocab_size)
    tokenizer = Tokenizer(
        BPE(
            {piece.text: number for number, piece in enumerate(pieces)},
            find_merges(path, pieces),
            unk_token=SPECIAL_PIECES[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_PIECES[BOS_ID]} $A", special_tokens=[(SPECIAL_PIECES[BOS_ID], BOS_ID)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_PIECES))
    return tokenizer.to_str()


def read_pieces(path: Path, vocab_size: int) -> list[ScoredPiece]:
    """Every piece with its score, by number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; give the tokenizer of the model") from None
    found, at = list[ScoredPiece](), MAX_PIECE_LENGTH.size
    while len(found) < vocab_size and at + PIECE_HEADER.size <= len(data):
        score, size = PIECE_HEADER.unpack_from(data, at)
        at += PIECE_HEADER.size
        text = data[at : at + size] if 0 <= size <= len(data) - at else None
        if text is None:
            break
        found.append(ScoredPiece(_decode_piece(path, text, len(found)), score))
        at += size
    if len(found) < vocab_size or at != len(data):
        more = "" if len(found) < vocab_size else ", and more follows"
        raise SpecError(f"{path} holds {len(found)} whole pieces{more}, the model has {vocab_size}; give its own tokenizer")
    pieces = [ScoredPiece(name, 0.0) for name in SPECIAL_PIECES] + found[len(SPECIAL_PIECES) :]
    if len({piece.text for piece in pieces}) < vocab_size:
        raise SpecError(f"{path} holds a piece twice, and which number it has nobody can say; give another tokenizer")
    return pieces


def find_merges(path: Path, pieces: Sequence[ScoredPiece]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best score first.

    >>> find_merges(Path("-"), [ScoredPiece(text, -n) for n, text in enumerate(("b", "a", "ab", "aba", "ba"))])
    [('a', 'b'), ('a', 'ba'), ('ab', 'a'), ('b', 'a')]
    """
    known = {piece.text for piece in pieces if not BYTE_PIECE.fullmatch(piece.text)} - set(SPECIAL_PIECES)
    found, by_score = list[tuple[str, str]](), dict[float, str]()
    for text, score in sorted(pieces, key=lambda piece: -piece.score):
        pairs = [(text[:at], text[at:]) for at in range(1, len(text)) if {text, text[:at], text[at:]} <= known]
        if pairs and (first := by_score.setdefault(score, text)) != text:
            raise SpecError(f"{path}: {first!r} and {text!r} both score {score}; which comes first nobody can say")
        found += pairs
    return found


def _decode_piece(path: Path, data: bytes, number: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SpecError(f"{path}: piece {number} is no text; give the tokenizer of the model") from None
