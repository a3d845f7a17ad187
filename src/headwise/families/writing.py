"""A description back to the keys of a config.json, if the one that is read from these is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

from ..blueprint import Dense, Model, Stack, to_dict
from ..errors import SpecError, nearest
from ..spec import AttentionSpec
from .config import ACTIVATIONS, Config
from .registry import FAMILIES, WRITERS
from .registry import model as read

USUAL = "the usual"
REMEDY = "save it with hw.save, which writes every model"
Difference = tuple[str, str, str]  # where, what the family has there, and what the model has


def config_of(model: Model, family: str = "auto") -> dict[str, Any]:
    """The keys by which a family says this model, the first that can; refused where what is read back is another.

    >>> told = read(Config({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11}))
    >>> config_of(told)["n_layer"]
    2
    >>> config_of(told, "llama")
    Traceback (most recent call last):
    headwise.errors.SpecError: a llama has stacks.0.embedding.positions = the usual, gpt2 {'kind': 'learned', ...
    """
    if family != "auto" and family not in WRITERS:
        raise SpecError(f"configs of {family!r} are not written; {nearest(family, ['auto', *WRITERS])}")
    tried, refused = list[tuple[list[Difference], dict[str, Any]]](), SpecError()
    for name in WRITERS if family == "auto" else [family]:
        try:
            tried.append(_written(model, name))
        except SpecError as error:  # its sizes are none of this family at all
            refused = error
    if not tried:
        raise refused
    wrong, keys = min(tried, key=lambda one: len(one[0]))
    if not wrong:
        return keys
    (where, theirs, own), name = wrong[0], keys["model_type"]
    raise SpecError(f"a {name} has {where} = {theirs}, {model.name} {own}; {REMEDY}")


def _written(model: Model, family: str) -> tuple[list[Difference], dict[str, Any]]:
    """The keys of a family, and where the model that they say is not this one."""
    keys = {"architectures": [_class(family)], "model_type": family} | WRITERS[family](model, family)
    theirs = replace(read(Config(keys, f"as a {family}")), name=model.name, notes=model.notes)
    return list(differences(theirs, model)), keys


def differences(one: Model, other: Model) -> Iterator[Difference]:
    """Where two descriptions differ, layer by layer, with what each says there."""
    return _differences("", _layered(one), _layered(other))


def _layered(model: Model) -> dict[str, Any]:
    """A model as plain values, layer by layer, however its layers repeat."""
    plain = to_dict(model)
    for said in plain["stacks"]:
        runs = said.pop("runs")
        said["layers"] = [block for run in runs for _ in range(run["times"]) for block in run["blocks"]]
    return plain


def parts_of(model: Model, family: str) -> tuple[Stack, AttentionSpec, Dense]:
    """The stack, and the attention and the feed-forward of its first layer; a family has all of them."""
    stack = model.stacks[-1]
    if not stack.layers or stack.embedding is None:
        _none(model, family, "layers over an embedding")
    block = stack.layers[0]
    if not isinstance(block.attention, AttentionSpec):
        _none(model, family, "an attention in every layer, which a spec says")
    if not isinstance(block.feed, Dense):
        _none(model, family, "one feed-forward in every layer")
    return stack, block.attention, block.feed


def activation_of(name: str) -> str:
    """An activation by transformers' word for it; one that it has not is told as it is.

    >>> activation_of("silu"), activation_of("gelu_tanh")
    ('silu', 'gelu_new')
    """
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == name), name)


def _class(family: str) -> str:
    found = FAMILIES[family]
    return f"{found.stem}{found.usual}"


def _none(model: Model, family: str, has: str) -> NoReturn:
    raise SpecError(f"a {family} has {has}, and {model.name} has not; {REMEDY}")


def _differences(where: str, one: Any, other: Any) -> Iterator[Difference]:
    """Where two trees of plain values differ, with what each says there."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        first, second = cast("Mapping[str, Any]", one), cast("Mapping[str, Any]", other)
        for key in [*first, *(key for key in second if key not in first)]:
            inner = f"{where}.{key}" if where else key
            yield from _differences(inner, first.get(key, USUAL), second.get(key, USUAL))
    elif isinstance(one, list) and isinstance(other, list):
        items, others = cast("list[Any]", one), cast("list[Any]", other)
        for n, (item, another) in enumerate(zip(items, others, strict=False)):
            yield from _differences(f"{where}.{n}", item, another)
        if len(items) != len(others):
            yield f"the number of {where}", str(len(items)), str(len(others))
    elif one != other:
        yield where, _said(one), _said(other)


def _said(value: Any) -> str:
    return USUAL if value is USUAL else repr(value)
