"""How a model of transformers is spoken to: its tokenizer, and what its configs say of ids and classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..blueprint import ModelSpec, ProcessorSpec
from ..blueprint.manifest import TOKENIZER_FILE
from ..errors import SpecError
from ..models.usage import check_usage

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
    check_usage(model_spec, usage, f"{folder}/")
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
