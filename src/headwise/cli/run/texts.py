"""Answers that are written: behind a text, or in the place of a source."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...draws import Stream
from ...models import Decoding, Said, Transformer
from ...models.generating import Asked, Given, row_of
from ...models.generating.compiling import Choice, unheard
from ..screen import document, show
from . import DECODING
from .lines import Line, Lines
from .scores import Scores

LENGTH = 64  # tokens of an answer, unless said


def answer(net: Transformer, given: argparse.Namespace) -> int:
    """One text as it is written, or line after line."""
    how, count = decoding_of(given), length_of(given)
    reasons = Reasons()
    tell = unheard if given.compile is None else reasons.tell
    asked = Asked.of(net, count, given.temperature or 0.0, how, tell)
    seed = Stream(secrets.randbits(63) if given.seed is None else given.seed).seed  # one for all lines
    form, scores = "document" if given.json else "lines", Scores.of(given.score, given.score_tokenize)
    writer = Writer(asked, seed, form, scores, reasons)
    read = partial(row_of, net, count=count, window=how.window)
    if given.text is not None:
        writer.one(Line(1, given.text, read(given.text)))
        writer.end()
        return 0
    lines = Lines(given.batch)
    for some in lines:
        writer.several(some, lines.read(some, read))
    writer.end()
    return 2 if lines.refused else 0


def decoding_of(given: argparse.Namespace) -> Decoding:
    """How tokens are chosen, as the command line says."""
    told = {name: getattr(given, name) for name in (option.replace("-", "_") for option in DECODING)}
    return Decoding(**{name: value for name, value in told.items() if value is not None}, stop=tuple(given.stop or ()))


def length_of(given: argparse.Namespace) -> int:
    """How long an answer may be, as the command line says."""
    return LENGTH if given.max_new_tokens is None else given.max_new_tokens


@dataclass
class Reasons:
    """Why steps were compiled or not: each is told once, on stderr."""

    told: list[str] = field(default_factory=list)

    def tell(self, choice: Choice) -> None:
        """One more choice."""
        if choice.reason not in self.told:
            self.told.append(choice.reason)
            print(f"steps are {choice.reason}", file=sys.stderr)


@dataclass
class Writer:
    """Where answers go: lines on stdout as they come, or one "document" at the end."""

    asked: Asked
    seed: int
    form: str
    scores: Scores | None
    reasons: Reasons
    told: list[dict[str, Any]] = field(default_factory=list)

    def one(self, line: Line[list[int]]) -> None:
        """The answer to one text, as it comes where that can be."""
        if self.form == "document" or self.asked.how.beams > 1:
            self.several([line], [line])
            return
        text = ""
        for piece in self.asked.pieces(_given([line]), self._streams([line])):
            text += piece
            _write(piece)
        _write("\n")
        self._score(text)

    def several(self, lines: Sequence[Line[list[int]]], ready: Sequence[Line[list[int]]]) -> None:
        """The answers to some lines, of which those that are `ready` can be answered."""
        found = self.asked.answers(_given(ready), self._streams(ready)) if ready else []
        best = {line.number: own for line, own in zip(ready, found, strict=True)}
        for line in lines:
            own = best.get(line.number, [])
            self._score(own[0].text if own else "")
            if self.form == "document":
                self.told.append(_data(line, own))
            else:
                self._tell(line, own)

    def end(self) -> None:
        """Tell what can only be told of all."""
        whole = self.form == "document" and (self.scores is None or self.scores.whole)
        if self.form == "document":
            seed = {"seed": self.seed} if self.asked.temperature else {}
            scores = {"scores": self.scores.data} if self.scores and whole else {}
            steps = {"steps": self.reasons.told} if self.reasons.told else {}
            show(document({"model": self.asked.net.described.name, **seed, **steps, "answers": self.told, **scores}))
        if self.scores and not whole:
            print(self.scores, file=sys.stderr)

    def _tell(self, line: Line[list[int]], own: Sequence[Said]) -> None:
        for said in own:
            text = re.sub(r"[\r\n]+", " ", said.text or "")  # a line is answered by a line
            show(text if self.asked.how.best == 1 else f"{line.number}\t{said.score:.4f}\t{text}")
        if not own:
            show("" if self.asked.how.best == 1 else f"{line.number}\t\t")
        sys.stdout.flush()

    def _score(self, text: str | None) -> None:
        if self.scores:
            self.scores.said.append(re.sub(r"[\r\n]+", " ", text or ""))

    def _streams(self, lines: Sequence[Line[list[int]]]) -> list[Stream]:
        return [Stream(self.seed, line.number - 1) for line in lines] if self.asked.temperature else []


def _given(lines: Sequence[Line[list[int]]]) -> Given:
    return Given([line.read for line in lines if line.read is not None], "text", "together")


def _data(line: Line[list[int]], own: Sequence[Said]) -> dict[str, Any]:
    head = {"line": line.number, "prompt": line.text}
    if line.wrong:
        return head | {"error": line.wrong}
    best = [{name: value for name, value in said._asdict().items() if value is not None} for said in own]
    first = {name: value for told in best[:1] for name, value in told.items()}
    return head | first | ({"best": best} if best[1:] else {})


def _write(piece: str) -> None:
    """A piece of a line, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
