"""Text as ids, and ids as text, also while they come one by one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Encoding, Tokenizer

from ..errors import SpecError, UnknownToken
from ..model_spec import ProcessorSpec
from ..models.save_load import check_usage
from ..models.transformer import Transformer

PART = "\ufffd"  # what stands for bytes that are no whole character
PARTS = 3  # bytes of a character that is not whole yet, at most


class Words:
    """What a document of `tokenizers` says; `specials` as in Usage."""

    def __init__(self, document: str, specials: str = "text") -> None:
        self._tokenizer = Tokenizer.from_str(document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._specials = specials
        self._unknown = _unknown(self._tokenizer, json.loads(document)["model"])

    def ids(self, text: str, specials: str | None = None) -> list[int]:
        """The ids of a text, without any that stand before or behind it."""
        return self._encoded(text, specials).ids

    def places(self, text: str, specials: str | None = None) -> list[tuple[int, int]]:
        """Where each of them stands in it."""
        return self._encoded(text, specials).offsets

    def _encoded(self, text: str, specials: str | None) -> Encoding:
        self._tokenizer.encode_special_tokens = (specials or self._specials) == "text"
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # what a tokenizer without a token for the unknown raises has no name of its own
            raise UnknownToken(_strange(text, *self._first_strange(text))) from None
        if self._unknown in found.ids:
            start, stop = found.offsets[found.ids.index(self._unknown)]
            raise UnknownToken(_strange(text, start, stop))
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones left out."""
        return self._tokenizer.decode(list(ids))

    def id(self, token: str) -> int | None:
        """The id of one token, if there is such a token."""
        return self._tokenizer.token_to_id(token)

    def token(self, one: int) -> str:
        """What an id stands for, as the tokenizer writes it."""
        return self._tokenizer.id_to_token(one) or str(one)

    def _first_strange(self, text: str) -> tuple[int, int]:
        for at, char in enumerate(text):
            try:
                self._tokenizer.encode(char, add_special_tokens=False)
            except Exception:  # as above
                return at, at + 1
        return 0, len(text)


def _unknown(tokenizer: Tokenizer, model: Any) -> int | None:
    """The id that stands for whatever is not known."""
    if model.get("byte_fallback"):
        return None
    if (token := model.get("unk_token")) is not None:
        return tokenizer.token_to_id(token)
    return model.get("unk_id")


def _strange(text: str, start: int, stop: int) -> str:
    piece = text[start:stop] if len(text[start:stop]) <= 20 else text[start : start + 20] + "..."
    return f"{piece!r} at place {start} is nothing that the model's tokenizer knows; write it otherwise"


class Telling:
    """Ids as they come, and the text they make; bytes wait until they are a whole character.

    `before` are the ids that stand before the first: some tokenizers write a piece otherwise at the start of a text.
    What is told is never taken back: `text` only grows.
    """

    def __init__(self, words: Words, before: Sequence[int] = ()) -> None:
        self.words, self.text = words, ""
        self._settled, self._open, self._told = list(before), list[int](), 0
        self._known = words.text(self._settled)
        if self._known.endswith(PART):
            self._settled, self._known = [], ""

    @property
    def whole(self) -> bool:
        """Whether no byte waits for others."""
        return not self._open

    def push(self, one: int) -> None:
        """One more id."""
        self._open.append(one)
        new = self._new()
        waiting = min(PARTS, len(new) - len(new.rstrip(PART)))
        self._tell(new, len(new) - waiting)
        if new and not waiting:
            self._settled, self._open, self._told = self._open, [], 0
            self._known = self.words.text(self._settled)

    def close(self) -> None:
        """No more will come: what waits is told as it is."""
        new = self._new()
        self._tell(new, len(new))

    def _new(self) -> str:
        whole = self.words.text([*self._settled, *self._open])
        # What was told stays, even where a tokenizer would now read its bytes otherwise.
        return whole[len(self._known) :] if whole.startswith(self._known) else self.words.text(self._open)

    def _tell(self, new: str, up_to: int) -> None:
        self.text += new[self._told : up_to]
        self._told = max(self._told, up_to)


