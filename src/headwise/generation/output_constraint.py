"""Outputs that match a regular expression or a JSON schema: which tokens may come next.

The package `llguidance` derives the allowed tokens from the bytes of every token; this module tells it these bytes.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from ..errors import SpecError
from .decoding_config import DecodingConfig
from .text_output import Completion, ModelTokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how tokenizers with a fallback to bytes write a byte
MAX_LISTED_BYTES = 60  # of an output in a message
NEG_INF = float("-inf")


class ConstraintError(ValueError):
    """Raised if a constraint is not valid, or if no token of the tokenizer can satisfy it."""


class OutputConstraint:
    """State of one output: the tokens that may follow those taken so far."""

    def __init__(self, grammar: OutputGrammar) -> None:
        self._grammar, self._matcher = grammar, grammar.make_matcher()
        self._taken = bytearray()

    @property
    def is_satisfied(self) -> bool:
        """Whether the output satisfies the constraint as it is."""
        return not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the output satisfies the constraint and nothing can follow."""
        return self._matcher.is_stopped() and self.is_satisfied

    def allowed_tokens(self, end_ids: Collection[int], vocab_size: int) -> Tensor:
        """Which of the ids may come next, as booleans; the end ids may, if the output satisfies the constraint."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[: self._grammar.num_tokens + 1].astype(bool)
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        count = min(vocab_size, self._grammar.num_tokens)
        allowed[:count] = torch.from_numpy(bits[:count])
        allowed[list(end_ids)] = bool(bits[-1])
        if not bool(allowed.any()):
            text = bytes(self._taken[-MAX_LISTED_BYTES:]).decode(errors="replace")
            raise ConstraintError(
                f"cannot continue {text!r} as the constraint asks: no token of the vocabulary can follow; use another "
                "constraint, or give the model an end token"
            )
        return allowed

    def take(self, token_id: int) -> None:
        """Advance by one token, which must be an allowed one."""
        self._taken += self._grammar.token_bytes[token_id]
        if not self._matcher.consume_token(token_id):
            raise ConstraintError(f"token {token_id} is not allowed here: {_first_line(self._matcher.get_error())}")

    def extended(self, token_id: int) -> OutputConstraint:
        """The state after one more token, which must be an allowed one; this one stays as it is."""
        state = copy.copy(self)
        state._matcher, state._taken = self._matcher.deep_copy(), bytearray(self._taken)
        state.take(token_id)
        return state


class OutputGrammar:
    """A constraint for the tokens of one tokenizer; it is compiled once, and every output has a state of its own."""

    def __init__(self, tokenizer: ModelTokenizer, config: DecodingConfig) -> None:
        self._library = _import_llguidance()
        self.token_bytes, self._vocabulary = _load_vocabulary(tokenizer)
        self.num_tokens = len(self.token_bytes)
        matcher = self._library.LLMatcher
        if config.regex is not None:
            self._source = matcher.grammar_from_regex(config.regex)
        else:
            self._source = matcher.grammar_from_json_schema(
                config.json_schema, overrides={"whitespace_flexible": False}
            )
        if problem := matcher.validate_grammar(self._source, self._vocabulary):
            name, value = ("regex", config.regex) if config.regex is not None else ("json_schema", config.json_schema)
            raise ConstraintError(f"{name}={value!r} is not valid: {_first_line(problem)}; correct it")

    def make_matcher(self) -> Any:
        """State of the library before the first token."""
        return self._library.LLMatcher(self._vocabulary, self._source, log_level=0)


_GRAMMARS: WeakKeyDictionary[ModelTokenizer, tuple[tuple[str | None, str | None], OutputGrammar]] = WeakKeyDictionary()


def load_grammar(tokenizer: ModelTokenizer, config: DecodingConfig) -> OutputGrammar:
    """The constraint of a configuration; the last one of each tokenizer is kept, as many outputs share it."""
    key = config.regex, config.json_schema
    if tokenizer not in _GRAMMARS or _GRAMMARS[tokenizer][0] != key:
        _GRAMMARS[tokenizer] = key, OutputGrammar(tokenizer, config)
    return _GRAMMARS[tokenizer][1]


class ConstrainedBeams:
    """The constraint of all hypotheses of a beam search, which are told apart by their ids.

    Ids without an end id. The states of the active hypotheses are kept, and those of their extensions follow from them.
    """

    def __init__(self, grammar: OutputGrammar, end_ids: Collection[int], vocab_size: int) -> None:
        self._end_ids, self._vocab_size = end_ids, vocab_size
        self._states: dict[tuple[int, ...], OutputConstraint] = {(): OutputConstraint(grammar)}
        self._error: ConstraintError | None = None

    def allowed_tokens(self, active: Sequence[tuple[int, ...]]) -> Tensor:
        """Which ids may follow each active hypothesis, as booleans; none if no token can, which ends it."""
        self._states = {ids: self._state_after(ids) for ids in active}
        return torch.stack([self._allowed_after(ids) for ids in active])

    def _allowed_after(self, ids: tuple[int, ...]) -> Tensor:
        try:
            return self._states[ids].allowed_tokens(self._end_ids, self._vocab_size)
        except ConstraintError as error:
            self._error = error
            return torch.zeros(self._vocab_size, dtype=torch.bool)

    def is_satisfied(self, ids: tuple[int, ...]) -> bool:
        """Whether these ids, an active hypothesis and one more, satisfy the constraint as they are."""
        return self._state_after(ids).is_satisfied

    def is_complete(self, ids: tuple[int, ...]) -> bool:
        """Whether these ids, an active hypothesis and one more, satisfy the constraint and nothing can follow."""
        return self._state_after(ids).is_complete

    def check_found(self, hypotheses: Iterable[Sequence[object]]) -> None:
        """Raise the reason why hypotheses ended if a prompt has no output."""
        if self._error is not None and not all(hypotheses):
            raise self._error

    def _state_after(self, ids: tuple[int, ...]) -> OutputConstraint:
        if ids in self._states:
            return self._states[ids]
        state = self._states[ids[:-1]].extended(ids[-1])
        if not state.is_complete:  # a complete one will not be active, and there may be as many as tokens
            self._states[ids] = state
        return state


def constrain_logits(logits: Tensor, outputs: Sequence[Completion], end_ids: Collection[int]) -> Tensor:
    """Logits [rows, vocabulary] with -inf for every token that the constraint of its row does not allow."""
    rows = [n for n, output in enumerate(outputs) if output.constraint is not None and not output.over]
    if not rows:
        return logits
    logits = logits.clone()
    for n in rows:
        constraint = outputs[n].constraint
        assert constraint is not None
        allowed = constraint.allowed_tokens(end_ids, logits.shape[-1])
        logits[n].masked_fill_(~allowed.to(logits.device), NEG_INF)
    return logits


def list_token_bytes(tokenizer: ModelTokenizer) -> list[bytes]:
    """The bytes that each token adds to a text; empty for special tokens.

    >>> from headwise.data.vocabulary import ByteVocabulary
    >>> tokens = list_token_bytes(ModelTokenizer(ByteVocabulary().document))
    >>> len(tokens), tokens[104]
    (256, b'h')
    """
    document = tokenizer.document
    decoder = json.dumps(document.get("decoder"))
    special = {token["content"] for token in document.get("added_tokens") or [] if token.get("special")}
    names = [tokenizer.token_text(token_id) for token_id in range(tokenizer.size)]
    if "ByteLevel" in decoder:
        byte_of_char = _byte_alphabet()
        return [b"" if name in special else _byte_level_bytes(name, byte_of_char) for name in names]
    has_byte_tokens = "ByteFallback" in decoder
    context = next((n for n, name in enumerate(names) if name not in special and tokenizer.text([n]).strip()), None)
    return [
        b""
        if name in special
        else bytes.fromhex(match[1])
        if has_byte_tokens and (match := BYTE_TOKEN.fullmatch(name))
        else _text_in_context(tokenizer, context, n).encode()
        for n, name in enumerate(names)
    ]


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level tokens: printable ones are themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    assert set(alphabet) == set(ByteLevel.alphabet()), "the tokenizers library has another alphabet"
    return alphabet


def _byte_level_bytes(name: str, byte_of_char: dict[str, int]) -> bytes:
    if all(char in byte_of_char for char in name):
        return bytes(byte_of_char[char] for char in name)
    return name.encode()  # an added token, which is written as it is


def _text_in_context(tokenizer: ModelTokenizer, context: int | None, token_id: int) -> str:
    """Text that a token adds to others: some tokenizers decode it differently at the start."""
    if context is None:
        return tokenizer.text([token_id])
    before, after = tokenizer.text([context]), tokenizer.text([context, token_id])
    return after[len(before) :] if after.startswith(before) else tokenizer.text([token_id])


class _Vocabulary:
    """The tokens as the library wants them; an additional last one stands for the end of the output."""

    def __init__(self, tokenizer: ModelTokenizer, token_bytes: Sequence[bytes]) -> None:
        self._tokenizer, self._token_bytes = tokenizer, token_bytes
        self._id_of_bytes = {piece: n for n, piece in enumerate(token_bytes) if piece}
        self._longest = max(map(len, self._id_of_bytes), default=0)
        self.tokens = [*token_bytes, b"<end of output>"]
        self.eos_token_id, self.bos_token_id = len(token_bytes), None
        self.special_token_ids = [len(token_bytes)]

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text whose characters are all determined: those of the tokenizer, if they are this text.

        Some tokenizers put a space before every text. The longest tokens from the left are taken then.
        """
        if not isinstance(text, str):
            raise TypeError("give a text")
        try:
            ids = self._tokenizer.ids(text)
        except ValueError:  # a character that is not in the vocabulary; the mask then allows no token
            return []
        rest = text.encode()
        return ids if b"".join(self._token_bytes[n] for n in ids) == rest else self._longest_tokens(rest)

    def _longest_tokens(self, rest: bytes) -> list[int]:
        ids = list[int]()
        while rest:
            sizes = range(min(self._longest, len(rest)), 0, -1)
            size = next((size for size in sizes if rest[:size] in self._id_of_bytes), None)
            if size is None:
                return []
            ids.append(self._id_of_bytes[rest[:size]])
            rest = rest[size:]
        return ids


_VOCABULARIES: WeakKeyDictionary[ModelTokenizer, tuple[list[bytes], Any]] = WeakKeyDictionary()


def _load_vocabulary(tokenizer: ModelTokenizer) -> tuple[list[bytes], Any]:
    """The bytes of the tokens of a tokenizer, and the library's view of them; read once, because that is slow."""
    if tokenizer not in _VOCABULARIES:
        library = _import_llguidance()
        token_bytes = list_token_bytes(tokenizer)
        wrapper = library.TokenizerWrapper(_Vocabulary(tokenizer, token_bytes))
        _VOCABULARIES[tokenizer] = token_bytes, library.LLTokenizer(wrapper, slices=[])
    return _VOCABULARIES[tokenizer]


def _import_llguidance() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        fact = "outputs by a regular expression or a JSON schema need a package that is not installed"
        raise SpecError(f"{fact}; pip install llguidance") from None


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    return reason or (lines[0] if lines else "unknown")
