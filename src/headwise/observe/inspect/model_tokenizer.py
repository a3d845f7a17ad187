"""Find the tokenizer of a model: the caller's, its own, or tokenizer.json next to its weights; and
read texts as the model does: token rows with the special tokens around them, and strings of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from torch import nn

from ...kernels.devices import ModuleT
from ...models import Transformer
from ...models.generation import (
    ModelTokenizer,
    encode_text,
    get_decoder_start_ids,
    load_tokenizers,
)
from ...models.hub_files import fetch_model
from ...models.model_spec import ModelSpec, ProcessorSpec
from ...models.model_spec.serialization import TOKENIZER_FILE
from ...models.save_load import check_processor
from ...models.vocabulary import (
    ByteVocabulary,
    byte_alphabet,
    decode_tokens,
    encode_tokens,
    parse_tokenizer,
    read_tokenizer_file,
)
from ...util.errors import SpecError
from ...util.model_names import parse_hub_id
from ..traces import TokenRow

BYTE_TOKENIZER = "bytes"
ATTACHED = "_headwise_tokenizer"  # attribute of a module that a tokenizer was attached to
TOKENIZER_KINDS = (
    "a tokenizer of transformers or tokenizers, a tokenizer.json or its folder, a Hub id, or "
    "'bytes'"
)
TOKENIZER_REMEDY = "give tokenizer=, one of transformers or the folder of one"

_current_tokenizer: ContextVar[tuple[nn.Module, Tokenizer] | None] = ContextVar(
    "current_tokenizer", default=None
)


def find_model_folder(model: nn.Module) -> Path | None:
    """Return the folder that a transformers model was loaded from, or its snapshot in the local
    cache; else None.

    Nothing is downloaded. In a wrapper such as SentenceTransformer, the first submodule with a
    config counts.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((config for config in configs if getattr(config, "_name_or_path", "")), None)
    name = str(getattr(config, "_name_or_path", "") or "")
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    return _find_cached_folder(name, getattr(config, "_commit_hash", None))


def _find_cached_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a Hugging Face hub model in the local cache."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not the name of a repository
        return None
    return Path(path).parent if isinstance(path, str) else None


def find_tokenizer(model: nn.Module) -> Tokenizer | None:
    """Return the tokenizer of a model outside headwise; None if there is none.

    It is the tokenizer given by `use_tokenizer` or `attach_tokenizer`, else the attribute
    `tokenizer` of the model, else the tokenizer.json in the folder of its weights.
    """
    current = _current_tokenizer.get()
    if current is not None and current[0] is model:
        return current[1]
    own = vars(model).get(ATTACHED) or _find_fast_tokenizer(getattr(model, "tokenizer", None))
    if own is not None:
        return _without_limits(own)
    folder = find_model_folder(model)
    if folder is None or not (folder / TOKENIZER_FILE).is_file():
        return None
    return read_tokenizer(folder)


def read_tokenizer(tokenizer: object) -> Tokenizer:
    """Return a tokenizer without truncation and padding, from any of `TOKENIZER_KINDS`.

    >>> read_tokenizer("bytes").encode("né").ids
    [110, 195, 169]
    """
    if isinstance(tokenizer, str) and tokenizer == BYTE_TOKENIZER:
        return parse_tokenizer(ByteVocabulary().document)
    if isinstance(tokenizer, (str, Path)):
        return _without_limits(_read_file(Path(tokenizer)))
    fast = _find_fast_tokenizer(tokenizer)
    if fast is None:
        raise SpecError(f"tokenizer is of type {type(tokenizer).__name__}; give {TOKENIZER_KINDS}")
    return _without_limits(fast)


def _read_file(path: Path) -> Tokenizer:
    hub_id = parse_hub_id(path)
    folder = path if hub_id is None else fetch_model(hub_id, weights=False)
    file = folder / TOKENIZER_FILE if folder.is_dir() else folder
    if not file.is_file():
        raise SpecError(f"there is no tokenizer at {str(file)!r}; give {TOKENIZER_KINDS}")
    return read_tokenizer_file(file)


