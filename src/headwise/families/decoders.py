"""Decoders: a family is a table of config keys, defaults and choices, with a function for what a
table cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
    UnsupportedPart,
)
from ..parts.rms_norms import QKNorm
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from .attention_config import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig, read_layer_patterns
from .config_reader import (
    TransformersConfig,
    assemble_model,
    read_num_labels,
    register_family,
    select_heads,
)

LayerAttention = AttentionSpec | ApproximateAttention
LayerFeed = FeedForwardSpec | ExpertsSpec


class Switch(NamedTuple):
    """A choice by a key that is true or false."""

    key: str
    default: bool
    on: str
    off: str = ""

    def read(self, config: TransformersConfig) -> str:
        """Return the choice of a config."""
        return self.on if config.read_bool(self.key, self.default) else self.off


def read_choice(config: TransformersConfig, choice: str | Switch) -> str:
    """Return a fixed choice, or that of a switch."""
    return choice.read(config) if isinstance(choice, Switch) else choice


BIASED = Switch("attention_bias", False, "qkvo")
NO_CROSS_ATTENTION: dict[str, tuple[Any, str]] = {
    "add_cross_attention": (
        False,
        "adds cross-attention to a second model, which is not described",
    )
}


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
    """Additions of a family to its table: see `build_decoder`.

    `design` are arguments of `design` for all layers, `blocks` of each `BlockSpec`, `embedding` and
    `head` of the two ends. `approximate` holds the arguments of `ApproximateAttention` after the
    spec, `attention` replaces the attention of all layers.
    """

    design: dict[str, Any] = field(default_factory=dict[str, Any])
    modifiers: tuple[Any, ...] = ()
    blocks: dict[str, Any] = field(default_factory=dict[str, Any])
    embedding: dict[str, Any] = field(default_factory=dict[str, Any])
    head: dict[str, Any] = field(default_factory=dict[str, Any])
    approximate: tuple[Any, ...] = ()
    attention: LayerAttention | None = None
    unsupported: tuple[UnsupportedPart, ...] = ()
    has_final_norm: bool = True


LayerReader = Callable[[TransformersConfig, Sizes], Sequence[LayerKind]]


@dataclass(frozen=True)
class Decoder:
    """How the config.json of a family of decoders is read.

    - `model` to `tokens` are defaults of sizes; `kv` None means one key-value head for each query
      head, `hidden` None four times the model width.
    - `keys` are other names of the keys of these sizes, and of the activation `act` and the
      epsilon `eps` of the norms; "" means that the size is fixed.
    - `refused` are keys that must have a default value: the value, and the reason.
    - `bias` and `feed_bias` are the projections with biases, `placement` that of the norms.
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
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict[str, tuple[Any, str]])
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
    feeds_of: Callable[[TransformersConfig, Sizes, FeedForwardSpec], Sequence[LayerFeed]] | None = (
        None
    )
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
LAYER_NORM = {"eps": "layer_norm_eps"}
GPT_KEYS = {
    "model": "n_embd hidden_size",
    "heads": "n_head num_attention_heads",
    "kv": "",
    "dim": "",
    "layers": "n_layer num_hidden_layers",
    "hidden": "n_inner",
    "length": "n_positions max_position_embeddings",
    "act": "activation_function",
    "eps": "layer_norm_epsilon",
}


def register_decoders(families: Mapping[str, Decoder]) -> None:
    """Register the readers of families by their model_type."""
    for name, family in families.items():

        def read(config: TransformersConfig, task: str, family: Decoder = family) -> ModelSpec:
            return build_decoder(config, task, family)

        register_family(name, family.prefix, family.default_task)(read)


