"""The language in which a command writes: that of --lang or of the locale, and English where
Chinese cannot be shown.

A context variable holds it, so that the reports of the library need no argument for it; in Python
it is English.

Commands translate what they print: reports, errors, warnings, reasons, notes and progress. The page
asks for the translation of the sentences that it shows; an exported file holds those of what it
shows. The catalogue `sentences_zh.toml` has one entry for each sentence, or for the part of it
before or after "; " or ". ", with `{}` in the place of every value.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

CATALOGUE = Path(__file__).with_name("sentences_zh.toml")
# Fields of answers whose strings are sentences; other strings are names, tokens and texts of the
# user.
FIELDS = frozenset(
    ["capture", "evidence", "missing", "note", "notes", "reason", "skipped", "warnings"]
)
MAX_SENTENCE = 2_000  # characters; longer ones stay as they are
MAX_SENTENCES = 500  # that one request may ask for
MAX_REMEMBERED = 4096  # translations
UNKNOWN = "?"  # of a sentence that was not asked for yet
FULL_STOP = "\u3002"
ENGLISH = re.compile(r"(?<![\w.])[a-z]{2,} [a-z]{2,}")  # two words in a row
CODE = re.compile("`[^`]*`")
PART_END = re.compile(r"[.;] |;$")  # in a value it shows that the sentence has parts
NAMES = re.compile(r"[\w.'-]+(, [\w.'-]+)+")  # a list of names to choose from
# Where a sentence is divided, and what joins the translated parts.
SEPARATORS = (
    (". ", FULL_STOP),
    ("; ", "\uff1b"),
    (": ", "\uff1a"),
    (", ", "\uff0c"),
    (" and ", "\u548c"),
)


class Template(NamedTuple):
    """A sentence with values: the texts around its values, and its translation."""

    literals: tuple[str, ...]
    translation: str

    def match(self, sentence: str) -> list[str] | None:
        """The values in a sentence of this form; None for another sentence.

        >>> Template(("use a text of ", " tokens"), "").match("use a text of 8 tokens")
        ['8']
        """
        first, *inner, last = self.literals
        begin, end = len(first), len(sentence) - len(last)
        if begin > end or not (sentence.startswith(first) and sentence.endswith(last)):
            return None
        values: list[str] = []
        for literal in inner:
            place = sentence.find(literal, begin, end)
            if place < 0:
                return None
            values.append(sentence[begin:place])
            begin = place + len(literal)
        return [*values, sentence[begin:end]]


# Both are filled when they are first needed.
_catalogue: dict[str, str] = {}
_templates: list[Template] = []


def read_catalogue() -> Mapping[str, str]:
    """All sentences of the catalogue with their translations."""
    if not _catalogue:
        for section in tomllib.loads(CATALOGUE.read_text(encoding="utf-8")).values():
            _catalogue.update(section)
    return _catalogue


def read_templates() -> Sequence[Template]:
    """The sentences with values, those with most text of their own first."""
    if not _templates:
        templates = (
            Template(tuple(key.split("{}")), text)
            for key, text in read_catalogue().items()
            if "{}" in key
        )
        _templates.extend(sorted(templates, key=lambda template: -sum(map(len, template.literals))))
    return _templates


_translations: dict[
    str, str | None
] = {}  # of the last sentences, because a page asks for the same ones again


def translate(sentence: str) -> str | None:
    """A sentence in Chinese; None if the catalogue has neither it nor all of its parts.

    >>> translate("the text is empty")
    '文本为空'
    >>> translate("The cat sat on the mat.")
    """
    if len(sentence) > MAX_SENTENCE:
        return None
    text = _translations.get(sentence, UNKNOWN)
    if text is UNKNOWN:
        text = _translate(sentence)
        if len(_translations) >= MAX_REMEMBERED:
            _translations.clear()
        _translations[sentence] = text
    return text


def _translate(sentence: str) -> str | None:
    if sentence.endswith("."):
        text = translate(sentence[:-1])
        return None if text is None else f"{text}{FULL_STOP}"
    forms = dict.fromkeys((sentence, sentence[:1].lower() + sentence[1:]))
    exact = filter(None, (_translate_whole(form, values_may_be_english=False) for form in forms))
    whole = filter(None, (_translate_whole(form, values_may_be_english=True) for form in forms))
    return next(exact, None) or _by_parts(sentence) or next(whole, None)


def _translate_whole(sentence: str, *, values_may_be_english: bool) -> str | None:
    """The translation of a sentence with its values; they are names and numbers unless they may be
    English.
    """
    if text := read_catalogue().get(sentence):
        return text.replace("{{", "{").replace("}}", "}")
    for template in read_templates():
        values = template.match(sentence)
        if values is not None and not any(PART_END.search(value) for value in values):
            texts = [
                _translate_value(value, number, template) for number, value in enumerate(values)
            ]
            if values_may_be_english or not any(ENGLISH.search(text) for text in texts):
                return template.translation.format(*texts)
    return None


def _translate_value(value: str, number: int, template: Template) -> str:
    """A value of a sentence; commands and lists of names stay as they are.

    >>> translate("see headwise heads --help")
    '见 `headwise heads --help`'
    """
    is_code = any(f"{{{number}}}" in code for code in CODE.findall(template.translation))
    return value if is_code or NAMES.fullmatch(value) else translate(value) or value


def _by_parts(sentence: str) -> str | None:
    """The translation of a sentence by that of its parts; names, which have no space, stay as they
    are.
    """
    for separator, joint in SEPARATORS:
        parts = sentence.split(separator)
        if len(parts) > 1:
            texts = [translate(part) for part in parts]
            names = [
                text is None and " " not in part for part, text in zip(parts, texts, strict=True)
            ]
            if any(texts) and all(
                text or is_name for text, is_name in zip(texts, names, strict=True)
            ):
                return joint.join(text or part for part, text in zip(parts, texts, strict=True))
    return None


def translate_all(sentences: Iterable[str]) -> dict[str, str]:
    """The translations that there are, by sentence."""
    pairs = ((sentence, translate(sentence)) for sentence in sentences)
    return {sentence: text for sentence, text in pairs if text is not None}


def iter_sentences(answer: Any, is_sentence: bool = False) -> Iterator[str]:
    """All strings in those fields of an answer that hold sentences.

    >>> list(iter_sentences({"name": "a", "warnings": ["b"], "sites": [{"reason": "c"}]}))
    ['b', 'c']
    """
    if isinstance(answer, str):
        if is_sentence and answer:
            yield answer
    elif isinstance(answer, Mapping):
        for name, part in answer.items():
            yield from iter_sentences(part, is_sentence or name in FIELDS)
    elif isinstance(answer, (list, tuple)):
        for part in answer:
            yield from iter_sentences(part, is_sentence)


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
    """The text in the current language, with its spaces at both ends; English if the catalogue has
    no translation.

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
    """The parts of a sentence in one text; a comma, colon or semicolon between them is that of the
    current language.

    >>> join_clauses(["3 hold", "1 is wrong"])
    '3 hold, 1 is wrong'
    >>> with use_language("zh"):
    ...     join_clauses(["a", "b"], "; ") == "a\uff1bb"
    True
    """
    return (dict(SEPARATORS)[separator] if current_language() == "zh" else separator).join(clauses)


def choose_language(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """The language that --lang names in the arguments of a command; without it, that of the locale.

    >>> (
    ...     choose_language(["cost", "mha", "--lang", "zh"], {}),
    ...     choose_language(["cost"], {"LANG": "zh_CN.UTF-8"}),
    ... )
    ('zh', 'zh')
    >>> (
    ...     choose_language(["cost", "--lang=en"], {"LANG": "zh_CN.UTF-8"}),
    ...     choose_language([], {"LANG": "de_DE.UTF-8"}),
    ... )
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
