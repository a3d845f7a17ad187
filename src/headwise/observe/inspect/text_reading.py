"""Read texts as a model does: token rows with the special tokens around them, and the strings of
ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from torch import nn

from ...models import Transformer
from ...models.generation import (
    ModelTokenizer,
    encode_text,
    get_decoder_start_ids,
    load_tokenizers,
)
from ...models.vocabulary import byte_alphabet, decode_tokens, encode_tokens
from ...util.errors import SpecError
from ..traces import TokenRow
from .model_tokenizer import TOKENIZER_REMEDY, find_tokenizer

PAD_ID = -1  # id of a padding token in a token row
TokenDecoder = Callable[[int], str]


class TextReader(NamedTuple):
    """Read texts as a model does: its source or only text, its decoder text, and strings of ids of
    both.
    """

    read_source: Callable[[str], TokenRow]
    read_target: Callable[[str], TokenRow]
    decode_source: TokenDecoder
    decode_token: TokenDecoder


def make_reader(model: nn.Module) -> TextReader:
    """Find the tokenizers of a model and the special tokens around texts; raise if it has none."""
    if not isinstance(model, Transformer):
        tokenizer = find_tokenizer(model)
        if tokenizer is None:
            raise ValueError(
                f"{type(model).__name__} comes with no tokenizer; {TOKENIZER_REMEDY}, or give "
                "token ids"
            )
        encode = partial(_encode, tokenizer)
        decode = make_token_decoder(tokenizer)
        start = getattr(getattr(model, "config", None), "decoder_start_token_id", None) or 0
        read_target = partial(_surround, encode, decode, (start,), ())
        return TextReader(encode, read_target, decode, decode)
    usage = model.usage
    if usage.tokenizer is None:
        raise SpecError(
            f"{model.spec.name} has no tokenizer, so it only takes ids; {TOKENIZER_REMEDY}, or "
            "give ids"
        )
    source, target = load_tokenizers(model)

    def read_source(text: str) -> TokenRow:
        read = partial(_read_words, source)
        row = _surround(read, source.token_text, usage.prefix_ids, usage.suffix_ids, text)
        if list(row.ids) != encode_text(model, text):
            raise SpecError(
                f"the tokens of {text[:40]!r} do not match those of encode_text; give ids"
            )
        return row

    def read_target(text: str) -> TokenRow:
        start = get_decoder_start_ids(model)
        return _surround(partial(_read_words, target), target.token_text, start, (), text)

    return TextReader(read_source, read_target, source.token_text, target.token_text)


def _read_words(tokenizer: ModelTokenizer, text: str) -> TokenRow:
    ids = tokenizer.ids(text)
    offsets = tokenizer.places(text)
    pairs = zip(ids, offsets, strict=True)
    words = [text[start:stop] or tokenizer.token_text(one) for one, (start, stop) in pairs]
    return TokenRow(tuple(ids), tuple(words), tuple(offsets), text)


def _surround(
    read: Callable[[str], TokenRow],
    decode_token: TokenDecoder,
    before: Sequence[int],
    behind: Sequence[int],
    text: str,
) -> TokenRow:
    """Read a text, and add special ids before and after its tokens."""
    row = read(text)
    end = len(text)
    return TokenRow(
        (*before, *row.ids, *behind),
        (*map(decode_token, before), *row.words, *map(decode_token, behind)),
        (*[(0, 0)] * len(before), *row.offsets, *[(end, end)] * len(behind)),
        text,
    )


def pad_row(row: TokenRow, length: int, left: bool) -> TokenRow:
    """Pad a row of tokens to a length, on the left or on the right."""
    gap = length - len(row.ids)

    def pad(values: tuple[Any, ...], fill: Any) -> tuple[Any, ...]:
        return (fill,) * gap + values if left else values + (fill,) * gap

    return TokenRow(pad(row.ids, PAD_ID), pad(row.words, ""), pad(row.offsets, (0, 0)), row.text)


def get_tokenizer_documents(model: nn.Module) -> list[str]:
    """Return the JSON texts of a model's tokenizers, to compare models; empty if none."""
    if isinstance(model, Transformer):
        return [
            text
            for text in (model.usage.tokenizer, model.usage.source_tokenizer)
            if text is not None
        ]
    tokenizer = find_tokenizer(model)
    return [] if tokenizer is None else [tokenizer.to_str()]


def _encode(tokenizer: Tokenizer, text: str) -> TokenRow:
    encoding = encode_tokens(tokenizer, text)
    spans = encoding.offsets
    words: list[str] = []
    for place, (token, (start, stop)) in enumerate(zip(encoding.tokens, spans, strict=True)):
        neighbours = [*spans[max(place - 1, 0) : place], *spans[place + 1 : place + 2]]
        if start < stop and any(left < stop and start < right for left, right in neighbours):
            words.append(show_bytes(token))  # a part of a character
        elif encoding.special_tokens_mask[place]:
            words.append(token)
        else:
            words.append(text[start:stop] or token)
    return TokenRow(tuple(encoding.ids), tuple(words), tuple(spans), text)


def show_bytes(token: str) -> str:
    """Return a token of a byte-level vocabulary with its bytes as SentencePiece writes them.

    >>> show_bytes("çĽ"), show_bytes("<0xE7>")
    ('<0xE7><0x9B>', '<0xE7>')
    """
    alphabet = byte_alphabet()
    if not set(token) <= set(alphabet) or token.startswith("<0x"):
        return token
    return "".join(f"<0x{alphabet[letter]:02X}>" for letter in token)


def find_token_decoder(model: nn.Module, stream: str = "text") -> TokenDecoder:
    """Return a function from ids of a stream to texts; without a tokenizer it shows the ids."""
    try:
        reader = make_reader(model)
    except (ValueError, KeyError, OSError):
        return str
    return reader.decode_source if stream == "source" else reader.decode_token


def decode_rows(
    model: nn.Module, token_rows: Mapping[str, tuple[TokenRow, ...]]
) -> dict[str, tuple[TokenRow, ...]]:
    """Return token rows by stream with the texts of ids, where only ids were given."""
    decoded = dict(token_rows)
    for stream, rows in token_rows.items():
        if not any(row.offsets for row in rows):
            decode = find_token_decoder(model, stream)
            words = [tuple(decode(n) if n != PAD_ID else "" for n in row.ids) for row in rows]
            pairs = zip(rows, words, strict=True)
            decoded[stream] = tuple(TokenRow(row.ids, texts) for row, texts in pairs)
    return decoded


def make_token_decoder(tokenizer: Tokenizer) -> TokenDecoder:
    """Return a function that turns an id into text, for models outside headwise."""

    def decode_token(token_id: int) -> str:
        text = decode_tokens(tokenizer, [token_id])
        if "\ufffd" in text:
            return show_bytes(tokenizer.id_to_token(token_id) or text)
        return text or tokenizer.id_to_token(token_id) or str(token_id)

    return decode_token
