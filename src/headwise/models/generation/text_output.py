"""Tokenize prompts, and detokenize outputs as their ids arrive, including stop texts."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Encoding

from ...util.errors import SpecError, UnknownToken
from ..model_spec import ProcessorSpec
from ..save_load import check_processor
from ..transformer import Transformer
from ..vocabulary import decode_tokens, encode_tokens, parse_tokenizer

REPLACEMENT_CHAR = "\ufffd"  # what tokenizers print for an incomplete character
MAX_PENDING_BYTES = 3  # most bytes that an incomplete UTF-8 character can have


class ModelTokenizer:
    """Wraps a `tokenizers` document (its JSON text); `parse_special` as in `ProcessorSpec`."""

    def __init__(self, document: str, parse_special: bool = False) -> None:
        self.document: Any = json.loads(document)
        self._tokenizer = parse_tokenizer(document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._parse_special = parse_special
        model = self.document["model"]
        self._unknown_id: int | None = None
        if not model.get("byte_fallback"):
            token = model.get("unk_token")
            self._unknown_id = model.get("unk_id") if token is None else self.id(token)

    @property
    def unknown_id(self) -> int | None:
        """Id of the token of unknown text; None if there is none, or bytes instead of it."""
        return self._unknown_id

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def ids(self, text: str, parse_special: bool | None = None) -> list[int]:
        """Return the ids of a text, without the ids that surround it."""
        return self._encode(text, parse_special).ids

    def places(self, text: str, parse_special: bool | None = None) -> list[tuple[int, int]]:
        """Return the character offsets (start, stop) of each token of `ids`."""
        return self._encode(text, parse_special).offsets

    def _encode(self, text: str, parse_special: bool | None) -> Encoding:
        parse = self._parse_special if parse_special is None else parse_special
        self._tokenizer.encode_special_tokens = not parse
        try:
            encoded = encode_tokens(self._tokenizer, text, add_special_tokens=False)
        except SpecError as error:
            # a panic, and not a text without an unknown token
            if not isinstance(error.__cause__, Exception):
                raise
            start, stop = self._first_unknown_char(text)
        else:
            if self._unknown_id not in encoded.ids:
                return encoded
            start, stop = encoded.offsets[encoded.ids.index(self._unknown_id)]
        piece = text[start:stop]
        piece = piece if len(piece) <= 20 else piece[:20] + "..."
        raise UnknownToken(
            f"cannot tokenize {piece!r} at character {start}: it is not in the vocabulary; write "
            "it differently"
        )

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return decode_tokens(self._tokenizer, ids)

    def id(self, token: str) -> int | None:
        """Return the id of a token, or None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Return the token of an id as the tokenizer writes it."""
        return self._tokenizer.id_to_token(token_id) or str(token_id)

    def _first_unknown_char(self, text: str) -> tuple[int, int]:
        for at, char in enumerate(text):
            try:
                encode_tokens(self._tokenizer, char, add_special_tokens=False)
            except SpecError:  # see _encode
                return at, at + 1
        return 0, len(text)


class IncrementalDetokenizer:
    """Decodes ids to text as they arrive; bytes of an incomplete character are held back.

    `context_ids` are the ids before the first one: some tokenizers decode a token differently at
    the start of a text. `text` only grows; emitted characters never change.
    """

    def __init__(self, tokenizer: ModelTokenizer, context_ids: Sequence[int] = ()) -> None:
        self.words = tokenizer
        self.text = ""
        self._settled, self._pending, self._num_emitted = list(context_ids), list[int](), 0
        self._settled_text = tokenizer.text(self._settled)
        if self._settled_text.endswith(REPLACEMENT_CHAR):
            self._settled = []
            self._settled_text = ""

    @property
    def whole(self) -> bool:
        """True if no incomplete character is pending."""
        return not self._pending

    def append(self, token_id: int) -> None:
        """Add one id."""
        self._pending.append(token_id)
        new = self._new_text()
        waiting = min(MAX_PENDING_BYTES, len(new) - len(new.rstrip(REPLACEMENT_CHAR)))
        self._emit(new, len(new) - waiting)
        if new and not waiting:
            self._settled = self._pending
            self._pending = []
            self._num_emitted = 0
            self._settled_text = self.words.text(self._settled)

    def close(self) -> None:
        """End the input and emit pending bytes as they are."""
        if self._pending:
            new = self._new_text()
            self._emit(new, len(new))

    def _new_text(self) -> str:
        """Return the text of the pending ids; if the tokenizer fails on them, they are dropped."""
        try:
            decoded = self.words.text([*self._settled, *self._pending])
            # Emitted text stays, even if the tokenizer now decodes its bytes differently.
            if decoded.startswith(self._settled_text):
                return decoded[len(self._settled_text) :]
            return self.words.text(self._pending)
        except SpecError:
            self._pending = []
            raise

    def _emit(self, new: str, up_to: int) -> None:
        self.text += new[self._num_emitted : up_to]
        self._num_emitted = max(self._num_emitted, up_to)


_TOKENIZERS: WeakKeyDictionary[
    Transformer, tuple[ProcessorSpec, ModelTokenizer, ModelTokenizer]
] = WeakKeyDictionary()  # cached because parsing a tokenizer is slow


def load_tokenizers(net: Transformer) -> tuple[ModelTokenizer, ModelTokenizer]:
    """Return the tokenizers of the model's source and output; they are the same unless the source
    has its own.
    """
    usage = net.usage
    if net in _TOKENIZERS and _TOKENIZERS[net][0] is usage:
        return _TOKENIZERS[net][1:]
    if usage.tokenizer is None:
        raise SpecError(
            f"{net.spec.name} has no tokenizer, so it only takes ids; give ids, or set "
            "net.usage = hw.ProcessorSpec(tokenizer=document)"
        )
    check_processor(net.spec, usage)
    output_tokenizer = ModelTokenizer(usage.tokenizer, usage.parse_special)
    source_tokenizer = output_tokenizer
    if usage.source_tokenizer is not None:
        source_tokenizer = ModelTokenizer(usage.source_tokenizer, usage.parse_special)
    _TOKENIZERS[net] = usage, source_tokenizer, output_tokenizer
    return source_tokenizer, output_tokenizer


# --- the output for one prompt --------------------------------------------------------------------


class Completion:
    """Collects the ids of one output until an end id arrives or the text contains a stop text.

    The end id and the stop text are not part of the output. Text that may still become a stop text
    is held back: `take_new_ids` and `take_new_text` return what is new and final. Text needs a
    detokenizer.

    >>> completion = Completion(end_ids={2})
    >>> for token_id in (5, 7, 2, 9):
    ...     completion.take(token_id)
    >>> completion.ids, completion.over
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
        self._end_ids = end_ids
        self._detokenizer = detokenizer
        self._stops = [_StopMatcher(stop) for stop in stop_texts]
        self._searched = 0  # number of characters that the matchers have read
        self._stop_start: int | None = None  # character at which the stop text begins
        # text length after each id; -1 after an incomplete character
        self._text_lengths: list[int] = []
        self._num_taken_ids = self._num_taken_chars = 0

    @property
    def text(self) -> str:
        """The text so far, up to a stop text."""
        return "" if self._detokenizer is None else self._detokenizer.text[: self._stop_start]

    def take(self, token_id: int) -> None:
        """Add one id; ignored once the output is over."""
        if self.over:
            return
        if token_id in self._end_ids:
            self.close()
            return
        self.ids.append(token_id)
        if self._detokenizer is not None:
            self._detokenizer.append(token_id)
            self._text_lengths.append(
                len(self._detokenizer.text) if self._detokenizer.whole else -1
            )
            self._find_stop()

    def close(self) -> None:
        """End the output."""
        if self.over:
            return
        if self._detokenizer is not None:
            self._detokenizer.close()
            self._find_stop()
        self.over = True

    def _find_stop(self) -> None:
        """Find the first stop text in the part that was not searched yet."""
        assert self._detokenizer is not None, "there is no text"
        new = self._detokenizer.text[self._searched :]
        ends = [(matcher, matcher.find_end(new)) for matcher in self._stops]
        starts = [
            self._searched + end - len(matcher.stop) for matcher, end in ends if end is not None
        ]
        self._searched += len(new)
        if not starts:
            return
        self._stop_start = min(starts)
        self.over = True
        num_ids = [
            n for n, mark in enumerate(self._text_lengths, 1) if 0 <= mark <= self._stop_start
        ]
        self.ids = self.ids[: max(num_ids, default=0)]

    @property
    def _stable_length(self) -> int:
        """Number of characters that no later id can change."""
        text = self.text
        if self.over:
            return len(text)
        return len(text) - max((matcher.num_matched for matcher in self._stops), default=0)

    def take_new_text(self) -> str:
        """Return the final text that was not returned before."""
        first = self._num_taken_chars
        self._num_taken_chars = max(self._num_taken_chars, self._stable_length)
        return self.text[first : self._num_taken_chars]

    def take_new_ids(self) -> list[int]:
        """Return the final ids that were not returned before."""
        first = self._num_taken_ids
        count = len(self.ids)
        if self._stops and not self.over:
            stable_length = self._stable_length
            lengths = enumerate(self._text_lengths[first:], first + 1)
            count = max((n for n, length in lengths if 0 <= length <= stable_length), default=first)
        self._num_taken_ids = max(first, count)
        return self.ids[first : self._num_taken_ids]


class _StopMatcher:
    """Finds a stop text in a text that arrives in pieces, and reads each character once (Knuth,
    Morris and Pratt).

    `num_matched` is the length of the longest beginning of the stop text that ends the text so far.

    >>> matcher = _StopMatcher("abac")
    >>> matcher.find_end("..aba"), matcher.num_matched, matcher.find_end("bac!")
    (None, 3, 3)
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # num_matched of the first n + 1 characters of `stop`, read after the first character
        self._fallbacks = [0]
        for char in stop[1:]:
            self._fallbacks.append(self._advance(self._fallbacks[-1], char))

    def _advance(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._fallbacks[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)

    def find_end(self, new: str) -> int | None:
        """Read more of the text; return the position in it where the first stop
        text ends, or None.
        """
        for position, char in enumerate(new, 1):
            self.num_matched = self._advance(self.num_matched, char)
            if self.num_matched == len(self.stop):
                return position
        return None
