"""`headwise run --requests`: the lines of a file answered together, each as it is done."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from ...counting.capacity import bytes_said
from ...counting.devices import Device
from ...draws import Stream as Numbers
from ...engine import Batching, Engine, Predicted, Stream
from ...engine.report import DTYPES
from ...errors import nearest
from ...models import Decoding, Transformer
from ...models.generating import streams_of
from ...models.generating.compiling import TOGETHER
from ..screen import Wrong, document, show
from .lines import LONGEST
from .texts import Reasons, decoding_of, length_of

BUDGET = "1 GiB"
SAID = ("prompt", "max_new_tokens", "temperature", "seed")  # keys of a line, besides the words of Decoding
NOT_HERE = ("beams", "best", "length_penalty", "end", "compile")


def answer(net: Transformer, given: argparse.Namespace) -> int:
    """Answer every line; 2 at the end if one could not be."""
    usual = Usual(length_of(given), given.temperature or 0.0, streams_of(given.seed, 1)[0].seed, decoding_of(given))
    _check(given, usual)
    batching = Batching(**{name: said for name in ("rows", "chunk") if (said := getattr(given, name)) is not None})
    engine = Engine(net, budget=bytes_said(given.budget or BUDGET), batching=batching)
    writer = Writer("document" if given.json else "lines")
    streams: dict[int, Stream] = {}
    for number, raw in _lines(given.requests):
        try:
            streams[number] = usual.submit(engine, number, _said(raw))
        except (ValueError, OverflowError) as error:
            writer.tell({"line": number, "error": " ".join(str(error).split())})
    while streams:
        engine.step()
        for number in [number for number, stream in streams.items() if stream.ended]:
            writer.tell(_told(number, streams.pop(number)))
    writer.end(net, engine)
    return 2 if writer.refused else 0


@dataclass(frozen=True)
class Usual:
    """What a request is asked where its line does not say otherwise."""

    count: int
    temperature: float
    seed: int
    how: Decoding

    def submit(self, engine: Engine, number: int, said: dict[str, Any]) -> Stream:
        """Hand in one line; without a seed of its own it draws from the stream of its number, as a line of stdin."""
        how = {name: value for name, value in said.items() if name not in SAID}
        if isinstance(how.get("stop"), list):
            how["stop"] = tuple(how["stop"])
        try:
            told = replace(self.how, **how)
        except TypeError:
            raise ValueError(f"{how} does not say how tokens are chosen; write {EXAMPLE}") from None
        return engine.submit(
            said["prompt"],
            max_new_tokens=said.get("max_new_tokens", self.count),
            temperature=said.get("temperature", self.temperature),
            how=told,
            seed=said.get("seed", Numbers(self.seed, number - 1)),
        )


@dataclass
class Writer:
    """Where answers go: lines on stdout as they come, or one "document" at the end, in the order of the file."""

    form: str
    refused: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, answer: dict[str, Any]) -> None:
        """One line's answer, or why there is none."""
        self.refused += "error" in answer
        if self.form == "document":
            self.told.append(answer)
            return
        show(json.dumps(answer))
        sys.stdout.flush()

    def end(self, net: Transformer, engine: Engine) -> None:
        """What was measured, beside what is predicted."""
        report = engine.report()
        priced = str(next(net.parameters()).dtype) in DTYPES and report.tokens
        predicted = Predicted.of(net, report, Device.named("here")) if priced else None
        if self.form == "document":
            answers = sorted(self.told, key=lambda answer: answer["line"])
            summary = report.data | {"predicted": predicted and predicted.data}
            show(document({"model": net.described.name, "answers": answers, "summary": summary}))
        else:
            print(report, *([predicted] if predicted else []), sep="\n", file=sys.stderr)


def _told(number: int, stream: Stream) -> dict[str, Any]:
    if stream.error is not None:
        return {"line": number, "error": " ".join(str(stream.error).split())}
    text = {"text": stream.result()} if isinstance(stream.result(), str) else {}
    seconds = {"first_token_seconds": stream.timing.wait, "token_seconds": stream.timing.each}
    return {"line": number, **text, "ids": stream.ids, "ended": stream.ended, **seconds}


def _check(given: argparse.Namespace, usual: Usual) -> None:
    """Refuse what is for other ways to run a model."""
    if given.text is not None or given.score is not None:
        what = "TEXT" if given.text is not None else "--score"
        raise Wrong(f"{what} and --requests cannot be meant together; give one of them")
    if usual.how.beams > 1:
        raise Wrong(f"--beams {usual.how.beams} follows one text at a time; leave out --requests, or give --beams 1")
    if usual.how.compile == "on":
        raise Wrong("--compile on is for rows that are alike, and requests are not; leave out --requests, or --compile")
    if given.compile is not None:
        Reasons().tell(TOGETHER)


def _lines(name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers, of a file or of stdin; of one that is too long the start."""
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            yield from ((number, raw) for number, raw in enumerate(_read(file), 1) if raw.strip())
    except OSError as error:
        raise Wrong(f"{name!r} cannot be read: {error.strerror}; give a file with a JSON object a line") from None


def _read(file: BinaryIO) -> Iterator[bytes]:
    while raw := file.readline(LONGEST + 1):
        rest = raw
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST + 1)
        yield raw


def _said(raw: bytes) -> dict[str, Any]:
    """What a line asks."""
    if len(raw) > LONGEST:
        raise ValueError(f"the line is longer than {LONGEST:,} bytes; give a request a line")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise ValueError(f"the line is no JSON: {reason}; write {EXAMPLE}") from None
    if not isinstance(said, dict) or "prompt" not in said:
        raise ValueError(f"the line has no prompt; write {EXAMPLE}")
    known = [*SAID, *(f.name for f in fields(Decoding) if f.name not in NOT_HERE)]
    for name in said:
        if name not in known:
            raise ValueError(f"a request has no {name!r}; {nearest(name, known)}")
    return {name: value for name, value in said.items() if value is not None or name == "prompt"}


EXAMPLE = '{"prompt": "Once upon", "max_new_tokens": 20}'
