"""How text becomes ids and ids become text: bytes, characters, or pieces learnt from some of it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from ..errors import SpecError

IdArray = NDArray[Any]  # whole numbers, in as few bytes as the vocabulary allows

ENCODE_BATCH_SIZE = 64  # texts that are encoded at once


class Vocabulary(ABC):
    """Pieces of text by number. `document` is what `tokenizers` reads and writes, and gives the same ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size = 1 + max(tokenizer.get_vocab().values(), default=-1)

    @property
    def document(self) -> str:
        """All of it, as the JSON of `tokenizers`."""
        return self._tokenizer.to_str()

    @property
    def dtype(self) -> Any:
        """The smallest numbers that hold every id."""
        return np.min_scalar_type(self.size - 1)

    @abstractmethod
    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        """The ids of each text."""

    @property
    @abstractmethod
    def bytes_per_id(self) -> NDArray[np.int64] | None:
        """How many bytes of text each id stands for; None where that depends on its neighbours."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens, such as the end of an answer, are none."""
        told = [int(one) for one in ids]
        if wrong := [one for one in told if not 0 <= one < self.size]:
            raise ValueError(f"the id {wrong[0]} is outside a vocabulary of {self.size}; give 0..{self.size - 1}")
        return self._tokenizer.decode(told)


class ByteVocabulary(Vocabulary):
    """The 256 bytes, each its own number.

    >>> ByteVocabulary().encode(["aé"])[0].tolist(), ByteVocabulary().decode([97, 195, 169])
    ([97, 195, 169], 'aé')
    """

    def __init__(self) -> None:
        super().__init__(_byte_level_tokenizer(BPE(_byte_alphabet(), []), splitting="none"))

    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    @property
    def bytes_per_id(self) -> NDArray[np.int64]:
        return np.ones(256, np.int64)


class CharVocabulary(Vocabulary):
    """The characters of an alphabet, in their order.

    >>> CharVocabulary("cab").encode(["abba"])[0].tolist()
    [0, 1, 1, 0]
    """

    def __init__(self, alphabet: Iterable[str]) -> None:
        known = sorted(set(alphabet))
        tokenizer = Tokenizer(WordLevel({char: n for n, char in enumerate(known)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        super().__init__(tokenizer)
        self._id_of_char = np.array([ord(char) for char in known], np.uint32)

    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> IdArray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        found = np.searchsorted(self._id_of_char, codes).clip(max=self.size - 1)
        if len(wrong := np.flatnonzero(self._id_of_char[found] != codes)):
            at = int(wrong[0])
            raise SpecError(f"{text[at]!r} at place {at} is none of the {self.size} characters known; leave it out")
        return found.astype(self.dtype)

    @property
    def bytes_per_id(self) -> NDArray[np.int64]:
        return np.array([len(chr(code).encode()) for code in self._id_of_char], np.int64)


class SubwordVocabulary(Vocabulary):
    """What a document of `tokenizers` says, `specials`, such as the end of a sentence, being no text.

    >>> pieces = train_bpe(["low lower lowest"] * 9, vocab_size=262, special_tokens=("<s>", "</s>"))
    >>> pieces.decode(pieces.encode(["the lowest"])[0]), pieces.special("</s>")
    ('the lowest', 1)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        tokenizer.encode_special_tokens = True  # a special token that stands in a text is text

    def encode(self, texts: Iterable[str]) -> list[IdArray]:
        left, done = iter(texts), list[IdArray]()
        while some := list(islice(left, ENCODE_BATCH_SIZE)):
            found = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            done += [np.array(one.ids, self.dtype) for one in found]
        return done

    def special(self, name: str) -> int:
        """The id of a special token."""
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise ValueError(f"there is no special token {name!r} in this vocabulary")
        return found

    @property
    def bytes_per_id(self) -> NDArray[np.int64] | None:
        told: dict[str, Any] = json.loads(self.document)
        decoder = (told.get("decoder") or {}).get("type")
        if decoder not in ("ByteLevel", "Fuse"):
            return None
        specials: set[int] = {added["id"] for added in told["added_tokens"] if added["special"]}
        widths = np.zeros(self.size, np.int64)
        for piece, n in self._tokenizer.get_vocab().items():
            spelt = len(piece) if decoder == "ByteLevel" else len(piece.encode())  # a letter for each byte, or text
            widths[n] = 0 if n in specials else spelt
        return widths


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> SubwordVocabulary:
    """A vocabulary of at most `size` pieces that these texts are written with in the fewest (BPE over bytes)."""
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise SpecError(
            f"vocab={vocab_size} is less than the {least} of bytes and special tokens; give {least} or more"
        )
    tokenizer = _byte_level_tokenizer(BPE(), splitting="words")
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
    """The vocabulary that a tokenizer.json holds."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise SpecError(f"{path} is no document of tokenizers: {error}; give a tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return SubwordVocabulary(tokenizer)


def _byte_level_tokenizer(model: Any, splitting: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting == "words")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte: printable ones for themselves, others from 256 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
