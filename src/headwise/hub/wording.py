"""A tokenizer for a model that carries none: its ids are bytes, or a file says what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from torch import nn

from ..blueprint import ModelSpec, ProcessorSpec
from ..errors import SpecError
from ..models import Transformer
from ..models.usage import check_usage
from ..tasks.vocabulary import Bytes
from .sentencepieces import BOS_ID, make_tokenizer_json
from .usage import get_surrounding_ids

BYTE_TOKENIZER = "bytes"
NUM_BYTES = 256


def attach_tokenizer(model: nn.Module, tokenizer: str) -> None:
    """Let a model of ours that carries no tokenizer read text: "bytes", or the path of a tokenizer.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read(config))
    >>> attach_tokenizer(net, "bytes")
    >>> from headwise.models.generating import read
    >>> read(net, "né")
    [110, 195, 169]
    """
    if not isinstance(model, Transformer):
        fact = f"{type(model).__name__} is not a model of ours"
        raise SpecError(f"{fact}, and reads with the tokenizer beside its weights; put a tokenizer.json there")
    model.usage = add_tokenizer(model.described, model.usage, tokenizer)


def add_tokenizer(model_spec: ModelSpec, processor: ProcessorSpec, tokenizer: str) -> ProcessorSpec:
    """What is said of a model's use, with "bytes" for a tokenizer, a tokenizer.json, or a tokenizer.bin of llama2.c."""
    if processor.tokenizer is not None:
        raise SpecError(f"{model_spec.name} carries a tokenizer of its own; leave {tokenizer!r} out")
    tokens = max((stack.embedding.tokens for stack in model_spec.stacks if stack.embedding), default=0)
    if not tokens:
        raise SpecError(f"{model_spec.name} reads no ids, so no text; leave {tokenizer!r} out")
    found = _use_bytes(model_spec, processor, tokens) if tokenizer == BYTE_TOKENIZER else _use_file(Path(tokenizer), processor, tokens)
    check_usage(model_spec, found, f"{tokenizer}: ")
    return found


def _use_bytes(described: ModelSpec, usage: ProcessorSpec, tokens: int) -> ProcessorSpec:
    if tokens < NUM_BYTES:
        fact = f"{described.name} knows {tokens} ids, and there are {NUM_BYTES} bytes"
        raise SpecError(f"{fact}; give the path of its own tokenizer instead of {BYTE_TOKENIZER!r}")
    return replace(usage, tokenizer=Bytes().document)


def _use_file(path: Path, usage: ProcessorSpec, tokens: int) -> ProcessorSpec:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; give {BYTE_TOKENIZER!r}, or a tokenizer's file") from None
    if data.lstrip()[:1] != b"{":
        return replace(usage, before=(BOS_ID,), end=(BOS_ID,), tokenizer=make_tokenizer_json(path, tokens))
    try:
        text = data.decode()
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library has no other name for what it raises
        raise SpecError(f"{path} is no document of a tokenizer: {error}; give a tokenizer.json") from None
    before, behind = get_surrounding_ids(tokenizer)
    return replace(usage, before=before, behind=behind, specials="read", tokenizer=text)
