"""Text as ids, and ids as text, also while they come one by one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Encoding, Tokenizer

from ..errors import SpecError, UnknownToken
from ..model_spec import ProcessorSpec
from ..models.save_load import check_processor
from ..models.transformer import Transformer

REPLACEMENT_CHAR = "\ufffd"  # what stands for bytes that are no whole character
MAX_PENDING_BYTES = 3  # bytes of a character that is not whole yet, at most


class ModelTokenizer:
    """What a document of `tokenizers` says; `specials` as in Usage."""

    def __init__(self, document: str, specials: str = "text") -> None:
        self._tokenizer = Tokenizer.from_str(document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._specials = specials
        self._unknown_id = _find_unknown_id(self._tokenizer, json.loads(document)["model"])

    def ids(self, text: str, specials: str | None = None) -> list[int]:
        """The ids of a text, without any that stand before or behind it."""
        return self._encode(text, specials).ids

    def places(self, text: str, specials: str | None = None) -> list[tuple[int, int]]:
        """Where each of them stands in it."""
        return self._encode(text, specials).offsets

    def _encode(self, text: str, specials: str | None) -> Encoding:
        self._tokenizer.encode_special_tokens = (specials or self._specials) == "text"
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # what a tokenizer without a token for the unknown raises has no name of its own
            raise UnknownToken(_unknown_text_message(text, *self._first_unknown_char(text))) from None
        if self._unknown_id in found.ids:
            start, stop = found.offsets[found.ids.index(self._unknown_id)]
            raise UnknownToken(_unknown_text_message(text, start, stop))
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones left out."""
        return self._tokenizer.decode(list(ids))

    def id(self, token: str) -> int | None:
        """The id of one token, if there is such a token."""
        return self._tokenizer.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """What an id stands for, as the tokenizer writes it."""
        return self._tokenizer.id_to_token(token_id) or str(token_id)

    def _first_unknown_char(self, text: str) -> tuple[int, int]:
        for at, char in enumerate(text):
            try:
                self._tokenizer.encode(char, add_special_tokens=False)
            except Exception:  # as above
                return at, at + 1
        return 0, len(text)


def _find_unknown_id(tokenizer: Tokenizer, model: Any) -> int | None:
    """The id that stands for whatever is not known."""
    if model.get("byte_fallback"):
        return None
    if (token := model.get("unk_token")) is not None:
        return tokenizer.token_to_id(token)
    return model.get("unk_id")


def _unknown_text_message(text: str, start: int, stop: int) -> str:
    piece = text[start:stop] if len(text[start:stop]) <= 20 else text[start : start + 20] + "..."
    return f"{piece!r} at place {start} is nothing that the model's tokenizer knows; write it otherwise"


class IncrementalDetokenizer:
    """Ids as they come, and the text they make; bytes wait until they are a whole character.

    `before` are the ids that stand before the first: some tokenizers write a piece otherwise at the start of a text.
    What is told is never taken back: `text` only grows.
    """

    def __init__(self, tokenizer: ModelTokenizer, context_ids: Sequence[int] = ()) -> None:
        self.words, self.text = tokenizer, ""
        self._settled, self._pending, self._num_emitted = list(context_ids), list[int](), 0
        self._settled_text = tokenizer.text(self._settled)
        if self._settled_text.endswith(REPLACEMENT_CHAR):
            self._settled, self._settled_text = [], ""

    @property
    def whole(self) -> bool:
        """Whether no byte waits for others."""
        return not self._pending

    def append(self, token_id: int) -> None:
        """One more id."""
        self._pending.append(token_id)
        new = self._new_text()
        waiting = min(MAX_PENDING_BYTES, len(new) - len(new.rstrip(REPLACEMENT_CHAR)))
        self._emit(new, len(new) - waiting)
        if new and not waiting:
            self._settled, self._pending, self._num_emitted = self._pending, [], 0
            self._settled_text = self.words.text(self._settled)

    def close(self) -> None:
        """No more will come: what waits is told as it is."""
        new = self._new_text()
        self._emit(new, len(new))

    def _new_text(self) -> str:
        whole = self.words.text([*self._settled, *self._pending])
        # What was told stays, even where a tokenizer would now read its bytes otherwise.
        return (
            whole[len(self._settled_text) :] if whole.startswith(self._settled_text) else self.words.text(self._pending)
        )

    def _emit(self, new: str, up_to: int) -> None:
        self.text += new[self._num_emitted : up_to]
        self._num_emitted = max(self._num_emitted, up_to)


