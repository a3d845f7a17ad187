"""Write a model description as the keys of a config.json, and check them by reading them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

from ..errors import SpecError, suggest
from ..model_spec import FeedForwardSpec, ModelSpec, StackSpec, to_dict
from ..spec.attention_spec import AttentionSpec
from .config_reader import ACTIVATIONS, FAMILIES, WRITERS, TransformersConfig, read_config as read

DEFAULT_TEXT = "the default"
REMEDY = "save it with hw.save, which writes every model"
Difference = tuple[str, str, str]  # path in the description, value in the family, value in the model


def write_config(model: ModelSpec, family: str = "auto") -> dict[str, Any]:
    """Return the config.json keys that describe this model in a family, for "auto" in the first family that can.

    The keys are read back. If they describe a different model, a SpecError names the first difference, for "auto" in
    the family with the fewest differences.

    >>> model = read(
    ...     TransformersConfig({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11})
    ... )
    >>> write_config(model)["n_layer"]
    2
    >>> write_config(model, "llama")
    Traceback (most recent call last):
    headwise.errors.SpecError: a llama has stacks.0.embedding.positions = the default, gpt2 {'kind': 'learned', ...
    """
    if family != "auto" and family not in WRITERS:
        raise SpecError(f"cannot write configs of {family!r}; {suggest(family, ['auto', *WRITERS])}")
    attempts, refusal = list[tuple[list[Difference], dict[str, Any]]](), SpecError()
    for name in WRITERS if family == "auto" else [family]:
        try:
            attempts.append(_try_family(model, name))
        except SpecError as error:  # the family cannot express these sizes
            refusal = error
    if not attempts:
        raise refusal
    differences, keys = min(attempts, key=lambda attempt: len(attempt[0]))
    if not differences:
        return keys
    (where, theirs, own), name = differences[0], keys["model_type"]
    raise SpecError(f"a {name} has {where} = {theirs}, {model.name} {own}; {REMEDY}")


def _try_family(model: ModelSpec, family: str) -> tuple[list[Difference], dict[str, Any]]:
    """Return the keys for one family, and the differences of the model that they describe from this one."""
    keys = {"architectures": [_class_name(family)], "model_type": family} | WRITERS[family](model, family)
    theirs = replace(read(TransformersConfig(keys, f"as a {family}")), name=model.name, notes=model.notes)
    return list(find_differences(theirs, model)), keys


def find_differences(one: ModelSpec, other: ModelSpec) -> Iterator[Difference]:
    """Yield the differences of two model descriptions, layer by layer: path, value in one, value in the other."""
    return _compare_trees("", _layers_to_dict(one), _layers_to_dict(other))


def _layers_to_dict(model: ModelSpec) -> dict[str, Any]:
    """Return a model as plain values, with runs of repeated layers expanded to single layers."""
    plain = to_dict(model)
    for stack in plain["stacks"]:
        runs = stack.pop("runs")
        stack["layers"] = [block for run in runs for _ in range(run["times"]) for block in run["blocks"]]
    return plain


def get_first_layer(model: ModelSpec, family: str) -> tuple[StackSpec, AttentionSpec, FeedForwardSpec]:
    """Return the last stack and the attention and feed-forward of its first layer; refuse models without them."""
    stack = model.stacks[-1]
    if not stack.layers or stack.embedding is None:
        _raise_missing(model, family, "layers over an embedding")
    block = stack.layers[0]
    if not isinstance(block.attention, AttentionSpec):
        _raise_missing(model, family, "an attention that an AttentionSpec describes in every layer")
    if not isinstance(block.feed, FeedForwardSpec):
        _raise_missing(model, family, "one feed-forward in every layer")
    return stack, block.attention, block.feed


def activation_to_config(name: str) -> str:
    """Return the name of an activation in transformers, or `name` itself if transformers has no such activation.

    >>> activation_to_config("silu"), activation_to_config("gelu_tanh")
    ('silu', 'gelu_new')
    """
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == name), name)


def _class_name(family: str) -> str:
    entry = FAMILIES[family]
    return f"{entry.class_prefix}{entry.default_task}"


def _raise_missing(model: ModelSpec, family: str, has: str) -> NoReturn:
    raise SpecError(f"a {family} has {has}, and {model.name} has not; {REMEDY}")


def _compare_trees(where: str, one: Any, other: Any) -> Iterator[Difference]:
    """Yield the differences of two trees of plain values: path, value in one, value in the other."""
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