def _find_fast_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return the `tokenizers.Tokenizer` in a transformers tokenizer, or the argument itself."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return fast if isinstance(fast, Tokenizer) else None


def _without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer without truncation and padding."""
    unlimited = parse_tokenizer(tokenizer.to_str())
    unlimited.no_truncation()
    unlimited.no_padding()
    return unlimited


def get_surrounding_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ids that a tokenizer adds before and after every text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = tokenizer.get_vocab(with_added_tokens=False).keys() - {
        added.content for added in tokenizer.get_added_tokens_decoder().values()
    }
    # Encode the shortest word of the vocabulary, because some tokenizers encode unknown words as
    # nothing.
    shortest = min(words, key=lambda word: (not word.isalnum(), len(word), word), default="")
    encoding = encode_tokens(tokenizer, shortest)
    is_special = encoding.special_tokens_mask
    positions = [n for n, special in enumerate(is_special) if not special] or [len(is_special)]
    return tuple(encoding.ids[: positions[0]]), tuple(encoding.ids[positions[-1] + 1 :])


def replace_tokenizer(
    model_spec: ModelSpec, processor: ProcessorSpec, tokenizer: Tokenizer
) -> ProcessorSpec:
    """Return the processor spec of a headwise model with this tokenizer; raise if it does not fit
    the model.
    """
    before, behind = get_surrounding_ids(tokenizer)
    document = tokenizer.to_str()
    extended = replace(
        processor,
        prefix_ids=before,
        suffix_ids=behind,
        parse_special=True,
        tokenizer=document,
        source_tokenizer=None,
    )
    check_processor(model_spec, extended)
    return extended


def with_tokenizer(model: ModuleT, tokenizer: object) -> ModuleT:
    """Return a model that encodes texts with `tokenizer`: a copy of a headwise model without its
    weights, which both share; another model itself, which keeps the tokenizer.
    """
    fast = read_tokenizer(tokenizer)
    if not isinstance(model, Transformer):
        _check_size(model, fast)
        setattr(model, ATTACHED, fast)
        return model
    view = copy(model)
    view.usage = replace_tokenizer(model.spec, model.usage, fast)
    return view


def _check_size(model: Any, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with more ids than a model of transformers has embeddings."""
    try:
        rows = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return  # no table of embeddings to compare with
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    if size > rows:
        raise SpecError(
            f"the tokenizer has {size:,} ids, and {type(model).__name__} has embeddings for "
            f"{rows:,}; give the tokenizer that the model was trained with, or ids in place of text"
        )


@contextmanager
def use_tokenizer(model: nn.Module, tokenizer: object = None) -> Iterator[nn.Module]:
    """Encode texts for a model with `tokenizer` (None: its own); yields the model to use.

    A headwise model is copied without its weights, which both share; other models are yielded
    unchanged.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> with use_tokenizer(net, "bytes") as reader:
    ...     reader.usage.tokenizer is not None, net.usage.tokenizer is None
    (True, True)
    """
    if tokenizer is None:
        yield model
        return
    if isinstance(model, Transformer):
        yield with_tokenizer(model, tokenizer)
        return
    fast = read_tokenizer(tokenizer)
    _check_size(model, fast)
    token = _current_tokenizer.set((model, fast))
    try:
        yield model
    finally:
        _current_tokenizer.reset(token)


# --- Texts as a model reads them ------------------------------------------------------------------


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


def find_unknown_id(model: nn.Module) -> int | None:
    """Return the id that the tokenizer of a model's texts gives unknown words; None without one."""
    if isinstance(model, Transformer):
        return load_tokenizers(model)[1].unknown_id
    tokenizer = find_tokenizer(model)
    return None if tokenizer is None else ModelTokenizer(tokenizer.to_str()).unknown_id


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
