"""What decoders have in common, however their layers are put together: sizes, and ends around a row of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
    UnsupportedPart,
)
from ..spec.attention_spec import AttentionSpec
from .config_reader import TransformersConfig, read_num_labels, select_decoder_heads, select_heads

LayerKind = TypeVar("LayerKind", bound=Hashable)
LayerAttention = AttentionSpec | ApproximateAttention


class DecoderSizes(NamedTuple):
    """How wide a model is, and its heads."""

    model: int
    heads: int
    kv: int
    dim: int

    @property
    def design_args(self) -> dict[str, Any]:
        """As `design` is told."""
        return self._asdict()


def read_decoder_sizes(
    config: TransformersConfig, model: int, heads: int, kv: int | None = None, dim: int | None = None
) -> DecoderSizes:
    """Those of a config in the words that most use, or the usual ones."""
    wide = config.read_int("hidden_size", default=model)
    asked = config.read_num_heads("num_attention_heads", default=heads)
    return DecoderSizes(
        wide,
        asked,
        config.read_num_kv_heads(asked, default=kv),
        config.resolve_head_dim(wide, asked, "head_dim", default=dim),
    )


def read_num_layers(config: TransformersConfig, default: int) -> int:
    """How many layers."""
    return config.read_num_layers("num_hidden_layers", default=default)


def read_max_length(config: TransformersConfig, default: int) -> int:
    """How many positions a model was made for."""
    return config.read_int("max_position_embeddings", default=default)


def make_attentions(kinds: Iterable[LayerKind], make: Callable[[LayerKind], LayerAttention]) -> list[LayerAttention]:
    """The attention of each layer, by its kind; those of a kind are made once."""
    told = list(kinds)
    made = {kind: make(kind) for kind in dict.fromkeys(told)}
    return [made[kind] for kind in told]


def make_experts(
    config: TransformersConfig, expert: FeedForwardSpec, count: int, active: int, normalized_over: str
) -> ExpertsSpec:
    """Experts behind a softmax; `weighed` is what their shares sum to one over, "all" of them or those "chosen"."""
    usual = config.read_bool("norm_topk_prob", normalized_over == "chosen")
    many = config.read_int("num_experts", "num_local_experts", default=count)
    chosen = config.read_int("num_experts_per_tok", default=active, maximum=many)
    return ExpertsSpec(expert, many, chosen, scores="chosen" if usual else "softmax")


class DecoderEnds(NamedTuple):
    """What stands around a row of blocks: a table of tokens, perhaps with positions, a norm, and a head over tokens."""

    vocab_size: int
    tied: bool = False
    embedding_scale: float = 1.0
    positions: PositionSpec | None = None
    embedding_norm: NormSpec | None = None
    head_bias: str = ""
    logit_scale: float = 1.0
    logit_softcap: float | None = None


def build_decoder(
    config: TransformersConfig,
    task: str,
    blocks: Sequence[BlockSpec],
    final_norm: NormSpec | None,
    ends: DecoderEnds,
    unsupported_parts: tuple[UnsupportedPart, ...] = (),
) -> ModelSpec:
    """A decoder of these blocks, whose width is that of their attention."""
    (wide,) = {spec.model for block in blocks for spec in block.attention_specs.values()}
    table = EmbeddingSpec(
        ends.vocab_size, positions=ends.positions, norm=ends.embedding_norm, scale=ends.embedding_scale
    )
    stack = StackSpec.from_blocks("decoder", wide, blocks, embedding=table, norm=final_norm)
    tied = "decoder" if config.read_bool("tie_word_embeddings", ends.tied) else ""
    head = OutputHeadSpec(
        "tokens", ends.vocab_size, bias=ends.head_bias, table=tied, scale=ends.logit_scale, cap=ends.logit_softcap
    )
    return ModelSpec(
        config.family_name,
        "decoder",
        (stack,),
        select_decoder_heads(config, task, head),
        tuple(config.notes),
        unsupported_parts,
    )


def make_blocks(
    attentions: Iterable[LayerAttention], feed: FeedForwardSpec | ExpertsSpec, norm: NormSpec, **said: Any
) -> list[BlockSpec]:
    """A block for each attention, otherwise alike."""
    return [BlockSpec(attention, feed=feed, norm=norm, **said) for attention in attentions]


# --- What encoders after BERT have in common -----------------------------------------------------------


class EncoderSizes(NamedTuple):
    """The sizes of an encoder, in the words that BERT uses for them."""

    model: int
    heads: int
    layers: int
    vocab_size: int
    norm: NormSpec
    feed: FeedForwardSpec

    @property
    def activation(self) -> str:
        """The activation of its feed-forwards, and of its heads."""
        return self.feed.activation


class EncoderDefaults(NamedTuple):
    """The sizes of a config that does not say its own: BERT's, unless said."""

    model: int = 768
    heads: int = 12
    layers: int = 12
    vocab_size: int = 30522
    hidden: int = 3072
    activation: str = "gelu"
    eps: float = 1e-12


