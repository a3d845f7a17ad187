"""What encoders after BERT have in common: sizes, a table with positions, heads that tell tokens and classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..blueprint import UnsupportedPart, BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, StackSpec, HeadTransformSpec
from .config import TransformersConfig
from .registry import select_heads, read_num_labels
from .trunk import LayerAttention


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
    return EncoderSizes(wide, heads, layers, tokens, NormSpec("layer", config.read_float("layer_norm_eps", default=defaults.eps)), feed)


def make_offset_positions(config: TransformersConfig, length: int = 512, pad: int = 1) -> PositionSpec:
    """Learned positions of which the first stands behind the row of padding, as fairseq numbers them."""
    rows, skipped = (
        config.read_int("max_position_embeddings", default=length),
        1 + config.read_int("pad_token_id", default=pad, minimum=0),
    )
    if rows <= skipped:
        config.fail(f"max_position_embeddings = {rows} leaves none behind pad_token_id", f"give more than {skipped}")
    return PositionSpec("learned", rows - skipped, skipped=skipped)


def make_encoder_stack(sizes: EncoderSizes, attentions: Iterable[LayerAttention], embedding: EmbeddingSpec | None) -> StackSpec:
    """Layers after Vaswani: a norm behind every sublayer."""
    blocks = [BlockSpec(one, feed=sizes.feed, norm=sizes.norm, placement="post") for one in attentions]
    return StackSpec.from_blocks("encoder", sizes.model, blocks, embedding=embedding)


class EncoderHeads(NamedTuple):
    """What the heads of a family are like: how rows are pooled for classes, and whether the bare model pools too."""

    pooler: HeadTransformSpec | None
    masked_lm_head: OutputHeadSpec
    pools_base_model: bool = True


def build_encoder(config: TransformersConfig, task: str, stack: StackSpec, heads: EncoderHeads, unsupported_parts: tuple[UnsupportedPart, ...] = ()) -> ModelSpec:
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
    return ModelSpec(config.family_name, "encoder", (stack,), select_heads(config, task, ways), tuple(config.notes), unsupported_parts)
