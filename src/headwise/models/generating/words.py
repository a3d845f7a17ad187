"""Text as ids, and ids as text, also while they come one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Encoding, Tokenizer

from ...blueprint import ProcessorSpec
from ...errors import SpecError, UnknownToken
from ..transformer import Transformer
from ..usage import check_usage

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


_BUILT: WeakKeyDictionary[Transformer, tuple[ProcessorSpec, Words, Words]] = WeakKeyDictionary()  # reading one takes a while


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
