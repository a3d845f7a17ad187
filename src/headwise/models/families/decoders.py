"""Decoders: a family is a table of config keys, defaults and choices in families.toml, with a
function for what a table cannot express.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from ...attention.parts.rms_norms import QKNorm
from ...attention.presets import design
from ...attention.spec.attention_spec import AttentionSpec
from ...util.size_limits import MAX_HEADS
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from .attention_config import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig, read_layer_patterns
from .config_reader import (
    TransformersConfig,
    assemble_model,
    read_num_labels,
    register_family,
    select_heads,
)

# --- The tables of families.toml ------------------------------------------------------------------

TABLES: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("families.toml").read_text(encoding="utf-8")
)
BASES = TABLES["bases"]
MERGED_FIELDS = ("keys", "refused")
FUNCTION_FIELDS = ("kv", "ropes", "layers_of", "feeds_of", "extras")

Function = TypeVar("Function", bound=Callable[..., Any])
Family = TypeVar("Family")
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Switch(NamedTuple):
    """A choice by a key that is true or false."""

    key: str
    default: bool
    on: str
    off: str = ""


def read_switch(config: TransformersConfig, choice: str | Switch) -> str:
    """Return a fixed choice, or the choice that a switch makes."""
    if isinstance(choice, str):
        return choice
    return choice.on if config.read_bool(choice.key, choice.default) else choice.off


def family_function(function: Function) -> Function:
    """Make a function available to families.toml by its name."""
    _FUNCTIONS[function.__name__] = function
    return function


def read_base(name: str, family_class: type[Family]) -> Family:
    """Return a table of the section "bases"."""
    return family_class(**{field: _resolve(field, value) for field, value in BASES[name].items()})


def _resolve(field: str, value: Any) -> Any:
    if value == "none":
        return None
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if "hook" in fields:
            arguments = {name: item for name, item in fields.items() if name != "hook"}
            return _FUNCTIONS[fields["hook"]](**arguments)
        return Switch(**fields) if "key" in fields else fields
    return _FUNCTIONS[value] if field in FUNCTION_FIELDS and isinstance(value, str) else value


def refuse_keys(config: TransformersConfig, refused: dict[str, list[Any]]) -> None:
    """Refuse keys that have another value than their default."""
    for name, (*default, reason) in refused.items():
        config.require_default(name, default[0] if default else None, reason)


def register_families(
    section: str,
    family_class: type[Family],
    build: Callable[[TransformersConfig, str, Family], ModelSpec],
) -> None:
    """Register the families of a section; `build` makes their models."""
    tables = dict(BASES)
    for name, own in TABLES[section].items():
        base = tables.get(own.pop("like", ""), {})
        merged = {
            field: base.get(field, {}) | own.get(field, {})
            for field in MERGED_FIELDS
            if field in own
        }
        tables[name] = base | own | merged
        fields = {field: _resolve(field, value) for field, value in tables[name].items()}
        reader = partial(_read, build=build, family=family_class(**fields))
        task = fields.get("default_task", getattr(family_class, "default_task", ""))
        register_family(name, fields["prefix"], task)(reader)


def _read(
    config: TransformersConfig, task: str, build: Callable[..., ModelSpec], family: object
) -> ModelSpec:
    return build(config, task, family)


# --- Decoders -------------------------------------------------------------------------------------

LayerFeed = FeedForwardSpec | ExpertsSpec


class Sizes(NamedTuple):
    """Sizes and norm of a decoder, as read from its config."""

    model: int
    heads: int
    kv: int
    dim: int
    layers: int
    length: int
    norm: NormSpec


class LayerKind(NamedTuple):
    """Settings that may differ between the attentions of a decoder's layers.

    `rope` names a RoPE of the family, or is "" for none.
    """

    pattern: str = "causal()"
    rope: str = FULL_ATTENTION
    similarity: Any = None


@dataclass
class Extras:
    """Functions that a family adds to its table: see `build_decoder`.

    `design` are arguments of `design` for all layers, `blocks` of each `BlockSpec`, `embedding` and
    `head` of the two ends; `attention` replaces the attention of all layers.
    """

    design: dict[str, Any] = field(default_factory=dict[str, Any])
    modifiers: tuple[Any, ...] = ()
    blocks: dict[str, Any] = field(default_factory=dict[str, Any])
    embedding: dict[str, Any] = field(default_factory=dict[str, Any])
    head: dict[str, Any] = field(default_factory=dict[str, Any])
    attention: AttentionSpec | None = None
    has_final_norm: bool = True


LayerReader = Callable[[TransformersConfig, Sizes], Sequence[LayerKind]]
FeedReader = Callable[[TransformersConfig, Sizes, FeedForwardSpec], Sequence[LayerFeed]]


@dataclass(frozen=True)
class Decoder:
    """How the config.json of a family of decoders is read.

    - `model` to `tokens` are defaults of sizes; `kv` None means one key-value head for each query
      head, `hidden` None four times the model width.
    - `keys` are other names of the keys of these sizes, and of the activation `act` and the
      epsilon `eps` of the norms; "" means that the size is fixed.
    - `bias` and `feed_bias` are the projections with biases, `placement` places the norms.
    - `rope` are further arguments of `RopeConfig`; None means no RoPE. `ropes` makes one for each
      type of layer. `pairs` is the order of rotated channels.
    - `positions` are arguments of learned positions. `qk_norm` are arguments of `QKNorm`.
    - `layers_of` reads the kinds of layers; by default all are causal and have RoPE.
    - `feeds_of` reads the feed-forward of each layer from the dense one.
    - `extras` reads everything else. `tasks` are other names of tasks.
    """

    prefix: str
    model: int
    heads: int
    layers: int
    hidden: int | None
    length: int
    tokens: int
    kv: int | Callable[[TransformersConfig, int], int] | None = None
    dim: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    act: str = "silu"
    eps: float = 1e-6
    norm: str = "rms"
    bias: str | Switch = ""
    feed_bias: str | Switch = ""
    form: str = "gated"
    placement: str | Switch = "pre"
    tied: bool = False
    head_bias: str = ""
    rope: Mapping[str, Any] | None = field(default_factory=dict[str, Any])
    ropes: Callable[[TransformersConfig, int], Mapping[str, RopeConfig]] | None = None
    pairs: str = "half"
    positions: Mapping[str, Any] | None = None
    qk_norm: Mapping[str, Any] | None = None
    layers_of: LayerReader | None = None
    feeds_of: FeedReader | None = None
    extras: Callable[[TransformersConfig, Sizes], Extras] | None = None
    default_task: str = "ForCausalLM"
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])


KEYS = {
    "model": "hidden_size",
    "heads": "num_attention_heads",
    "kv": "num_key_value_heads",
    "dim": "head_dim",
    "layers": "num_hidden_layers",
    "hidden": "intermediate_size",
    "length": "max_position_embeddings",
    "act": "hidden_act",
    "eps": "rms_norm_eps",
}


def build_decoder(config: TransformersConfig, task: str, family: Decoder) -> ModelSpec:
    """Return the model of a config of this family."""
    refuse_keys(config, family.refused)
    keys = {name: text.split() for name, text in (KEYS | dict(family.keys)).items()}
    sizes = _read_sizes(config, family, keys)
    extras = family.extras(config, sizes) if family.extras else Extras()
    act = config.read_activation(keys["act"][0], family.act) if keys["act"] else family.act
    hidden: int | None = None
    if keys["hidden"] and family.hidden is None:
        hidden = config.read_optional_int(*keys["hidden"])
    elif keys["hidden"]:
        hidden = config.read_int(*keys["hidden"], default=family.hidden or 0)
    hidden = hidden or 4 * sizes.model
    feed = FeedForwardSpec(hidden, act, family.form, read_switch(config, family.feed_bias))
    feeds: Sequence[LayerFeed] = [feed] * sizes.layers
    if family.feeds_of:
        feeds = family.feeds_of(config, sizes, feed)
    attentions = _make_attentions(config, family, sizes, extras)
    block_args: dict[str, Any] = {
        "norm": sizes.norm,
        "placement": read_switch(config, family.placement),
    }
    blocks = [
        BlockSpec(attention, feed=layer_feed, **(block_args | extras.blocks))
        for attention, layer_feed in zip(attentions, feeds, strict=True)
    ]
    tokens = config.read_int("vocab_size", default=family.tokens)
    embedding_args = dict(extras.embedding)
    if family.positions is not None:
        embedding_args["positions"] = PositionSpec("learned", sizes.length, **family.positions)
    stack = StackSpec.from_blocks(
        "decoder",
        sizes.model,
        blocks,
        embedding=EmbeddingSpec(tokens, **embedding_args),
        norm=sizes.norm if extras.has_final_norm else None,
    )
    tied = "decoder" if config.read_bool("tie_word_embeddings", family.tied) else ""
    head = OutputHeadSpec("tokens", tokens, bias=family.head_bias, table=tied, **extras.head)
    count = read_num_labels(config)
    heads_by_task: dict[str, list[OutputHeadSpec]] = {
        "ForCausalLM": [head],
        "LMHeadModel": [head],
        "Model": [],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, at="last")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    heads = select_heads(config, family.tasks.get(task, task), heads_by_task)
    return assemble_model(config, "decoder", (stack,), heads)


def _read_sizes(
    config: TransformersConfig, family: Decoder, keys: Mapping[str, list[str]]
) -> Sizes:
    model = config.read_int(*keys["model"], default=family.model)
    heads = config.read_num_heads(*keys["heads"], default=family.heads)
    kv = heads
    if callable(family.kv):
        kv = family.kv(config, heads)
    elif keys["kv"]:
        name = "num_key_value_heads"
        kv = config.read_optional_int(name, default=family.kv, maximum=MAX_HEADS) or heads
        if heads % kv:
            config.fail(
                f"num_attention_heads = {heads} is not a multiple of {name} = {kv}",
                "give a divisor",
            )
    dim = config.resolve_head_dim(model, heads, *keys["dim"], default=family.dim)
    layers = config.read_num_layers(*keys["layers"], default=family.layers)
    length = config.read_int(*keys["length"], default=family.length) if keys["length"] else 0
    eps = config.read_float(*keys["eps"], default=family.eps) if keys["eps"] else family.eps
    return Sizes(model, heads, kv, dim, layers, length, NormSpec(family.norm, eps))


def _make_attentions(
    config: TransformersConfig, family: Decoder, sizes: Sizes, extras: Extras
) -> list[AttentionSpec]:
    """Return the attention of each layer; layers of one kind share one spec."""
    if extras.attention is not None:
        return [extras.attention] * sizes.layers
    kinds = family.layers_of(config, sizes) if family.layers_of else [LayerKind()] * sizes.layers
    ropes: Mapping[str, RopeConfig] = {}
    if family.ropes:
        ropes = family.ropes(config, sizes.length)
    elif family.rope is not None:
        rope = RopeConfig(config, sizes.length, **family.rope)
        ropes = {SLIDING_ATTENTION: rope, FULL_ATTENTION: rope}
    args: dict[str, Any] = {
        "model": sizes.model,
        "heads": sizes.heads,
        "kv": sizes.kv,
        "dim": sizes.dim,
        "bias": read_switch(config, family.bias),
    }
    norms = () if family.qk_norm is None else (QKNorm(**family.qk_norm, eps=sizes.norm.eps),)
    of_kind = dict[LayerKind, AttentionSpec]()
    for kind in dict.fromkeys(kinds):
        rope = ropes.get(kind.rope)
        rotary = () if rope is None else (rope.make_rotary(sizes.dim, family.pairs),)
        own = {} if kind.similarity is None else {"similarity": kind.similarity}
        modifiers = (*norms, *rotary, *extras.modifiers)
        of_kind[kind] = design(
            **args, pattern=kind.pattern, modifiers=modifiers, **extras.design, **own
        )
    return [of_kind[kind] for kind in kinds]


# --- Readers of the kinds of layers ---------------------------------------------------------------


@family_function
def one_window(default: int | None = None, switch: str = "") -> LayerReader:
    """All layers have the sliding window of the key sliding_window, if `switch` is true or ""."""

    def read(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
        is_on = not switch or config.read_bool(switch, False)
        window = config.read_optional_int("sliding_window", default=default) if is_on else None
        pattern = "causal()" if window is None else f"window({window})"
        return [LayerKind(pattern)] * sizes.layers

    return read


@family_function
def by_layer_type(
    every: int, key: str = "", window: int = 4096, without_rope: str = ""
) -> LayerReader:
    """Layers have a sliding window or attend to all tokens before, by the key layer_types.

    Without it, every n-th layer attends to all, n by another key unless that is "".
    """

    def read(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
        period = config.read_int(key, default=every) if key else every
        types = [
            SLIDING_ATTENTION if layer % period else FULL_ATTENTION
            for layer in range(1, sizes.layers + 1)
        ]
        size = config.read_optional_int("sliding_window", default=window)
        kinds = make_layer_kinds(config, types, size)
        return [kind._replace(rope="") if kind.rope == without_rope else kind for kind in kinds]

    return read


def make_layer_kinds(
    config: TransformersConfig, default_types: list[str], window: int | None
) -> list[LayerKind]:
    """Return the kinds of layers from the key layer_types, or from `default_types` without it."""
    patterns = read_layer_patterns(config, len(default_types), default_types, window)
    return [
        LayerKind(pattern, FULL_ATTENTION if pattern == "causal()" else SLIDING_ATTENTION)
        for pattern in patterns
    ]
