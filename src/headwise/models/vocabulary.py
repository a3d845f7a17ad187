"""Tokenisers: bytes, characters, and subwords that are trained or read from a tokenizer.json."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from ..util.errors import SpecError
from ..util.files import read_text_file

IdArray = NDArray[Any]  # token ids, in the smallest integer type that the vocabulary allows

ENCODE_BATCH_SIZE = 64  # texts that are encoded in one call


class Vocabulary(ABC):
    """Base class of tokenisers; `document` is the equivalent tokenizer.json of the `tokenizers`
    library.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size = 1 + max(tokenizer.get_vocab().values(), default=-1)

    @property
    def document(self) -> str:
        """The tokeniser as JSON of the `tokenizers` library."""
        return self._tokenizer.to_str()

    @property
    def dtype(self) -> Any:
        """The smallest unsigned integer type that holds every id."""
        return np.min_scalar_type(self.size - 1)

    @abstractmethod
    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        """Return the ids of each text."""

    @property
    @abstractmethod
    def bytes_per_id(self) -> NDArray[np.int64] | None:
        """Number of UTF-8 bytes that each id stands for; None if that depends on the neighbouring
        ids.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sequence of ids; special tokens, such as the end of an answer, are left out."""
        id_list = [int(token_id) for token_id in ids]
        invalid = [token_id for token_id in id_list if not 0 <= token_id < self.size]
        if invalid:
            raise ValueError(
                f"the id {invalid[0]} is outside the vocabulary of {self.size} ids; use "
                f"0..{self.size - 1}"
            )
        return decode_tokens(self._tokenizer, id_list)


class ByteVocabulary(Vocabulary):
    """Byte-level vocabulary: the id of a byte is its value.

    >>> ByteVocabulary().encode(["aé"])[0].tolist(), ByteVocabulary().decode([97, 195, 169])
    ([97, 195, 169], 'aé')
    """

    def __init__(self) -> None:
        super().__init__(_byte_level_tokenizer(BPE(byte_alphabet(), []), splitting="none"))

    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    @property
    def bytes_per_id(self) -> NDArray[np.int64]:
        return np.ones(256, np.int64)


class CharVocabulary(Vocabulary):
    """Character-level vocabulary: ids number the sorted characters of an alphabet.

    >>> CharVocabulary("cab").encode(["abba"])[0].tolist()
    [0, 1, 1, 0]
    """

    def __init__(self, alphabet: Iterable[str]) -> None:
        chars = sorted(set(alphabet))
        ids = {char: n for n, char in enumerate(chars)}
        tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        super().__init__(tokenizer)
        # sorted; the id is the index
        self._code_points = np.array(list(map(ord, chars)), np.uint32)

    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> IdArray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.searchsorted(self._code_points, codes).clip(max=self.size - 1)
        unknown = np.flatnonzero(self._code_points[ids] != codes)
        if len(unknown):
            at = int(unknown[0])
            raise SpecError(
                f"the character {text[at]!r} at offset {at} is not in the vocabulary of "
                f"{self.size}; remove it"
            )
        return ids.astype(self.dtype)

    @property
    def bytes_per_id(self) -> NDArray[np.int64]:
        return np.array([len(chr(code).encode()) for code in self._code_points], np.int64)


