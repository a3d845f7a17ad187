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

from ...costs.roofline import Device
from ...costs.serving_capacity import parse_bytes
from ...errors import suggest
from ...generation import make_random_streams
from ...generation.compiled_step import MIXED_REQUESTS
from ...generation.decoding_config import DecodingConfig
from ...models import Transformer
from ...ops.counter_rng import RandomStream as Numbers
from ...serving import BatchingConfig, Engine, RequestStream, ThroughputPrediction
from ...serving.metrics import DTYPE_NAMES
from ..arguments import UsageError, print_page, to_json
from .generated_text import CompileNotices, parse_decoding, parse_length
from .inputs import MAX_LINE_BYTES

DEFAULT_MEMORY = "1 GiB"
REQUEST_KEYS = ("prompt", "max_new_tokens", "temperature", "seed")  # keys of a line, besides the words of Decoding
UNSUPPORTED_OPTIONS = ("beams", "best", "length_penalty", "end", "compile")


def answer(net: Transformer, given: argparse.Namespace) -> int:
    """Answer every line; 2 at the end if one could not be."""
    usual = RequestDefaults(
        parse_length(given), given.temperature or 0.0, make_random_streams(given.seed, 1)[0].seed, parse_decoding(given)
    )
    _check_request_options(given, usual)
    batching = BatchingConfig(
        **{name: said for name in ("rows", "chunk") if (said := getattr(given, name)) is not None}
    )
    engine = Engine(net, budget=parse_bytes(given.budget or DEFAULT_MEMORY), batching=batching)
    writer = RequestWriter("document" if given.json else "lines")
    streams: dict[int, RequestStream] = {}
    for number, raw in _read_request_lines(given.requests):
        try:
            streams[number] = usual.submit(engine, number, _parse_request(raw))
        except (ValueError, OverflowError) as error:
            writer.write_answer({"line": number, "error": " ".join(str(error).split())})
    while streams:
        engine.step()
        for number in [number for number, stream in streams.items() if stream.ended]:
            writer.write_answer(_stream_to_dict(number, streams.pop(number)))
    writer.finish(net, engine)
    return 2 if writer.num_failed else 0


@dataclass(frozen=True)
class RequestDefaults:
    """What a request is asked where its line does not say otherwise."""

    max_new_tokens: int
    temperature: float
    seed: int
    decoding: DecodingConfig

    def submit(self, engine: Engine, number: int, said: dict[str, Any]) -> RequestStream:
        """Hand in one line; without a seed of its own it draws from the stream of its number, as a line of stdin."""
        how = {name: value for name, value in said.items() if name not in REQUEST_KEYS}
        if isinstance(how.get("stop"), list):
            how["stop"] = tuple(how["stop"])
        try:
            told = replace(self.decoding, **how)
        except TypeError:
            raise ValueError(f"{how} does not say how tokens are chosen; write {EXAMPLE_REQUEST}") from None
        return engine.submit(
            said["prompt"],
            max_new_tokens=said.get("max_new_tokens", self.max_new_tokens),
            temperature=said.get("temperature", self.temperature),
            config=told,
            seed=said.get("seed", Numbers(self.seed, number - 1)),
        )


@dataclass
class RequestWriter:
    """Where answers go: lines on stdout as they come, or one "document" at the end, in the order of the file."""

    form: str
    num_failed: int = 0
    documents: list[dict[str, Any]] = field(default_factory=list)

    def write_answer(self, answer: dict[str, Any]) -> None:
        """One line's answer, or why there is none."""
        self.num_failed += "error" in answer
        if self.form == "document":
            self.documents.append(answer)
            return
        print_page(json.dumps(answer))
        sys.stdout.flush()

    def finish(self, net: Transformer, engine: Engine) -> None:
        """What was measured, beside what is predicted."""
        report = engine.report()
        priced = str(next(net.parameters()).dtype) in DTYPE_NAMES and report.tokens
        predicted = ThroughputPrediction.of(net, report, Device.from_name("here")) if priced else None
        if self.form == "document":
            answers = sorted(self.documents, key=lambda answer: answer["line"])
            summary = report.data | {"predicted": predicted and predicted.data}
            print_page(to_json({"model": net.spec.name, "answers": answers, "summary": summary}))
        else:
            print(report, *([predicted] if predicted else []), sep="\n", file=sys.stderr)


def _stream_to_dict(number: int, stream: RequestStream) -> dict[str, Any]:
    if stream.error is not None:
        return {"line": number, "error": " ".join(str(stream.error).split())}
    text = {"text": stream.result()} if isinstance(stream.result(), str) else {}
    seconds = {"first_token_seconds": stream.timing.wait, "token_seconds": stream.timing.each}
    return {"line": number, **text, "ids": stream.ids, "ended": stream.ended, **seconds}


def _check_request_options(given: argparse.Namespace, usual: RequestDefaults) -> None:
    """Refuse what is for other ways to run a model."""
    if given.text is not None or given.score is not None:
        what = "TEXT" if given.text is not None else "--score"
        raise UsageError(f"{what} and --requests cannot be meant together; give one of them")
    if usual.decoding.beams > 1:
        raise UsageError(
            f"--beams {usual.decoding.beams} follows one text at a time; leave out --requests, or give --beams 1"
        )
    if usual.decoding.compile == "on":
        raise UsageError(
            "--compile on is for rows that are alike, and requests are not; leave out --requests, or --compile"
        )
    if given.compile is not None:
        CompileNotices().print_once(MIXED_REQUESTS)


def _read_request_lines(name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers, of a file or of stdin; of one that is too long the start."""
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            yield from ((number, raw) for number, raw in enumerate(_read_bounded_lines(file), 1) if raw.strip())
    except OSError as error:
        raise UsageError(f"{name!r} cannot be read: {error.strerror}; give a file with a JSON object a line") from None


def _read_bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    while raw := file.readline(MAX_LINE_BYTES + 1):
        rest = raw
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield raw


def _parse_request(raw: bytes) -> dict[str, Any]:
    """What a line asks."""
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES:,} bytes; give a request a line")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise ValueError(f"the line is no JSON: {reason}; write {EXAMPLE_REQUEST}") from None
    if not isinstance(said, dict) or "prompt" not in said:
        raise ValueError(f"the line has no prompt; write {EXAMPLE_REQUEST}")
    known = [*REQUEST_KEYS, *(f.name for f in fields(DecodingConfig) if f.name not in UNSUPPORTED_OPTIONS)]
    for name in said:
        if name not in known:
            raise ValueError(f"a request has no {name!r}; {suggest(name, known)}")
    return {name: value for name, value in said.items() if value is not None or name == "prompt"}


EXAMPLE_REQUEST = '{"prompt": "Once upon", "max_new_tokens": 20}'