_TOKENIZERS: WeakKeyDictionary[Transformer, tuple[ProcessorSpec, ModelTokenizer, ModelTokenizer]] = (
    WeakKeyDictionary()
)  # reading one takes a while


def load_tokenizers(net: Transformer) -> tuple[ModelTokenizer, ModelTokenizer]:
    """How the text that a model reads becomes ids, and how the ids that it writes become text."""
    usage = net.usage
    if net in _TOKENIZERS and _TOKENIZERS[net][0] is usage:
        return _TOKENIZERS[net][1:]
    if usage.tokenizer is None:
        raise SpecError(
            f"{net.spec.name} has no tokenizer, so it reads ids alone; give ids, or a tokenizer, as in "
            "net.usage = Usage(tokenizer=document)"
        )
    check_processor(net.spec, usage)
    written = ModelTokenizer(usage.tokenizer, usage.specials)
    read = written if usage.source_tokenizer is None else ModelTokenizer(usage.source_tokenizer, usage.specials)
    _TOKENIZERS[net] = usage, read, written
    return read, written


# --- What is said behind one prompt --------------------------------------------------------------------


class Completion:
    """Ids that are taken one by one until one ends them, or their text holds what stops it.

    It ends before what ends or stops it. What may still become a stop is not told before that is known: `fresh_ids`
    and `fresh_text` are what was not told yet and will stay. Without a `telling` there are ids alone.

    >>> answer = Completion(end_ids={2})
    >>> for one in (5, 7, 2, 9):
    ...     answer.take(one)
    >>> answer.ids, answer.over
    ([5, 7], True)
    """

    def __init__(
        self,
        end_ids: Collection[int] = (),
        stop_texts: Sequence[str] = (),
        detokenizer: IncrementalDetokenizer | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.over = False
        self._end_ids, self._stop_texts, self._detokenizer = end_ids, tuple(stop_texts), detokenizer
        self._searched = 0  # characters in which no stop begins
        self._stop_start: int | None = None  # where a stop begins
        self._text_lengths: list[int] = []  # how long the text was behind each id; -1 where bytes wait for others
        self._num_taken_ids = self._num_taken_chars = 0

    @property
    def text(self) -> str:
        """What was said so far, up to a stop."""
        return "" if self._detokenizer is None else self._detokenizer.text[: self._stop_start]

    def take(self, token_id: int) -> None:
        """One more id; nothing more is taken when it is over."""
        if self.over:
            return
        if token_id in self._end_ids:
            self.close()
            return
        self.ids.append(token_id)
        if self._detokenizer is not None:
            self._detokenizer.append(token_id)
            self._text_lengths.append(len(self._detokenizer.text) if self._detokenizer.whole else -1)
            self._find_stop()

    def close(self) -> None:
        """Nothing more comes."""
        if self.over:
            return
        if self._detokenizer is not None:
            self._detokenizer.close()
            self._find_stop()
        self.over = True

    def _find_stop(self) -> None:
        """Look for the first stop in what was not looked at yet."""
        assert self._detokenizer is not None, "there is no text"
        text = self._detokenizer.text
        found = [at for stop in self._stop_texts if (at := text.find(stop, self._searched)) >= 0]
        if not found:
            self._searched = max(self._searched, len(text) - max(map(len, self._stop_texts), default=1) + 1)
            return
        self._stop_start, self.over = min(found), True
        within = [n for n, mark in enumerate(self._text_lengths, 1) if 0 <= mark <= self._stop_start]
        self.ids = self.ids[: max(within, default=0)]

    @property
    def _stable_length(self) -> int:
        """Characters that stay, whatever comes."""
        text = self.text
        if self.over:
            return len(text)
        ways = (n for stop in self._stop_texts for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return len(text) - max(ways, default=0)

    def take_new_text(self) -> str:
        """What of the text was not told yet and will stay."""
        first, self._num_taken_chars = self._num_taken_chars, max(self._num_taken_chars, self._stable_length)
        return self.text[first : self._num_taken_chars]

    def take_new_ids(self) -> list[int]:
        """Which of the ids were not told yet and will stay."""
        first, count = self._num_taken_ids, len(self.ids)
        if self._stop_texts and not self.over:
            count = max(
                (n for n, mark in enumerate(self._text_lengths, 1) if 0 <= mark <= self._stable_length), default=0
            )
        self._num_taken_ids = max(first, count)
        return self.ids[first : self._num_taken_ids]
