"""Builders shared by many families: sizes, attentions and blocks, and the decoder or encoder around
them.
"""

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
from .config_reader import (
    TransformersConfig,
    assemble_model,
    read_num_labels,
    select_decoder_heads,
    select_heads,
)

LayerKind = TypeVar("LayerKind", bound=Hashable)
LayerAttention = AttentionSpec | ApproximateAttention


class DecoderSizes(NamedTuple):
    """Model width, query heads, key-value heads and head dimension of a decoder."""

    model: int
    heads: int
    kv: int
    dim: int

    @property
    def design_args(self) -> dict[str, Any]:
        """The sizes as keyword arguments of `design`."""
        return self._asdict()


def read_decoder_sizes(
    config: TransformersConfig,
    model: int,
    heads: int,
    kv: int | None = None,
    dim: int | None = None,
) -> DecoderSizes:
    """Read the sizes from the usual keys; the arguments are the family's defaults."""
    width = config.read_int("hidden_size", default=model)
    num_heads = config.read_num_heads("num_attention_heads", default=heads)
    return DecoderSizes(
        width,
        num_heads,
        config.read_num_kv_heads(num_heads, default=kv),
        config.resolve_head_dim(width, num_heads, "head_dim", default=dim),
    )


def read_num_layers(config: TransformersConfig, default: int) -> int:
    """Return `num_hidden_layers`."""
    return config.read_num_layers("num_hidden_layers", default=default)


def read_max_length(config: TransformersConfig, default: int) -> int:
    """Return `max_position_embeddings`."""
    return config.read_int("max_position_embeddings", default=default)


def make_attentions(
    kinds: Iterable[LayerKind], make: Callable[[LayerKind], LayerAttention]
) -> list[LayerAttention]:
    """Return the attention of each layer from its kind; layers of one kind share one spec."""
    layer_kinds = list(kinds)
    attention_of_kind = {kind: make(kind) for kind in dict.fromkeys(layer_kinds)}
    return [attention_of_kind[kind] for kind in layer_kinds]


def make_experts(
    config: TransformersConfig, expert: FeedForwardSpec, count: int, active: int
) -> ExpertsSpec:
    """Return a mixture of experts with softmax routing, over all experts unless `norm_topk_prob` is
    set.
    """
    normalized = config.read_bool("norm_topk_prob", False)
    num_experts = config.read_int("num_experts", "num_local_experts", default=count)
    chosen = config.read_int("num_experts_per_tok", default=active, maximum=num_experts)
    return ExpertsSpec(expert, num_experts, chosen, scores="chosen" if normalized else "softmax")


class DecoderEnds(NamedTuple):
    """The parts of a decoder outside its blocks: token and position embeddings, their norm, the
    language-model head.
    """

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
    """Return a decoder of these blocks; its width is the width of their attention specs."""
    (width,) = {spec.model for block in blocks for spec in block.attention_specs.values()}
    table = EmbeddingSpec(
        ends.vocab_size,
        positions=ends.positions,
        norm=ends.embedding_norm,
        scale=ends.embedding_scale,
    )
    stack = StackSpec.from_blocks("decoder", width, blocks, embedding=table, norm=final_norm)
    tied = "decoder" if config.read_bool("tie_word_embeddings", ends.tied) else ""
    head = OutputHeadSpec(
        "tokens",
        ends.vocab_size,
        bias=ends.head_bias,
        table=tied,
        scale=ends.logit_scale,
        cap=ends.logit_softcap,
    )
    return assemble_model(
        config, "decoder", (stack,), select_decoder_heads(config, task, head), unsupported_parts
    )


def make_blocks(
    attentions: Iterable[LayerAttention],
    feed: FeedForwardSpec | ExpertsSpec,
    norm: NormSpec,
    **block_args: Any,
) -> list[BlockSpec]:
    """Return one block per attention, equal in all else; `block_args` are further arguments of
    `BlockSpec`.
    """
    return [BlockSpec(attention, feed=feed, norm=norm, **block_args) for attention in attentions]


# --- Encoders like BERT ---------------------------------------------------------------------------


class EncoderSizes(NamedTuple):
    """Sizes, norm and feed-forward of an encoder like BERT."""

    model: int
    heads: int
    layers: int
    vocab_size: int
    norm: NormSpec
    feed: FeedForwardSpec

    @property
    def activation(self) -> str:
        """The activation of the feed-forwards."""
        return self.feed.activation


class EncoderDefaults(NamedTuple):
    """Defaults for keys missing in a config; without arguments those of BERT."""

    model: int = 768
    heads: int = 12
    layers: int = 12
    vocab_size: int = 30522
    hidden: int = 3072
    activation: str = "gelu"
    eps: float = 1e-12


BERT_DEFAULTS = EncoderDefaults()


def read_encoder_sizes(
    config: TransformersConfig, defaults: EncoderDefaults = BERT_DEFAULTS
) -> EncoderSizes:
    """Read the sizes of an encoder from BERT's keys."""
    width = config.read_int("hidden_size", default=defaults.model)
    heads = config.read_num_heads("num_attention_heads", default=defaults.heads)
    config.resolve_head_dim(width, heads)
    config.require_default(
        "add_cross_attention",
        False,
        "adds cross-attention to a second model, which is not described",
    )
    hidden = config.read_int("intermediate_size", default=defaults.hidden)
    feed = FeedForwardSpec(
        hidden, config.read_activation("hidden_act", defaults.activation), bias="ud"
    )
    layers = config.read_num_layers("num_hidden_layers", default=defaults.layers)
    tokens = config.read_int("vocab_size", default=defaults.vocab_size)
    return EncoderSizes(
        width,
        heads,
        layers,
        tokens,
        NormSpec("layer", config.read_float("layer_norm_eps", default=defaults.eps)),
        feed,
    )


def make_offset_positions(config: TransformersConfig) -> PositionSpec:
    """Return learned positions numbered as in fairseq: the first position uses row pad_token_id + 1
    of the table.
    """
    rows = config.read_int("max_position_embeddings", default=512)
    skipped = 1 + config.read_int("pad_token_id", default=1, minimum=0)
    if rows <= skipped:
        config.fail(
            f"max_position_embeddings = {rows} leaves no positions after pad_token_id",
            f"give more than {skipped}",
        )
    return PositionSpec("learned", rows - skipped, skipped=skipped)


def make_encoder_stack(
    sizes: EncoderSizes, attentions: Iterable[LayerAttention], embedding: EmbeddingSpec | None
) -> StackSpec:
    """Return an encoder stack with post-norm layers, as in the original
    Transformer (1706.03762).
    """
    blocks = [
        BlockSpec(attention, feed=sizes.feed, norm=sizes.norm, placement="post")
        for attention in attentions
    ]
    return StackSpec.from_blocks("encoder", sizes.model, blocks, embedding=embedding)


class EncoderHeads(NamedTuple):
    """Heads of an encoder family: pooler, masked-LM head, and whether the model without a task has
    the pooler.
    """

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
    """Return an encoder with the output heads of a task."""
    count, pool = read_num_labels(config), heads.pooler
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pool)]
        if pool and heads.pools_base_model
        else [],
        "ForMaskedLM": [heads.masked_lm_head],
        "ForCausalLM": [heads.masked_lm_head],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [OutputHeadSpec("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", count, bias="learned")],
    }
    return assemble_model(
        config, "encoder", (stack,), select_heads(config, task, heads_by_task), unsupported_parts
    )
