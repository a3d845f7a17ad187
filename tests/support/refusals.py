"""Tables of calls that are refused, in text files: `expression -> words .. words` a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def refused_calls(path: Path) -> list[Any]:
    """The lines of a table as parameters: an expression, and words of its error."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert lines, f"{path.name} is empty"
    cases = []
    for line in lines:
        does, _, words = line.rpartition(" -> ")
        assert does, f"{path.name}: {line!r} is not: expression -> words"
        assert words.strip(), f"{path.name}: {line!r} names no words"
        cases.append(pytest.param(does, words, id=does))
    return cases


def refused_cases(test_file: str, section: str, names: dict[str, Any], count: int = 1) -> list[Any]:
    """The lines below `# section` in refused.txt beside a test file, as parameters: the `count`
    values of the expression, and the pattern of its error.
    """
    text = Path(test_file).with_name("refused.txt").read_text("utf-8")
    lines = text.partition(f"\n# {section}\n")[2].partition("\n\n")[0].splitlines()
    assert lines, f"refused.txt has no section {section}"
    cases = []
    for line in lines:
        expression, _, pattern = line.rpartition(" -> ")
        value = eval(expression, names)
        values = value if count > 1 else [value]
        cases.append(pytest.param(*values, pattern, id=expression[:60]))
    return cases


def check_refused(does: str, words: str, kind: type[Exception], names: dict[str, Any]) -> None:
    """An expression ends in one error of one line whose message holds these words in their order."""
    with pytest.raises(kind) as caught:
        eval(does, names)
    message = str(caught.value)
    assert has_words(words, message), message
    assert "\n" not in message


def has_words(words: str, text: str) -> bool:
    """True if a text holds these words in their order; " .. " stands between them."""
    return bool(re.search(".*".join(re.escape(word) for word in words.split(" .. ")), text))
