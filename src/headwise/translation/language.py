"""The language in which a command writes: that of --lang or of the locale, and English where Chinese cannot be shown.

A context variable holds it, so that the reports of the library need no argument for it; in Python it is English.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import TextIO

from .sentences import translate

LANGUAGES = ("en", "zh")
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
