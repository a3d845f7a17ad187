"""Calls of the tokenizers library: its failures, panics included, become errors about one text.

The library is written in Rust. A broken document or an unlucky text makes it panic, which Python
sees as a BaseException that `except Exception` does not catch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from ..util.errors import SpecError
from ..util.files import read_text_file

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
    return SpecError(
        f"the tokenizer cannot {action}: {reason}; give another text, or another tokenizer"
    )


def parse_tokenizer(document: str) -> Tokenizer:
    """The tokenizer that a JSON document describes; raises Exception with the reason if it
    describes none.

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
        raise SpecError(
            f"{path} is not a tokenizer document: {error}; copy the file again"
        ) from None


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
