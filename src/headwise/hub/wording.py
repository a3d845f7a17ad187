"""A tokenizer for a model that carries none: its ids are bytes, or a file says what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from torch import nn

from ..blueprint import Model, Usage
from ..errors import SpecError
from ..models import Transformer
from ..models.usage import check_usage
from ..tasks.vocabulary import Bytes
from .sentencepieces import BEGIN, document
from .usage import around

BYTES = "bytes"
VALUES = 256


def give_words(model: nn.Module, what: str) -> None:
    """Let a model of ours that carries no tokenizer read text: "bytes", or the path of a tokenizer.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read(config))
    >>> give_words(net, "bytes")
    >>> from headwise.models.generating import read
    >>> read(net, "né")
    [110, 195, 169]
    """
    if not isinstance(model, Transformer):
        fact = f"{type(model).__name__} is not a model of ours"
        raise SpecError(f"{fact}, and reads with the tokenizer beside its weights; put a tokenizer.json there")
    model.usage = usage_with(model.described, model.usage, what)


def usage_with(described: Model, usage: Usage, what: str) -> Usage:
    """What is said of a model's use, with "bytes" for a tokenizer, a tokenizer.json, or a tokenizer.bin of llama2.c."""
    if usage.tokenizer is not None:
        raise SpecError(f"{described.name} carries a tokenizer of its own; leave {what!r} out")
    tokens = max((stack.embedding.tokens for stack in described.stacks if stack.embedding), default=0)
    if not tokens:
        raise SpecError(f"{described.name} reads no ids, so no text; leave {what!r} out")
    found = _bytes(described, usage, tokens) if what == BYTES else _read(Path(what), usage, tokens)
    check_usage(described, found, f"{what}: ")
    return found


def _bytes(described: Model, usage: Usage, tokens: int) -> Usage:
    if tokens < VALUES:
        fact = f"{described.name} knows {tokens} ids, and there are {VALUES} bytes"
        raise SpecError(f"{fact}; give the path of its own tokenizer instead of {BYTES!r}")
    return replace(usage, tokenizer=Bytes().document)


def _read(path: Path, usage: Usage, tokens: int) -> Usage:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; give {BYTES!r}, or a tokenizer's file") from None
    if data.lstrip()[:1] != b"{":
        return replace(usage, before=(BEGIN,), end=(BEGIN,), tokenizer=document(path, tokens))
    try:
        text = data.decode()
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library has no other name for what it raises
        raise SpecError(f"{path} is no document of a tokenizer: {error}; give a tokenizer.json") from None
    before, behind = around(tokenizer)
    return replace(usage, before=before, behind=behind, specials="read", tokenizer=text)
