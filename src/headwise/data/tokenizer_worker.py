"""Script of a process that encodes and decodes for `tokenizer_calls`; it imports nothing of headwise.

It reads a tokenizer document as one line of JSON, then one request a line, and answers each with one line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tokenizers import Tokenizer

MAX_MEMORY_BYTES = 4 * 2**30


def answer_request(tokenizer: Tokenizer, request: dict[str, Any]) -> dict[str, Any]:
    """Return the text of ids; or ids and offsets of a text, or its first character that has none; or a panic."""
    try:
        if "ids" in request:
            return {"text": tokenizer.decode(request["ids"])}
    except BaseException as error:
        return {"panic": str(error)}
    tokenizer.encode_special_tokens = request["specials_as_text"]
    text = request["text"]
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return {"ids": encoding.ids, "offsets": encoding.offsets}
    except Exception:  # the library raises plain Exception for a text without an unknown token
        return {"unknown": find_unknown_char(tokenizer, text)}
    except BaseException as error:
        return {"panic": str(error)}


def find_unknown_char(tokenizer: Tokenizer, text: str) -> tuple[int, int]:
    """Return begin and end of the first character that cannot be encoded alone, or of the text."""
    for at, char in enumerate(text):
        try:
            tokenizer.encode(char, add_special_tokens=False)
        except Exception:
            return at, at + 1
    return 0, len(text)


def limit_memory() -> None:
    """End this process when it needs more than `MAX_MEMORY_BYTES`, on systems that can."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Answer requests until stdin is closed."""
    limit_memory()
    tokenizer = Tokenizer.from_str(json.loads(sys.stdin.readline()))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer_request(tokenizer, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