BERT_DEFAULTS = EncoderDefaults()


def read_encoder_sizes(config: TransformersConfig, defaults: EncoderDefaults = BERT_DEFAULTS) -> EncoderSizes:
    """The sizes of a config, or the usual ones."""
    wide = config.read_int("hidden_size", default=defaults.model)
    heads = config.read_num_heads("num_attention_heads", default=defaults.heads)
    config.resolve_head_dim(wide, heads)
    config.require_default("add_cross_attention", False, "reads a model that this file does not describe")
    hidden = config.read_int("intermediate_size", default=defaults.hidden)
    feed = FeedForwardSpec(hidden, config.read_activation("hidden_act", defaults.activation), bias="ud")
    layers, tokens = (
        config.read_num_layers("num_hidden_layers", default=defaults.layers),
        config.read_int("vocab_size", default=defaults.vocab_size),
    )
    return EncoderSizes(
        wide, heads, layers, tokens, NormSpec("layer", config.read_float("layer_norm_eps", default=defaults.eps)), feed
    )


def make_offset_positions(config: TransformersConfig, length: int = 512, pad: int = 1) -> PositionSpec:
    """Learned positions of which the first stands behind the row of padding, as fairseq numbers them."""
    rows, skipped = (
        config.read_int("max_position_embeddings", default=length),
        1 + config.read_int("pad_token_id", default=pad, minimum=0),
    )
    if rows <= skipped:
        config.fail(f"max_position_embeddings = {rows} leaves none behind pad_token_id", f"give more than {skipped}")
    return PositionSpec("learned", rows - skipped, skipped=skipped)


def make_encoder_stack(
    sizes: EncoderSizes, attentions: Iterable[LayerAttention], embedding: EmbeddingSpec | None
) -> StackSpec:
    """Layers after Vaswani: a norm behind every sublayer."""
    blocks = [BlockSpec(one, feed=sizes.feed, norm=sizes.norm, placement="post") for one in attentions]
    return StackSpec.from_blocks("encoder", sizes.model, blocks, embedding=embedding)


class EncoderHeads(NamedTuple):
    """What the heads of a family are like: how rows are pooled for classes, and whether the bare model pools too."""

    pooler: HeadTransformSpec | None
    masked_lm_head: OutputHeadSpec
    pools_base_model: bool = True


def build_encoder(
    config: TransformersConfig,
    task: str,
    stack: StackSpec,
    heads: EncoderHeads,
    unsupported_parts: tuple[UnsupportedPart, ...] = (),
) -> ModelSpec:
    """The model with the head that a task asks for."""
    count, pool = read_num_labels(config), heads.pooler
    ways = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pool)] if pool and heads.pools_base_model else [],
        "ForMaskedLM": [heads.masked_lm_head],
        "ForCausalLM": [heads.masked_lm_head],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [OutputHeadSpec("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", count, bias="learned")],
    }
    return ModelSpec(
        config.family_name,
        "encoder",
        (stack,),
        select_heads(config, task, ways),
        tuple(config.notes),
        unsupported_parts,
    )
