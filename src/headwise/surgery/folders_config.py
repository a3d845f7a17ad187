"""A config.json that says a model whose heads were cut, if there is one: tried by reading it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..blueprint import Model, to_dict
from ..errors import SpecError
from ..families import config_of, read
from ..families.writing import differences
from ..hub.maps import map_of
from ..spec import AttentionSpec

# The keys by which configs say how many heads there are, and how wide they are.
HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
SHARED = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDE = ("head_dim", "d_kv")


class Said(NamedTuple):
    """The keys of a config, or why there are none."""

    keys: Mapping[str, Any] | None
    why: str


def said(described: Model, config: Mapping[str, Any]) -> Said:
    """What a config.json must say for this model, beginning with what it said before its heads were cut.

    >>> import headwise as hw
    >>> config = {"model_type": "mistral", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    >>> config |= {"num_hidden_layers": 1, "vocab_size": 5, "intermediate_size": 6, "head_dim": 2}
    >>> three = hw.families.read(config | {"num_attention_heads": 3, "num_key_value_heads": 3})
    >>> said(three, config).keys["num_attention_heads"]
    3
    """
    whys = list[str]()
    for keys in _trials(described, config):
        try:
            why = _difference(read(keys), described) or _refused(keys)
        except SpecError as error:
            why = str(error)
        if not why:
            return Said(keys, "")
        whys.append(why)
    return Said(None, uneven(described) or whys[0])


def uneven(described: Model) -> str:
    """Why no numbers that hold for all layers say a model; nothing if its layers are alike."""
    first = dict[tuple[str, str], tuple[int, AttentionSpec]]()
    for stack in described.stacks:
        for depth, block in enumerate(stack.layers):
            for role in block.still:
                return f"layer {depth} of the {stack.name} has no {role} left"
            for role, spec in block.specs.items():
                before, other = first.setdefault((stack.name, role), (depth, spec))
                for what, one, another in _counts(spec, other):
                    if one != another:
                        where = f"{stack.name} layer {depth}" if len(described.stacks) > 1 else f"layer {depth}"
                        return f"{where} keeps {one} {what} and layer {before} {another}"
    return ""


def _counts(one: AttentionSpec, other: AttentionSpec) -> Iterator[tuple[str, int, int]]:
    yield "heads", one.heads.q, other.heads.q
    yield "key-value heads", one.heads.kv, other.heads.kv


def _trials(described: Model, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Configs that may say it, nearest to what was there first."""
    specs = dict(described.specs())
    if not specs:
        return
    edited = dict(config)
    sites = {name: [spec for site, spec in specs.items() if site.startswith(f"{name}.")] for name in
             (stack.name for stack in described.stacks)}  # fmt: skip
    last = list(specs.values())[-1].heads
    for name in HEADS:
        own = next((rows[0].heads for side, rows in sites.items() if rows and name.startswith(side)), last)
        edited |= {name: own.q} if name in config else {}
    edited |= {name: last.kv for name in SHARED if config.get(name) is not None}
    edited |= {name: last.dim for name in WIDE if config.get(name) is not None}
    yield edited
    for more in ({WIDE[0]: last.dim}, {SHARED[0]: last.kv}, {WIDE[0]: last.dim, SHARED[0]: last.kv}):
        yield edited | more
    yield from _others(described, config)


def _others(described: Model, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A sister whose files have the same names: transformers takes no llama whose heads do not divide its width."""
    try:
        keys = config_of(described)
    except SpecError:
        return
    if map_of(keys["model_type"]) is map_of(described.name):
        yield dict(config) | keys


def _difference(theirs: Model, ours: Model) -> str:
    """The first difference of two descriptions, but for names and notes."""
    theirs = replace(theirs, name=ours.name, notes=ours.notes)
    for where, one, other in differences(theirs, ours):
        return f"config.json would say {where} = {one}, where the model has {other}"
    return "" if to_dict(theirs) == to_dict(ours) else "config.json would say another model"


def _refused(keys: Mapping[str, Any]) -> str:
    """Why transformers takes no such config; nothing if it does, or is not installed."""
    if find_spec("transformers") is None:
        return ""
    import transformers

    try:
        rest = {name: value for name, value in keys.items() if name != "model_type"}
        transformers.AutoConfig.for_model(keys["model_type"], **rest)
    except Exception as error:  # whatever its checks raise
        return f"transformers refuses the config: {' '.join(str(error).split())[:200]}"
    return ""