class SubwordVocabulary(Vocabulary):
    """Subword vocabulary of a `tokenizers.Tokenizer`; special tokens, such as the end of a
    sentence, are not text.

    >>> pieces = train_bpe(["low lower lowest"] * 9, vocab_size=262, special_tokens=("<s>", "</s>"))
    >>> pieces.decode(pieces.encode(["the lowest"])[0]), pieces.special("</s>")
    ('the lowest', 1)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        # "</s>" in the input is ordinary text, not the special token.
        tokenizer.encode_special_tokens = True

    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        remaining = iter(texts)
        ids: list[IdArray] = []
        while batch := list(islice(remaining, ENCODE_BATCH_SIZE)):
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ids += [np.array(encoding.ids, self.dtype) for encoding in encodings]
        return ids

    def special(self, name: str) -> int:
        """Return the id of a special token."""
        token_id = self._tokenizer.token_to_id(name)
        if token_id is None:
            raise ValueError(f"there is no special token {name!r} in this vocabulary")
        return token_id

    @property
    def bytes_per_id(self) -> NDArray[np.int64] | None:
        config: dict[str, Any] = json.loads(self.document)
        decoder = (config.get("decoder") or {}).get("type")
        if decoder not in ("ByteLevel", "Fuse"):
            return None
        special_ids: set[int] = {
            token["id"] for token in config["added_tokens"] if token["special"]
        }
        num_bytes = np.zeros(self.size, np.int64)
        for piece, n in self._tokenizer.get_vocab().items():
            # A byte-level piece has one character per byte; otherwise the piece is the text itself.
            width = len(piece) if decoder == "ByteLevel" else len(piece.encode())
            num_bytes[n] = 0 if n in special_ids else width
        return num_bytes


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> SubwordVocabulary:
    """Train a byte-level BPE vocabulary of at most `vocab_size` tokens on these texts.

    No token has more than one Chinese character, because Chinese has no spaces between words: a
    token would span parts of two words. (BERT's tokenizers do the same.)
    """
    min_size = 256 + len(special_tokens)
    if vocab_size < min_size:
        raise SpecError(
            f"vocab={vocab_size} is too small for 256 bytes and {len(special_tokens)} special "
            f"tokens; use {min_size} or more"
        )
    tokenizer = _byte_level_tokenizer(BPE(), splitting="words")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{Han}"), "isolated"), tokenizer.pre_tokenizer]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordVocabulary(tokenizer)


def read_vocabulary(path: Path) -> SubwordVocabulary:
    """Read a tokenizer.json of the `tokenizers` library."""
    tokenizer = read_tokenizer_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return SubwordVocabulary(tokenizer)


def _byte_level_tokenizer(model: Any, splitting: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=splitting == "words"
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """Character for each byte, as in GPT-2: printable bytes stand for themselves, others use code
    points from 256.
    """
    alphabet: dict[str, int] = {}
    others = 256
    for byte in range(256):
        if chr(byte).isprintable() and chr(byte) not in " \xa0\xad":
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(others)] = byte
            others += 1
    return alphabet


# --- Calls of the tokenizers library --------------------------------------------------------------


MAX_REASON = 120  # characters of the library's message


@contextmanager
def _panics_as_errors(action: str) -> Iterator[None]:
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise _explain(action, error) from error


def _explain(action: str, error: BaseException) -> SpecError:
    reason = " ".join(str(error).split())[:MAX_REASON]
    return SpecError(
        f"the tokenizer cannot {action}: {reason}; give another text, or another tokenizer"
    )


def parse_tokenizer(document: str) -> Tokenizer:
    """Return the tokenizer that a JSON document describes; raises Exception with the reason if it
    describes none.

    >>> parse_tokenizer("{}")
    Traceback (most recent call last):
    Exception: Model missing. at line 1 column 2
    """
    with _panics_as_errors("be built from its document"):
        return Tokenizer.from_str(document)


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json."""
    try:
        return parse_tokenizer(read_text_file(path))
    except (SpecError, OSError):
        raise
    except Exception as error:  # the library raises plain Exception
        raise SpecError(
            f"{path} is not a tokenizer document: {error}; copy the file again"
        ) from None


def encode_tokens(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> Encoding:
    """Tokenize a text; raises SpecError with the library's error as its cause."""
    try:
        with _panics_as_errors("encode this text"):
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except SpecError:
        raise
    except Exception as error:
        raise _explain("encode this text", error) from error


def decode_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids to text, without special tokens."""
    with _panics_as_errors("decode these ids"):
        return tokenizer.decode(list(ids))
