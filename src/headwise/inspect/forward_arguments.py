"""Names of the arguments of a model's forward: which one takes the token ids, and how named tensors are passed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..masking.sequence_info import SequenceInfo
from ..models import Transformer

IDS = "input_ids"  # the name that tokenizers give to the ids
DECODER_IDS = "decoder_input_ids"
# Entries of a tokenizer's output, with the value that changes nothing, for models without an argument of this name.
NEUTRAL_VALUES = {"attention_mask": 1, "token_type_ids": 0}
MASKS = {"attention_mask": "source_sequence", "decoder_attention_mask": "sequence"}

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_is_module(model: Any) -> nn.Module:
    """Return the model; raise ValueError if it is not an nn.Module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give an nn.Module, or hw.load(folder)")
    return model


def _forward_signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):  # compiled and scripted modules may have none
        return None


def list_arguments(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a model's forward, without *args and **kwargs."""
    signature = _forward_signature(model)
    parameters = [] if signature is None else signature.parameters.values()
    return tuple(one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


def find_ids_argument(model: nn.Module) -> str:
    """Return the name of the argument that takes token ids: `main_input_name` of transformers, else the first one.

    >>> class NanoGPT(nn.Module):
    ...     def forward(self, idx, targets=None): ...
    >>> find_ids_argument(NanoGPT())
    'idx'
    """
    if isinstance(model, Transformer):
        return "x"
    arguments, main = list_arguments(model), getattr(model, "main_input_name", None)
    if isinstance(main, str) and (main in arguments or not arguments):
        return main
    return IDS if IDS in arguments or not arguments else arguments[0]


def takes_mapping(model: nn.Module) -> bool:
    """Whether a model takes all its tensors as one dictionary, as SentenceTransformer does."""
    signature = _forward_signature(model)
    if signature is None:
        return False
    names = list_arguments(model)
    if not names:
        return False
    annotation = str(signature.parameters[names[0]].annotation)
    return any(word in annotation.lower() for word in ("dict", "mapping"))


def to_named_tensors(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model by name, from its own names or from the output of a tokenizer.

    Lists and arrays of numbers become tensors. Names of tokenizers, such as `input_ids`, become the names of the model
    where these differ; an attention mask becomes the `sequence` of a headwise model.
    """
    names = {name: _to_tensor(name, value) for name, value in inputs.items()}
    if isinstance(model, Transformer):
        return _rename_for_headwise(model, names)
    arguments, ids = list_arguments(model), find_ids_argument(model)
    if takes_mapping(model) or IDS not in names or IDS in arguments or not arguments or ids in names:
        return names
    renamed = {ids if name == IDS else name: value for name, value in names.items()}
    for name, neutral in NEUTRAL_VALUES.items():
        if name not in renamed or name in arguments:
            continue
        if not bool((renamed[name] == neutral).all()):
            fact = f"{type(model).__name__} takes no argument {name!r}, but the inputs have one"
            raise ValueError(f"{fact}; give one text at a time, or its own arguments: {', '.join(arguments)}")
        del renamed[name]
    return renamed


def bind_arguments(model: nn.Module, names: dict[str, Any]) -> CallArguments:
    """Return the positional and keyword arguments of a call with these named tensors; raise if the model has no such
    arguments.
    """
    if takes_mapping(model) and list_arguments(model)[0] not in names:
        return (names,), {}
    signature = _forward_signature(model)
    if signature is not None:
        try:
            signature.bind(**names)
        except TypeError:
            fact = f"{type(model).__name__} cannot be called with {', '.join(names)}"
            raise ValueError(f"{fact}; its arguments are {', '.join(list_arguments(model))}") from None
    return (), names


def _to_tensor(name: str, value: Any) -> Any:
    """A tensor from a list or array of numbers; a single row of ids gets a batch axis."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, list) or not value:
        return value
    try:
        tensor = torch.tensor(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name!r} is a list that makes no tensor; give rows of equal length, as a tokenizer returns them with "
            "padding=True, return_tensors='pt'"
        ) from None
    return tensor[None] if tensor.dim() == 1 else tensor


def _rename_for_headwise(model: Transformer, names: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a headwise model from the names of transformers; names of its own stay."""
    if IDS not in names:
        return names
    has_source = model.spec.kind == "encoder-decoder"
    new_names = {IDS: "source" if has_source else "x", DECODER_IDS: "x"}
    renamed = {new_names.get(name, name): value for name, value in names.items()}
    for mask_name, argument in MASKS.items():
        mask = renamed.pop(mask_name, None)
        name = argument if has_source else "sequence"
        if isinstance(mask, Tensor) and not bool((mask == 1).all()):
            ids = renamed["source" if name == "source_sequence" else "x"]
            renamed[name] = SequenceInfo.from_batch(ids, segments=mask.long() - 1)
    types = renamed.pop("token_type_ids", None)
    if isinstance(types, Tensor) and bool((types != 0).any()):
        raise ValueError("token_type_ids of several segments are not read from a tokenizer; give x=(ids, types)")
    return renamed
