"""The language of the texts of `learn` and `demo`, and their short phrases in Chinese.

The sentences of entries are in the TOML files next to the code, in both languages. `words.toml` has
the labels of figures and pages, by their English text with `#` instead of every number.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

LANGUAGES = ("en", "zh")
SAMPLE = "\u4e2d\u6587"  # the word for Chinese, in Chinese
NUMBER = re.compile(r"\d+(?:\.\d+)?")
SEPARATORS = {", ": "\uff0c", ": ": "\uff1a", "; ": "\uff1b"}  # between clauses
_language: ContextVar[str] = ContextVar("language", default="en")


def current_language() -> str:
    """Return the language of texts that are made now."""
    return _language.get()


@contextmanager
def use_language(language: str) -> Iterator[None]:
    """Make texts in this language.

    >>> with use_language("zh"):
    ...     print(localise("head 3"), join_items(["1", "7"]))
    头 3 1、7
    """
    if language not in LANGUAGES:
        raise ValueError(f"there is no language {language!r}; use one of {', '.join(LANGUAGES)}")
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


@cache
def read_phrases() -> dict[str, str]:
    """Return the Chinese phrases by their English text."""
    text = Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["phrases"]


def localise(text: str) -> str:
    """Return a phrase in the current language; English if it has no translation."""
    if current_language() == "en":
        return text
    translation = read_phrases().get(NUMBER.sub("#", text))
    if translation is None:
        return text
    for number in NUMBER.findall(text):
        translation = translation.replace("#", number, 1)
    return translation


def join_items(items: Iterable[str]) -> str:
    """Join the items of a list, separated as in the current language."""
    return (", " if current_language() == "en" else "\u3001").join(items)


def join_clauses(clauses: Iterable[str], separator: str = ", ") -> str:
    """Join the parts of a sentence by a comma, colon or semicolon of the current language."""
    if current_language() == "zh":
        separator = SEPARATORS[separator]
    return separator.join(clauses)