_BUILT: WeakKeyDictionary[Transformer, tuple[ProcessorSpec, Words, Words]] = (
    WeakKeyDictionary()
)  # reading one takes a while


def words_of(net: Transformer) -> tuple[Words, Words]:
    """How the text that a model reads becomes ids, and how the ids that it writes become text."""
    usage = net.usage
    if net in _BUILT and _BUILT[net][0] is usage:
        return _BUILT[net][1:]
    if usage.tokenizer is None:
        raise SpecError(
            f"{net.described.name} has no tokenizer, so it reads ids alone; give ids, or a tokenizer, as in "
            "net.usage = Usage(tokenizer=document)"
        )
    check_usage(net.described, usage)
    written = Words(usage.tokenizer, usage.specials)
    read = written if usage.source_tokenizer is None else Words(usage.source_tokenizer, usage.specials)
    _BUILT[net] = usage, read, written
    return read, written


# SECTION: What is said behind one prompt: ids and text, up to an end or a stop.


class Answer:
    """Ids that are taken one by one until one ends them, or their text holds what stops it.

    It ends before what ends or stops it. What may still become a stop is not told before that is known: `fresh_ids`
    and `fresh_text` are what was not told yet and will stay. Without a `telling` there are ids alone.

    >>> answer = Answer(ends={2})
    >>> for one in (5, 7, 2, 9):
    ...     answer.take(one)
    >>> answer.ids, answer.over
    ([5, 7], True)
    """

    def __init__(self, ends: Collection[int] = (), stops: Sequence[str] = (), telling: Telling | None = None) -> None:
        self.ids: list[int] = []
        self.over = False
        self._ends, self._stops, self._telling = ends, tuple(stops), telling
        self._searched = 0  # characters in which no stop begins
        self._cut: int | None = None  # where a stop begins
        self._marks: list[int] = []  # how long the text was behind each id; -1 where bytes wait for others
        self._told_ids = self._told_text = 0

    @property
    def text(self) -> str:
        """What was said so far, up to a stop."""
        return "" if self._telling is None else self._telling.text[: self._cut]

    def take(self, one: int) -> None:
        """One more id; nothing more is taken when it is over."""
        if self.over:
            return
        if one in self._ends:
            self.close()
            return
        self.ids.append(one)
        if self._telling is not None:
            self._telling.push(one)
            self._marks.append(len(self._telling.text) if self._telling.whole else -1)
            self._search()

    def close(self) -> None:
        """Nothing more comes."""
        if self.over:
            return
        if self._telling is not None:
            self._telling.close()
            self._search()
        self.over = True

    def _search(self) -> None:
        """Look for the first stop in what was not looked at yet."""
        assert self._telling is not None, "there is no text"
        text = self._telling.text
        found = [at for stop in self._stops if (at := text.find(stop, self._searched)) >= 0]
        if not found:
            self._searched = max(self._searched, len(text) - max(map(len, self._stops), default=1) + 1)
            return
        self._cut, self.over = min(found), True
        within = [n for n, mark in enumerate(self._marks, 1) if 0 <= mark <= self._cut]
        self.ids = self.ids[: max(within, default=0)]

    @property
    def _safe(self) -> int:
        """Characters that stay, whatever comes."""
        text = self.text
        if self.over:
            return len(text)
        ways = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return len(text) - max(ways, default=0)

    def fresh_text(self) -> str:
        """What of the text was not told yet and will stay."""
        first, self._told_text = self._told_text, max(self._told_text, self._safe)
        return self.text[first : self._told_text]

    def fresh_ids(self) -> list[int]:
        """Which of the ids were not told yet and will stay."""
        first, count = self._told_ids, len(self.ids)
        if self._stops and not self.over:
            count = max((n for n, mark in enumerate(self._marks, 1) if 0 <= mark <= self._safe), default=0)
        self._told_ids = max(first, count)
        return self.ids[first : self._told_ids]
