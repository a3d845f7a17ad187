"""How a model of transformers is spoken to: its tokenizer, and what its configs say of ids and classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from ..data.vocabulary import ByteVocabulary
from ..errors import SpecError
from ..model_spec import ModelSpec, ProcessorSpec
from ..model_spec.serialization import TOKENIZER_FILE
from ..models import Transformer
from ..models.save_load import check_processor
from .llama2c import BOS_ID, make_tokenizer_json

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
TOKENIZER_CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # either may say which token is the mask


def read_processor(folder: Path, model_spec: ModelSpec) -> ProcessorSpec:
    """What a folder says of this; a special token in a text is read as one, as transformers reads it."""
    config = read_json(folder / CONFIG_FILE) | read_json(folder / GENERATION_FILE)
    rows = max((stack.embedding.tokens for stack in model_spec.stacks if stack.embedding), default=0)
    told: dict[str, Any] = {"specials": "read", "end": _read_ids(folder, config, "eos_token_id", rows)}
    if len(model_spec.stacks) > 1:
        told["begin"] = _read_ids(folder, config, "decoder_start_token_id", rows)
    if model_spec.heads and model_spec.heads[0].name == "classes":
        told["labels"] = _read_labels(config)
    if (folder / TOKENIZER_FILE).is_file():
        told |= _read_tokenizer(folder)
    usage = ProcessorSpec(**told)
    check_processor(model_spec, usage, f"{folder}/")
    return usage


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file says by keys; nothing where there is none."""
    try:
        said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read: {error}; copy the file again") from None
    if not isinstance(said, dict):
        raise SpecError(f"{path} holds a {type(said).__name__}, not keys; copy the file again")
    return said


def _read_ids(folder: Path, config: Mapping[str, Any], name: str, rows: int) -> tuple[int, ...]:
    """One id or several; those that are no token of the model, which nobody can say, are left out."""
    told = config.get(name)
    ids = told if isinstance(told, list) else [] if told is None else [told]
    if not all(type(one) is int for one in ids):
        raise SpecError(f"{folder}: {name} = {told!r} is neither an id nor a list of ids; correct it, or take it out")
    return tuple(one for one in ids if 0 <= one < rows)


def _read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of classes in the order of their numbers, if they have any."""
    told = config.get("id2label")
    named = {str(number): str(label) for number, label in told.items()} if isinstance(told, dict) else {}
    return tuple(named[str(number)] for number in range(len(named)) if str(number) in named)


def _read_tokenizer(folder: Path) -> dict[str, Any]:
    """The tokenizer's document, the ids that it puts around every text, and the id of its mask."""
    path = folder / TOKENIZER_FILE
    try:
        document = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(document)
    except Exception as error:  # the library has no other name for what it raises
        raise SpecError(f"{path} is no document of a tokenizer: {error}; copy the file again") from None
    before, behind = get_surrounding_ids(tokenizer)
    mask = _read_mask_token(folder)
    told = {"tokenizer": document, "before": before, "behind": behind}
    return told | ({} if mask is None else {"mask": tokenizer.token_to_id(mask)})


def get_surrounding_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer puts before and behind every text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = tokenizer.get_vocab(with_added_tokens=False).keys() - {
        added.content for added in tokenizer.get_added_tokens_decoder().values()
    }
    # The shortest word that it knows: of another some tokenizers have nothing to say.
    found = tokenizer.encode(min(words, key=lambda word: (not word.isalnum(), len(word), word), default=""))
    plain = [place for place, special in enumerate(found.special_tokens_mask) if not special]
    first, last = (plain[0], plain[-1] + 1) if plain else (len(found.ids), len(found.ids))
    return tuple(found.ids[:first]), tuple(found.ids[last:])


def _read_mask_token(folder: Path) -> str | None:
    for name in TOKENIZER_CONFIG_FILES:
        told = read_json(folder / name).get("mask_token")
        word = told.get("content") if isinstance(told, dict) else told
        if isinstance(word, str):
            return word
    return None


# --- A tokenizer for a model that carries none ---------------------------------------------------------

BYTE_TOKENIZER = "bytes"
NUM_BYTES = 256


def attach_tokenizer(model: nn.Module, tokenizer: str) -> None:
    """Let a model of ours that carries no tokenizer read text: "bytes", or the path of a tokenizer.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> attach_tokenizer(net, "bytes")
    >>> from headwise.generation import encode_text
    >>> encode_text(net, "né")
    [110, 195, 169]
    """
    if not isinstance(model, Transformer):
        fact = f"{type(model).__name__} is not a model of ours"
        raise SpecError(f"{fact}, and reads with the tokenizer beside its weights; put a tokenizer.json there")
    model.usage = add_tokenizer(model.spec, model.usage, tokenizer)


def add_tokenizer(model_spec: ModelSpec, processor: ProcessorSpec, tokenizer: str) -> ProcessorSpec:
    """What is said of a model's use, with "bytes" for a tokenizer, a tokenizer.json, or a tokenizer.bin of llama2.c."""
    if processor.tokenizer is not None:
        raise SpecError(f"{model_spec.name} carries a tokenizer of its own; leave {tokenizer!r} out")
    tokens = max((stack.embedding.tokens for stack in model_spec.stacks if stack.embedding), default=0)
    if not tokens:
        raise SpecError(f"{model_spec.name} reads no ids, so no text; leave {tokenizer!r} out")
    found = (
        _use_bytes(model_spec, processor, tokens)
        if tokenizer == BYTE_TOKENIZER
        else _use_file(Path(tokenizer), processor, tokens)
    )
    check_processor(model_spec, found, f"{tokenizer}: ")
    return found


def _use_bytes(described: ModelSpec, usage: ProcessorSpec, tokens: int) -> ProcessorSpec:
    if tokens < NUM_BYTES:
        fact = f"{described.name} knows {tokens} ids, and there are {NUM_BYTES} bytes"
        raise SpecError(f"{fact}; give the path of its own tokenizer instead of {BYTE_TOKENIZER!r}")
    return replace(usage, tokenizer=ByteVocabulary().document)


def _use_file(path: Path, usage: ProcessorSpec, tokens: int) -> ProcessorSpec:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}; give {BYTE_TOKENIZER!r}, or a tokenizer's file"
        ) from None
    if data.lstrip()[:1] != b"{":
        return replace(usage, before=(BOS_ID,), end=(BOS_ID,), tokenizer=make_tokenizer_json(path, tokens))
    try:
        text = data.decode()
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library has no other name for what it raises
        raise SpecError(f"{path} is no document of a tokenizer: {error}; give a tokenizer.json") from None
    before, behind = get_surrounding_ids(tokenizer)
    return replace(usage, before=before, behind=behind, specials="read", tokenizer=text)
