"""Parsed sentences as CoNLL-U writes them (universaldependencies.org/format)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import SpecError

NUM_COLUMNS = 10
ROOT_RELATION = "root"


@dataclass(frozen=True)
class ParsedSentence:
    """A text, where each word stands in it, and arcs (dependent, governor, relation) between words, from 0.

    Relations lose what stands behind their colon: "nsubj:pass" is "nsubj". The root has no arc.
    """

    text: str
    words: tuple[str, ...]
    word_spans: tuple[tuple[int, int], ...]
    dependencies: tuple[tuple[int, int, str], ...]


def read_conllu(lines: Iterable[str], source: str = "CoNLL-U") -> Iterator[ParsedSentence]:
    """The sentences of a file.

    >>> rows = [
    ...     "# text = Dogs bark",
    ...     "1\\tDogs\\t_\\t_\\t_\\t_\\t2\\tnsubj\\t_\\t_",
    ...     "2\\tbark\\t_\\t_\\t_\\t_\\t0\\troot\\t_\\t_",
    ... ]
    >>> next(read_conllu(rows))
    Sentence(text='Dogs bark', words=('Dogs', 'bark'), spans=((0, 4), (5, 9)), arcs=((0, 1, 'nsubj'),))
    """
    rows: list[list[str]] = []
    text, first = "", 1
    for number, line in enumerate([*lines, ""], 1):
        if line.startswith("#"):
            name, _, value = line[1:].partition("=")
            text = value.strip() if name.strip() == "text" else text
        elif line.strip():
            rows.append(_split_columns(line, f"{source}, line {number}"))
        elif rows:
            yield _parse_sentence(text, rows, f"{source}, sentence at line {first}")
            rows, text = [], ""
        first = number + 1 if not rows else first


def _split_columns(line: str, where: str) -> list[str]:
    row = line.rstrip("\n").split("\t")
    if len(row) != NUM_COLUMNS:
        raise SpecError(f"{where}: a row has {len(row)} columns, not {NUM_COLUMNS}; part them by tabs")
    return row


def _parse_sentence(text: str, rows: Sequence[Sequence[str]], where: str) -> ParsedSentence:
    words: list[str] = []
    pieces: list[tuple[str, int]] = []  # how each stretch is written, and of how many words it is
    arcs: list[tuple[int, int, str]] = []
    covered = 0
    for row in rows:
        if "." in row[0]:  # a word that is not written
            continue
        if "-" in row[0]:
            first, last = (_parse_number(part, where) for part in row[0].split("-", 1))
            pieces.append((row[1], last - first + 1))
            covered = last
            continue
        number = _parse_number(row[0], where)
        if number != len(words) + 1:
            raise SpecError(f"{where}: word {number} follows word {len(words)}; number them 1, 2, 3")
        words.append(row[1])
        if number > covered:
            pieces.append((row[1], 1))
        governor = _parse_number(row[6], where)
        if governor:
            arcs.append((number - 1, governor - 1, row[7].partition(":")[0]))
    if wrong := [one for one in arcs if not one[1] < len(words)]:
        raise SpecError(f"{where}: word {wrong[0][0] + 1} hangs on word {wrong[0][1] + 1} of {len(words)}")
    text = text or " ".join(piece for piece, _ in pieces)
    return ParsedSentence(text, tuple(words), tuple(_find_word_spans(text, words, pieces, where)), tuple(arcs))


def _find_word_spans(text: str, words: Sequence[str], pieces: Sequence[tuple[str, int]], where: str) -> Iterator[tuple[int, int]]:
    """Where each word stands; words that are written as one stand one after another in it, or all in all of it."""
    at, number = 0, 0
    for piece, count in pieces:
        start = text.find(piece, at)
        if start < 0:
            raise SpecError(f"{where}: {piece!r} does not stand in its text behind place {at}; correct # text =")
        own = words[number : number + count]
        inner = start
        for word in own:
            whole = "".join(own) != piece
            yield (start, start + len(piece)) if whole else (inner, inner + len(word))
            inner += len(word)
        at, number = start + len(piece), number + count


def _parse_number(said: str, where: str) -> int:
    if not said.isdigit():
        raise SpecError(f"{where}: {said!r} is no number of a word; give one of 0 and more")
    return int(said)
