"""Calls of the tokenizers library: its failures, panics included, become errors about one text.

The library is written in Rust. A broken document or an unlucky text makes it panic, which Python sees as a
BaseException that `except Exception` does not catch.

A regular expression or a chain of replacements of a hostile tokenizer can take hours for a short text, and holds the
interpreter while it does. A server therefore encodes texts in a process of its own, which is ended when a text takes
too long or the tokenizer crashes, and fails the one request. It decodes there only if the decoder of the tokenizer has
such parts (`is_bounded_decoder`).
"""

from __future__ import annotations

import json
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from ..errors import SpecError
from ..files import read_text_file
from ..machine.python_processes import python_command

MAX_REASON = 120  # characters of the library's message


@contextmanager
def _panics_as_errors(action: str) -> Iterator[None]:
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise _explain(action, error) from error


def _explain(action: str, error: BaseException) -> SpecError:
    reason = " ".join(str(error).split())[:MAX_REASON]
    return SpecError(f"the tokenizer cannot {action}: {reason}; give another text, or another tokenizer")


def parse_tokenizer(document: str) -> Tokenizer:
    """The tokenizer that a JSON document describes; raises Exception with the reason if it describes none.

    >>> parse_tokenizer("{}")
    Traceback (most recent call last):
    Exception: Model missing. at line 1 column 2
    """
    with _panics_as_errors("be built from its document"):
        return Tokenizer.from_str(document)


def read_tokenizer_file(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json."""
    try:
        return parse_tokenizer(read_text_file(path))
    except (SpecError, OSError):
        raise
    except Exception as error:  # the library raises plain Exception
        raise SpecError(f"{path} is not a tokenizer document: {error}; copy the file again") from None


def encode_tokens(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> Encoding:
    """The tokens of a text; raises SpecError with the library's error as its cause."""
    try:
        with _panics_as_errors("encode this text"):
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except SpecError:
        raise
    except Exception as error:
        raise _explain("encode this text", error) from error


def decode_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, without special tokens."""
    with _panics_as_errors("decode these ids"):
        return tokenizer.decode(list(ids))


MAX_SECONDS = 10.0  # for one text; a million tokens take about one
MAX_ANSWER_BYTES = 2**28  # a million ids with their offsets take about 2**25
WORKER = Path(__file__).with_name("tokenizer_worker.py")
REMEDY = "give another text, or another tokenizer"


class EncodedText(NamedTuple):
    """The ids of a text and their offsets, or begin and end of a character that has none."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    unknown: tuple[int, int] | None = None


# Decoders whose time and memory grow as the text does.
BOUNDED_DECODERS = ("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Strip", "WordPiece")


def is_bounded_decoder(decoder: Any) -> bool:
    """Return whether the decoder of a document needs time and memory in proportion to the text that it decodes.

    A replacement of a regular expression does not, nor a replacement that makes the text longer.

    >>> is_bounded_decoder({"type": "Replace", "pattern": {"String": "_"}, "content": " "})
    True
    >>> is_bounded_decoder({"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""})
    False
    """
    if not decoder:
        return True
    if decoder["type"] == "Sequence":
        return all(map(is_bounded_decoder, decoder["decoders"]))
    if decoder["type"] == "Replace":
        replaced = decoder["pattern"].get("String", "")
        return 0 < len(replaced) >= len(decoder["content"])
    return decoder["type"] in BOUNDED_DECODERS


class TokenizerProcess:
    """Encodes and decodes with the tokenizer of a document, one text after another; callable from any thread.

    The process starts with the first text, and again with the next one after it was ended.
    """

    worker = WORKER  # the script that it runs

    def __init__(self, document: str, max_seconds: float = MAX_SECONDS) -> None:
        self.document, self.max_seconds = document, max_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def encode(self, text: str, specials_as_text: bool) -> EncodedText:
        """Return the ids of a text; raises SpecError if the tokenizer panics, crashes or takes too long."""
        answer = self._ask("encode this text", {"text": text, "specials_as_text": specials_as_text})
        if "unknown" in answer:
            start, stop = answer["unknown"]
            return EncodedText([], [], (start, stop))
        return EncodedText(answer["ids"], [(start, stop) for start, stop in answer["offsets"]])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; raises SpecError as `encode` does."""
        return self._ask("decode these ids", {"ids": list(ids)})["text"]

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            python_command(str(self.worker)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the server, which ends this process
        )
        self._process, self._end = process, weakref.finalize(self, _end_process, process)
        _send(process, self.document)
        return process

    def _ask(self, action: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; raises SpecError, which names the action, for a panic or no answer."""
        with self._lock:
            answer = self._answer(request)
        if "panic" in answer:
            raise SpecError(f"the tokenizer cannot {action}: {' '.join(str(answer['panic']).split())[:120]}; {REMEDY}")
        return answer

    def _answer(self, request: Mapping[str, Any] | None) -> dict[str, Any]:
        late = threading.Event()
        try:
            process = self._process or self._start()
            timer = threading.Timer(self.max_seconds, _end_late, (process, late))
            timer.start()
            try:
                _send(process, request)
                assert process.stdout is not None
                line = process.stdout.readline(MAX_ANSWER_BYTES)
            finally:
                timer.cancel()
                timer.join()
        except OSError:  # the process has ended
            line = b""
        is_whole = line.endswith(b"\n")
        if late.is_set() or not is_whole:  # the timer may have ended the process just after its answer
            self.close()
        if not is_whole:
            reason = "it crashed" if len(line) < MAX_ANSWER_BYTES else f"its answer exceeds {MAX_ANSWER_BYTES:,} bytes"
            return {"panic": f"it took longer than {self.max_seconds:g} s" if late.is_set() else reason}
        return json.loads(line)


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def _end_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # what was written to it cannot be sent any more
                stream.close()
    process.wait()