def build_decoder(config: TransformersConfig, task: str, family: Decoder) -> ModelSpec:
    """Return the model of a config of this family."""
    for name, (value, reason) in family.refused.items():
        config.require_default(name, value, reason)
    keys = {name: text.split() for name, text in (KEYS | dict(family.keys)).items()}
    sizes = _read_sizes(config, family, keys)
    extras = family.extras(config, sizes) if family.extras else Extras()
    act = config.read_activation(keys["act"][0], family.act) if keys["act"] else family.act
    hidden = _read_hidden(config, family, keys["hidden"]) or 4 * sizes.model
    feed = FeedForwardSpec(hidden, act, family.form, read_choice(config, family.feed_bias))
    feeds: Sequence[LayerFeed] = [feed] * sizes.layers
    if family.feeds_of:
        feeds = family.feeds_of(config, sizes, feed)
    attentions = _make_attentions(config, family, sizes, extras)
    block_args: dict[str, Any] = {
        "norm": sizes.norm,
        "placement": read_choice(config, family.placement),
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
    heads = select_decoder_heads(config, family.tasks.get(task, task), head)
    return assemble_model(config, "decoder", (stack,), heads, extras.unsupported)


def _read_sizes(
    config: TransformersConfig, family: Decoder, keys: Mapping[str, list[str]]
) -> Sizes:
    model = config.read_int(*keys["model"], default=family.model)
    heads = config.read_num_heads(*keys["heads"], default=family.heads)
    kv = heads
    if callable(family.kv):
        kv = family.kv(config, heads)
    elif keys["kv"]:
        kv = config.read_num_kv_heads(heads, default=family.kv)
    dim = config.resolve_head_dim(model, heads, *keys["dim"], default=family.dim)
    layers = config.read_num_layers(*keys["layers"], default=family.layers)
    length = config.read_int(*keys["length"], default=family.length) if keys["length"] else 0
    eps = config.read_float(*keys["eps"], default=family.eps) if keys["eps"] else family.eps
    return Sizes(model, heads, kv, dim, layers, length, NormSpec(family.norm, eps))


def _read_hidden(config: TransformersConfig, family: Decoder, keys: list[str]) -> int | None:
    if not keys or family.hidden is None:
        return config.read_optional_int(*keys) if keys else None
    return config.read_int(*keys, default=family.hidden)


def _make_attentions(
    config: TransformersConfig, family: Decoder, sizes: Sizes, extras: Extras
) -> list[LayerAttention]:
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
        "bias": read_choice(config, family.bias),
    }
    norms = () if family.qk_norm is None else (QKNorm(**family.qk_norm, eps=sizes.norm.eps),)
    of_kind = dict[LayerKind, LayerAttention]()
    for kind in dict.fromkeys(kinds):
        rope = ropes.get(kind.rope)
        rotary = () if rope is None else (rope.make_rotary(sizes.dim, family.pairs),)
        own = {} if kind.similarity is None else {"similarity": kind.similarity}
        modifiers = (*norms, *rotary, *extras.modifiers)
        spec = design(**args, pattern=kind.pattern, modifiers=modifiers, **extras.design, **own)
        attention = rope.attention_with_limits(spec) if rope else spec
        of_kind[kind] = (
            ApproximateAttention(spec, *extras.approximate) if extras.approximate else attention
        )
    return [of_kind[kind] for kind in kinds]


def select_decoder_heads(
    config: TransformersConfig, task: str, head: OutputHeadSpec
) -> tuple[OutputHeadSpec, ...]:
    """Return the heads of a decoder's task: `head` for language models, otherwise a classifier or
    none.
    """
    count = read_num_labels(config)
    heads_by_task: dict[str, list[OutputHeadSpec]] = {
        "ForCausalLM": [head],
        "LMHeadModel": [head],
        "Model": [],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, at="last")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    return select_heads(config, task, heads_by_task)


# --- Readers of the kinds of layers ---------------------------------------------------------------


def one_window(default: int | None = None, switch: str = "") -> LayerReader:
    """All layers have the sliding window of the key sliding_window, if `switch` is true or ""."""

    def read(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
        is_on = not switch or config.read_bool(switch, False)
        window = config.read_optional_int("sliding_window", default=default) if is_on else None
        pattern = "causal()" if window is None else f"window({window})"
        return [LayerKind(pattern)] * sizes.layers

    return read


def by_layer_type(
    default_types: Callable[[TransformersConfig, int], list[str]],
    window: int = 4096,
    without_rope: str = "",
) -> LayerReader:
    """Layers have a sliding window or attend to all tokens before, by the key layer_types."""

    def read(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
        types = default_types(config, sizes.layers)
        size = config.read_optional_int("sliding_window", default=window)
        kinds = make_layer_kinds(config, types, size)
        return [kind._replace(rope="") if kind.rope == without_rope else kind for kind in kinds]

    return read


def make_layer_kinds(
    config: TransformersConfig, default_types: list[str], window: int | None
) -> list[LayerKind]:
    """Return the kinds by the key layer_types, whose default is given."""
    patterns = read_layer_patterns(config, len(default_types), default_types, window)
    return [
        LayerKind(pattern, FULL_ATTENTION if pattern == "causal()" else SLIDING_ATTENTION)
        for pattern in patterns
    ]


def alternate(config: TransformersConfig, layers: int) -> list[str]:
    """Sliding and full attention in turn, sliding first."""
    types = (SLIDING_ATTENTION, FULL_ATTENTION)
    return [types[layer % 2] for layer in range(layers)]


def full_every(
    default: int, key: str = "sliding_window_pattern"
) -> Callable[[TransformersConfig, int], list[str]]:
    """Full attention in every n-th layer, n by a key unless it is ""; a window in the others."""

    def list_types(config: TransformersConfig, layers: int) -> list[str]:
        every = config.read_int(key, default=default) if key else default
        return [
            SLIDING_ATTENTION if (layer + 1) % every else FULL_ATTENTION for layer in range(layers)
        ]

    return list_types
