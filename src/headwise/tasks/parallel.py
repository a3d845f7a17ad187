"""Translations: two aligned files, or one with columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from ..errors import SpecError
from .brought import Brought
from .order import HELD, shares
from .pairs import Corpus, Making, Pair, Pairs
from .reading import file_at, lines


@dataclass(frozen=True, repr=False)
class Parallel(Brought):
    """A target sentence, from its source. `path` is two aligned files (source, target), or one whose `columns`,
    counted from 1 and parted by tabs, hold source and target.

    `valid` and `test` are shares, or files of the same kind as `path`. No source sentence is in two splits. The other
    fields are those of `pairs.Making`.

    >>> Parallel(("train.de", "train.en"), valid=("val.de",))
    Traceback (most recent call last):
    headwise.errors.SpecError: valid=('val.de',) names 1 file; give two, (source, target), or one with columns
    """

    name: ClassVar[str] = "parallel"
    path: str | tuple[str, ...]
    columns: tuple[int, ...] = (1, 2)
    valid: float | str | tuple[str, ...] = HELD
    test: float | str | tuple[str, ...] = HELD
    vocab: int = Making.vocab
    vocabularies: str = Making.vocabularies
    longest: int = Making.longest
    form: str = Making.form

    def check(self) -> None:
        for name in ("path", "valid", "test"):
            said = getattr(self, name)
            if isinstance(said, tuple) and len(said) != 2:
                files = f"names {len(said)} file{'s' * (len(said) != 1)}"
                raise SpecError(f"{name}={said!r} {files}; give two, (source, target), or one with columns")
        if len(self.columns) != 2 or min(self.columns) < 1:
            raise SpecError(f"columns={self.columns!r} are not two counted from 1; give source and target, as (1, 2)")
        shares(*self._shares())
        self._making()

    def _shares(self) -> tuple[float, float]:
        """What is held out for validation and test; where that has files of its own, the usual share."""
        valid, test = (HELD if isinstance(said, (str, tuple)) else said for said in (self.valid, self.test))
        return valid, test

    def _making(self) -> Making:
        return Making(self.vocab, self.vocabularies, self.longest, self.form)

    def files(self) -> Sequence[Path]:
        said = [self.path, self.valid, self.test]
        return [file_at(str(one)) for held in said if not isinstance(held, (int, float)) for one in _both(held)]

    def read(self) -> Pairs:
        held = {"valid": self.valid, "test": self.test}
        own = {name: list(self._pairs(said)) for name, said in held.items() if not isinstance(said, (int, float))}
        for name, pairs in own.items():
            if not pairs:
                raise SpecError(f"{name}={held[name]!r} is empty; give sentences, or a share such as {name}=0.05")
        return Pairs(Corpus.of(self._pairs(self.path), self._shares(), own), self._making())

    def _pairs(self, said: str | tuple[str, ...]) -> Iterator[Pair]:
        paths = [file_at(one) for one in _both(said)]
        return _aligned(*paths) if len(paths) == 2 else _columns(paths[0], self.columns)


def _both(said: str | tuple[str, ...]) -> tuple[str, ...]:
    return said if isinstance(said, tuple) else (said,)


def _aligned(source: Path, target: Path) -> Iterator[Pair]:
    counts = [0, 0]
    for both in zip_longest(lines(source), lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, both, strict=True)]
        if None not in both:
            yield Pair(both[0].strip(), both[1].strip())
    if counts[0] != counts[1]:
        told = f"{source} has {counts[0]} lines, {target} has {counts[1]}"
        raise SpecError(f"{told}; line n of one must be the translation of line n of the other")


def _columns(path: Path, columns: tuple[int, ...]) -> Iterator[Pair]:
    for n, line in enumerate(lines(path), 1):
        cells = line.split("\t")
        if len(cells) < max(columns):
            fact = f"line {n} of {path} has {len(cells)} column{'s' * (len(cells) != 1)}"
            raise SpecError(f"{fact}, but columns={columns} are wanted; part source and target by a tab")
        yield Pair(*(cells[column - 1].strip() for column in columns))
