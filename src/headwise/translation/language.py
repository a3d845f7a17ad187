"""The language in which a command writes: that of --lang or of the locale, and English where Chinese cannot be shown.

A context variable holds it, so that the reports of the library need no argument for it; in Python it is English.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import TextIO

from .sentences import SEPARATORS, translate

LANGUAGES = ("en", "zh")
ITEM_SEPARATORS = {"en": ", ", "zh": "\u3001"}
LOCALE_NAMES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides
OPTION = "--lang"
SAMPLE = "\u4e2d\u6587"  # the word for Chinese, in Chinese
_language: ContextVar[str] = ContextVar("language", default="en")


def current_language() -> str:
    """The language of texts that are made now: "en", or "zh" inside `use_language("zh")`."""
    return _language.get()


@contextmanager
def use_language(language: str) -> Iterator[None]:
    """Make texts in this language.

    >>> with use_language("zh"):
    ...     localise("the text is empty")
    '文本为空'
    """
    if language not in LANGUAGES:
        raise ValueError(f"there is no language {language!r}; use one of {', '.join(LANGUAGES)}")
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def localise(text: str) -> str:
    """The text in the current language, with its spaces at both ends; English if the catalogue has no translation.

    >>> localise("the text is empty")
    'the text is empty'
    """
    words = text.strip()
    if current_language() == "en" or not words:
        return text
    before, _, after = text.partition(words)
    return f"{before}{translate(words) or words}{after}"


def join_items(items: Iterable[str]) -> str:
    """The items of a list in one text, separated as in the current language.

    >>> with use_language("zh"):
    ...     join_items(["1", "7", "13"])
    '1、7、13'
    """
    return ITEM_SEPARATORS[current_language()].join(items)


def join_clauses(clauses: Iterable[str], separator: str = ", ") -> str:
    """The parts of a sentence in one text; a comma, colon or semicolon between them is that of the current language.

    >>> join_clauses(["3 hold", "1 is wrong"])
    '3 hold, 1 is wrong'
    >>> with use_language("zh"):
    ...     join_clauses(["a", "b"], "; ") == "a\uff1bb"
    True
    """
    return (dict(SEPARATORS)[separator] if current_language() == "zh" else separator).join(clauses)


def choose_language(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """The language that --lang names in the arguments of a command; without it, that of the locale.

    >>> choose_language(["cost", "mha", "--lang", "zh"], {}), choose_language(["cost"], {"LANG": "zh_CN.UTF-8"})
    ('zh', 'zh')
    >>> choose_language(["cost", "--lang=en"], {"LANG": "zh_CN.UTF-8"}), choose_language([], {"LANG": "de_DE.UTF-8"})
    ('en', 'en')
    """
    words = " ".join(argv).replace(f"{OPTION}=", f"{OPTION} ").split()
    for option, value in pairwise(words):
        if option == OPTION and value in LANGUAGES:
            return value
    locale = next(filter(None, map(environment.get, LOCALE_NAMES)), "")
    return "zh" if locale.lower().startswith("zh") else "en"


def can_show_chinese(stream: TextIO) -> bool:
    """Whether the encoding of a stream has Chinese characters."""
    try:
        SAMPLE.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
