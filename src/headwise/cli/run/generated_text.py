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

from ...generation import PromptBatch, TextGenerator, encode_prompt
from ...generation.compiled_step import CompileDecision, ignore_decision
from ...generation.decoding_config import DecodingConfig
from ...generation.generate import GenerationOutput
from ...models import Transformer
from ...ops.counter_rng import RandomStream
from ..arguments import print_page, to_json
from . import DECODING_OPTIONS
from .inputs import InputLine, InputLines
from .scores import TranslationScores

DEFAULT_NEW_TOKENS = 64  # tokens of an answer, unless said


def answer(net: Transformer, given: argparse.Namespace) -> int:
    """One text as it is written, or line after line."""
    how, count = parse_decoding(given), parse_length(given)
    reasons = CompileNotices()
    tell = ignore_decision if given.compile is None else reasons.print_once
    asked = TextGenerator.of(net, count, given.temperature or 0.0, how, tell)
    seed = RandomStream(secrets.randbits(63) if given.seed is None else given.seed).seed  # one for all lines
    form, scores = "document" if given.json else "lines", TranslationScores.from_file(given.score, given.score_tokenize)
    writer = AnswerWriter(asked, seed, form, scores, reasons)
    read = partial(encode_prompt, net, max_new_tokens=count, window=how.window)
    if given.text is not None:
        writer.write_one(InputLine(1, given.text, read(given.text)))
        writer.finish()
        return 0
    lines = InputLines(given.batch)
    for some in lines:
        writer.write_batch(some, lines.read(some, read))
    writer.finish()
    return 2 if lines.num_failed else 0


def parse_decoding(given: argparse.Namespace) -> DecodingConfig:
    """How tokens are chosen, as the command line says."""
    told = {name: getattr(given, name) for name in (option.replace("-", "_") for option in DECODING_OPTIONS)}
    return DecodingConfig(
        **{name: value for name, value in told.items() if value is not None}, stop=tuple(given.stop or ())
    )


def parse_length(given: argparse.Namespace) -> int:
    """How long an answer may be, as the command line says."""
    return DEFAULT_NEW_TOKENS if given.max_new_tokens is None else given.max_new_tokens


@dataclass
class CompileNotices:
    """Why steps were compiled or not: each is told once, on stderr."""

    messages: list[str] = field(default_factory=list)

    def print_once(self, choice: CompileDecision) -> None:
        """One more choice."""
        if choice.reason not in self.messages:
            self.messages.append(choice.reason)
            print(f"steps are {choice.reason}", file=sys.stderr)


@dataclass
class AnswerWriter:
    """Where answers go: lines on stdout as they come, or one "document" at the end."""

    generation: TextGenerator
    seed: int
    form: str
    scores: TranslationScores | None
    compile_notices: CompileNotices
    documents: list[dict[str, Any]] = field(default_factory=list)

    def write_one(self, line: InputLine[list[int]]) -> None:
        """The answer to one text, as it comes where that can be."""
        if self.form == "document" or self.generation.how.beams > 1:
            self.write_batch([line], [line])
            return
        text = ""
        for piece in self.generation.pieces(_generation_inputs([line]), self._random_streams([line])):
            text += piece
            _write_piece(piece)
        _write_piece("\n")
        self._score(text)

    def write_batch(self, lines: Sequence[InputLine[list[int]]], ready: Sequence[InputLine[list[int]]]) -> None:
        """The answers to some lines, of which those that are `ready` can be answered."""
        found = self.generation.answers(_generation_inputs(ready), self._random_streams(ready)) if ready else []
        best = {line.number: own for line, own in zip(ready, found, strict=True)}
        for line in lines:
            own = best.get(line.number, [])
            self._score(own[0].text if own else "")
            if self.form == "document":
                self.documents.append(_answer_to_dict(line, own))
            else:
                self._write_answer(line, own)

    def finish(self) -> None:
        """Tell what can only be told of all."""
        whole = self.form == "document" and (self.scores is None or self.scores.is_complete)
        if self.form == "document":
            seed = {"seed": self.seed} if self.generation.temperature else {}
            scores = {"scores": self.scores.data} if self.scores and whole else {}
            steps = {"steps": self.compile_notices.messages} if self.compile_notices.messages else {}
            print_page(
                to_json({"model": self.generation.net.spec.name, **seed, **steps, "answers": self.documents, **scores})
            )
        if self.scores and not whole:
            print(self.scores, file=sys.stderr)

    def _write_answer(self, line: InputLine[list[int]], own: Sequence[GenerationOutput]) -> None:
        for said in own:
            text = re.sub(r"[\r\n]+", " ", said.text or "")  # a line is answered by a line
            print_page(text if self.generation.how.best == 1 else f"{line.number}\t{said.score:.4f}\t{text}")
        if not own:
            print_page("" if self.generation.how.best == 1 else f"{line.number}\t\t")
        sys.stdout.flush()

    def _score(self, text: str | None) -> None:
        if self.scores:
            self.scores.hypotheses.append(re.sub(r"[\r\n]+", " ", text or ""))

    def _random_streams(self, lines: Sequence[InputLine[list[int]]]) -> list[RandomStream]:
        return [RandomStream(self.seed, line.number - 1) for line in lines] if self.generation.temperature else []


def _generation_inputs(lines: Sequence[InputLine[list[int]]]) -> PromptBatch:
    return PromptBatch([line.read for line in lines if line.read is not None], "text", "together")


def _answer_to_dict(line: InputLine[list[int]], own: Sequence[GenerationOutput]) -> dict[str, Any]:
    head = {"line": line.number, "prompt": line.text}
    if line.error:
        return head | {"error": line.error}
    best = [{name: value for name, value in said._asdict().items() if value is not None} for said in own]
    first = {name: value for told in best[:1] for name, value in told.items()}
    return head | first | ({"best": best} if best[1:] else {})


def _write_piece(piece: str) -> None:
    """A piece of a line, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
