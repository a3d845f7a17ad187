"""A description back to the keys of a config.json, if the one that is read from these is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

from ..errors import SpecError, suggest
from ..model_spec import FeedForwardSpec, ModelSpec, StackSpec, to_dict
from ..spec.attention_spec import AttentionSpec
from .config_reader import ACTIVATIONS, FAMILIES, WRITERS, TransformersConfig, read_config as read

DEFAULT_TEXT = "the usual"
REMEDY = "save it with hw.save, which writes every model"
Difference = tuple[str, str, str]  # where, what the family has there, and what the model has


def write_config(model: ModelSpec, family: str = "auto") -> dict[str, Any]:
    """The keys by which a family says this model, the first that can; refused where what is read back is another.

    >>> told = read(
    ...     TransformersConfig({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11})
    ... )
    >>> write_config(told)["n_layer"]
    2
    >>> write_config(told, "llama")
    Traceback (most recent call last):
    headwise.errors.SpecError: a llama has stacks.0.embedding.positions = the usual, gpt2 {'kind': 'learned', ...
    """
    if family != "auto" and family not in WRITERS:
        raise SpecError(f"configs of {family!r} are not written; {suggest(family, ['auto', *WRITERS])}")
    tried, refused = list[tuple[list[Difference], dict[str, Any]]](), SpecError()
    for name in WRITERS if family == "auto" else [family]:
        try:
            tried.append(_try_family(model, name))
        except SpecError as error:  # its sizes are none of this family at all
            refused = error
    if not tried:
        raise refused
    wrong, keys = min(tried, key=lambda one: len(one[0]))
    if not wrong:
        return keys
    (where, theirs, own), name = wrong[0], keys["model_type"]
    raise SpecError(f"a {name} has {where} = {theirs}, {model.name} {own}; {REMEDY}")


def _try_family(model: ModelSpec, family: str) -> tuple[list[Difference], dict[str, Any]]:
    """The keys of a family, and where the model that they say is not this one."""
    keys = {"architectures": [_class_name(family)], "model_type": family} | WRITERS[family](model, family)
    theirs = replace(read(TransformersConfig(keys, f"as a {family}")), name=model.name, notes=model.notes)
    return list(find_differences(theirs, model)), keys


def find_differences(one: ModelSpec, other: ModelSpec) -> Iterator[Difference]:
    """Where two descriptions differ, layer by layer, with what each says there."""
    return _compare_trees("", _layers_to_dict(one), _layers_to_dict(other))


def _layers_to_dict(model: ModelSpec) -> dict[str, Any]:
    """A model as plain values, layer by layer, however its layers repeat."""
    plain = to_dict(model)
    for said in plain["stacks"]:
        runs = said.pop("runs")
        said["layers"] = [block for run in runs for _ in range(run["times"]) for block in run["blocks"]]
    return plain


def get_first_layer(model: ModelSpec, family: str) -> tuple[StackSpec, AttentionSpec, FeedForwardSpec]:
    """The stack, and the attention and the feed-forward of its first layer; a family has all of them."""
    stack = model.stacks[-1]
    if not stack.layers or stack.embedding is None:
        _raise_missing(model, family, "layers over an embedding")
    block = stack.layers[0]
    if not isinstance(block.attention, AttentionSpec):
        _raise_missing(model, family, "an attention in every layer, which a spec says")
    if not isinstance(block.feed, FeedForwardSpec):
        _raise_missing(model, family, "one feed-forward in every layer")
    return stack, block.attention, block.feed


def activation_to_config(name: str) -> str:
    """An activation by transformers' word for it; one that it has not is told as it is.

    >>> activation_to_config("silu"), activation_to_config("gelu_tanh")
    ('silu', 'gelu_new')
    """
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == name), name)


def _class_name(family: str) -> str:
    found = FAMILIES[family]
    return f"{found.class_prefix}{found.default_task}"


def _raise_missing(model: ModelSpec, family: str, has: str) -> NoReturn:
    raise SpecError(f"a {family} has {has}, and {model.name} has not; {REMEDY}")


def _compare_trees(where: str, one: Any, other: Any) -> Iterator[Difference]:
    """Where two trees of plain values differ, with what each says there."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        first, second = cast("Mapping[str, Any]", one), cast("Mapping[str, Any]", other)
        for key in [*first, *(key for key in second if key not in first)]:
            inner = f"{where}.{key}" if where else key
            yield from _compare_trees(inner, first.get(key, DEFAULT_TEXT), second.get(key, DEFAULT_TEXT))
    elif isinstance(one, list) and isinstance(other, list):
        items, others = cast("list[Any]", one), cast("list[Any]", other)
        for n, (item, another) in enumerate(zip(items, others, strict=False)):
            yield from _compare_trees(f"{where}.{n}", item, another)
        if len(items) != len(others):
            yield f"the number of {where}", str(len(items)), str(len(others))
    elif one != other:
        yield where, _show_value(one), _show_value(other)


def _show_value(value: Any) -> str:
    return DEFAULT_TEXT if value is DEFAULT_TEXT else repr(value)
