"""`headwise run --requests`: serve the requests of a file with continuous batching."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from ...kernels.counter_rng import RandomStream as Numbers
from ...models import Transformer
from ...models.generation import BatchingConfig, Engine, RequestStream, make_random_streams
from ...models.generation.decoding_config import DecodingConfig
from ...util.errors import suggest
from ..arguments import parse_bytes, print_note, print_page, to_json
from ..options import UsageError
from .answers import parse_decoding, parse_length
from .inputs import MAX_LINE_BYTES

DEFAULT_MEMORY = "1 GiB"
REQUEST_KEYS = (
    "prompt",
    "max_new_tokens",
    "temperature",
    "seed",
)  # keys of a request besides the fields of DecodingConfig
UNSUPPORTED_OPTIONS = ("beams", "best", "length_penalty", "end")


def answer(model: Transformer, args: Any) -> int:
    """Serve every request; return 2 if one failed."""
    defaults = RequestDefaults(
        parse_length(args),
        args.temperature or 0.0,
        make_random_streams(args.seed, 1)[0].seed,
        parse_decoding(args),
    )
    if defaults.decoding.beams != 1:
        raise UsageError(
            f"--requests does not support --beams {defaults.decoding.beams}; leave one out"
        )
    batching = BatchingConfig(
        **{name: value for name in ("rows", "chunk") if (value := getattr(args, name)) is not None}
    )
    engine = Engine(model, budget=parse_bytes(args.budget or DEFAULT_MEMORY), batching=batching)
    writer = RequestWriter("document" if args.json else "lines")
    streams: dict[int, RequestStream] = {}
    for number, line in _read_request_lines(args.requests):
        try:
            streams[number] = defaults.submit(engine, number, _parse_request(line))
        except (ValueError, OverflowError) as error:
            writer.write_answer({"line": number, "error": " ".join(str(error).split())})
    while streams:
        engine.step()
        for number in [number for number, stream in streams.items() if stream.ended]:
            writer.write_answer(_stream_to_dict(number, streams.pop(number)))
    writer.finish(model, engine)
    return 2 if writer.num_failed else 0


@dataclass(frozen=True)
class RequestDefaults:
    """Options from the command line, used where a request does not set them."""

    max_new_tokens: int
    temperature: float
    seed: int
    decoding: DecodingConfig

    def submit(self, engine: Engine, number: int, request: dict[str, Any]) -> RequestStream:
        """Submit one request; without its own seed it samples from the random stream of its line
        number.
        """
        decoding = {name: value for name, value in request.items() if name not in REQUEST_KEYS}
        if isinstance(decoding.get("stop"), list):
            decoding["stop"] = tuple(decoding["stop"])
        try:
            config = replace(self.decoding, **decoding)
        except TypeError:
            raise ValueError(
                f"{decoding} is not a decoding configuration; write {EXAMPLE_REQUEST}"
            ) from None
        return engine.submit(
            request["prompt"],
            max_new_tokens=request.get("max_new_tokens", self.max_new_tokens),
            temperature=request.get("temperature", self.temperature),
            config=config,
            seed=request.get("seed", Numbers(self.seed, number - 1)),
        )


@dataclass
class RequestWriter:
    """Prints answers: JSON lines as they finish, or with form="document" one document at the end,
    in file order.
    """

    form: str
    num_failed: int = 0
    documents: list[dict[str, Any]] = field(default_factory=list)

    def write_answer(self, answer: dict[str, Any]) -> None:
        """Print or store one answer or error."""
        self.num_failed += "error" in answer
        if self.form == "document":
            self.documents.append(answer)
            return
        print_page(json.dumps(answer))
        sys.stdout.flush()

    def finish(self, model: Transformer, engine: Engine) -> None:
        """Print the measured throughput."""
        report = engine.report()
        if self.form == "document":
            answers = sorted(self.documents, key=lambda answer: answer["line"])
            print_page(
                to_json({"model": model.spec.name, "answers": answers, "summary": report.data})
            )
        else:
            print_note(report)


def _stream_to_dict(number: int, stream: RequestStream) -> dict[str, Any]:
    if stream.error is not None:
        return {"line": number, "error": " ".join(str(stream.error).split())}
    text = {"text": stream.result()} if isinstance(stream.result(), str) else {}
    return {"line": number, **text, "ids": stream.ids, "ended": stream.ended}


def _read_request_lines(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and bytes of non-empty lines of a file or stdin; a line that is too long is
    cut.
    """
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            yield from (
                (number, line)
                for number, line in enumerate(_read_bounded_lines(file), 1)
                if line.strip()
            )
    except OSError as error:
        raise UsageError(
            f"{name!r} cannot be read: {error.strerror}; give a file with one JSON object per line"
        ) from None


def _read_bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        tail = line
        while len(tail) > MAX_LINE_BYTES and not tail.endswith(b"\n"):
            tail = file.readline(MAX_LINE_BYTES + 1)
        yield line


def _parse_request(line: bytes) -> dict[str, Any]:
    """Parse and check one request."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(
            f"the line is longer than {MAX_LINE_BYTES:,} bytes; give one request per line"
        )
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise ValueError(f"the line is not JSON: {reason}; write {EXAMPLE_REQUEST}") from None
    if not isinstance(request, dict) or "prompt" not in request:
        raise ValueError(f"the line has no prompt; write {EXAMPLE_REQUEST}")
    known_keys = [
        *REQUEST_KEYS,
        *(f.name for f in fields(DecodingConfig) if f.name not in UNSUPPORTED_OPTIONS),
    ]
    for name in request:
        if name not in known_keys:
            raise ValueError(f"a request has no {name!r}; {suggest(name, known_keys)}")
    return {name: value for name, value in request.items() if value is not None or name == "prompt"}


EXAMPLE_REQUEST = '{"prompt": "Once upon", "max_new_tokens": 20}'
