"""A config.json that says a model whose heads were cut, if there is one: tried by reading it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..blueprint import ModelSpec, StackSpec, to_dict
from ..errors import SpecError
from ..families import write_config, read_model_spec
from ..families.writing import find_differences
from ..hub.maps import get_weight_names
from ..spec import AttentionSpec

# The keys by which configs say how many heads there are; how wide they are never changes.
HEAD_COUNT_KEYS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
KV_COUNT_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
ATTENTION_NAMES = {"attention": "attention", "cross": "cross-attention"}


class ConfigKeys(NamedTuple):
    """The keys of a config, or why there are none."""

    keys: Mapping[str, Any] | None
    reason: str


def find_config_keys(model_spec: ModelSpec, config: Mapping[str, Any]) -> ConfigKeys:
    """What a config.json must say for this model, beginning with what it said before its heads were cut.

    >>> import headwise as hw
    >>> config = {"model_type": "mistral", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    >>> config |= {"num_hidden_layers": 1, "vocab_size": 5, "intermediate_size": 6, "head_dim": 2}
    >>> three = hw.families.read(config | {"num_attention_heads": 3, "num_key_value_heads": 3})
    >>> find_config_keys(three, config).keys["num_attention_heads"]
    3
    """
    whys = list[str]()
    for keys in _candidate_configs(model_spec, config):
        try:
            why = _first_difference(read_model_spec(keys), model_spec) or _hf_error(keys)
        except SpecError as error:
            why = f"config.json cannot say it ({str(error).removeprefix('config: ').partition(';')[0]})"
        if not why:
            return ConfigKeys(keys, "")
        whys.append(why)
    return ConfigKeys(None, describe_uneven_layers(model_spec) or whys[0])


def describe_uneven_layers(model_spec: ModelSpec) -> str:
    """Why no numbers that hold for all layers say a model; nothing if its layers are alike."""
    return next((why for stack in model_spec.stacks for why in _iter_uneven_layers(stack, _stack_prefix(model_spec, stack.name))), "")


def _iter_uneven_layers(stack: StackSpec, where: str) -> Iterator[str]:
    first = dict[str, tuple[int, AttentionSpec]]()
    for depth, block in enumerate(stack.layers):
        yield from (f"{where}layer {depth} has no {ATTENTION_NAMES[role]} left" for role in block.still)
        for role, spec in block.attention_specs.items():
            before, other = first.setdefault(role, (depth, spec))
            if told := _describe_difference(spec, depth, other, before):
                yield f"{where}{told}"


def _stack_prefix(described: ModelSpec, stack: str) -> str:
    return f"in the {stack} " if len(described.stacks) > 1 else ""


def _describe_difference(one: AttentionSpec, depth: int, other: AttentionSpec, before: int) -> str:
    for what, count, another in (
        ("head", one.heads.q, other.heads.q),
        ("key-value head", one.heads.kv, other.heads.kv),
    ):
        if count != another:
            return f"layer {depth} keeps {count} {what}{'s' * (count > 1)} and layer {before} {another}"
    return ""


def _candidate_configs(described: ModelSpec, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Configs that may say it, nearest to what was there first."""
    specs = dict(described.attention_specs())
    if not specs:
        return
    edited = dict(config)
    sites = {name: [spec for site, spec in specs.items() if site.startswith(f"{name}.")] for name in
             (stack.name for stack in described.stacks)}  # fmt: skip
    last = list(specs.values())[-1].heads
    for name in HEAD_COUNT_KEYS:
        own = next((rows[0].heads for side, rows in sites.items() if rows and name.startswith(side)), last)
        edited |= {name: own.q} if name in config else {}
    edited |= {name: last.kv for name in KV_COUNT_KEYS if config.get(name) is not None}
    yield edited
    wide, shared = {"head_dim": last.dim}, {KV_COUNT_KEYS[0]: last.kv}  # which follow from others where they are not said
    for more in (wide, shared, wide | shared):
        if not any(config.get(name) is not None for name in more):
            yield edited | more
    yield from _sibling_configs(described, config)


def _sibling_configs(described: ModelSpec, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A sister whose files have the same names: transformers takes no llama whose heads do not divide its width."""
    try:
        keys = write_config(described)
    except SpecError:
        return
    if get_weight_names(keys["model_type"]) is get_weight_names(described.name):
        yield dict(config) | keys


def _first_difference(theirs: ModelSpec, ours: ModelSpec) -> str:
    """The first difference of two descriptions, but for names and notes."""
    theirs = replace(theirs, name=ours.name, notes=ours.notes)
    for where, one, other in find_differences(theirs, ours):
        if where.endswith(".merge.bias"):
            return "it adds a vector behind its heads that config.json cannot say"
        return f"config.json would say {where} = {one}, where the model has {other}"
    return "" if to_dict(theirs) == to_dict(ours) else "config.json would say another model"


def _hf_error(keys: Mapping[str, Any]) -> str:
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
