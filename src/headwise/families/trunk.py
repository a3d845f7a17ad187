"""What decoders have in common, however their layers are put together: sizes, and ends around a row of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..blueprint import UnsupportedPart, BlockSpec, FeedForwardSpec, EmbeddingSpec, ExpertsSpec, OutputHeadSpec, ModelSpec, ApproximateAttention, NormSpec, PositionSpec, StackSpec
from ..spec import AttentionSpec
from .config import TransformersConfig
from .registry import select_decoder_heads

LayerKind = TypeVar("Kind", bound=Hashable)
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


def read_decoder_sizes(config: TransformersConfig, model: int, heads: int, kv: int | None = None, dim: int | None = None) -> DecoderSizes:
    """Those of a config in the words that most use, or the usual ones."""
    wide = config.read_int("hidden_size", default=model)
    asked = config.read_num_heads("num_attention_heads", default=heads)
    return DecoderSizes(wide, asked, config.read_num_kv_heads(asked, default=kv), config.resolve_head_dim(wide, asked, "head_dim", default=dim))


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


def make_experts(config: TransformersConfig, expert: FeedForwardSpec, count: int, active: int, normalized_over: str) -> ExpertsSpec:
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
    config: TransformersConfig, task: str, blocks: Sequence[BlockSpec], final_norm: NormSpec | None, ends: DecoderEnds, unsupported_parts: tuple[UnsupportedPart, ...] = ()
) -> ModelSpec:
    """A decoder of these blocks, whose width is that of their attention."""
    (wide,) = {spec.model for block in blocks for spec in block.attention_specs.values()}
    table = EmbeddingSpec(ends.vocab_size, positions=ends.positions, norm=ends.embedding_norm, scale=ends.embedding_scale)
    stack = StackSpec.from_blocks("decoder", wide, blocks, embedding=table, norm=final_norm)
    tied = "decoder" if config.read_bool("tie_word_embeddings", ends.tied) else ""
    head = OutputHeadSpec("tokens", ends.vocab_size, bias=ends.head_bias, table=tied, scale=ends.logit_scale, cap=ends.logit_softcap)
    return ModelSpec(config.family_name, "decoder", (stack,), select_decoder_heads(config, task, head), tuple(config.notes), unsupported_parts)


def make_blocks(attentions: Iterable[LayerAttention], feed: FeedForwardSpec | ExpertsSpec, norm: NormSpec, **said: Any) -> list[BlockSpec]:
    """A block for each attention, otherwise alike."""
    return [BlockSpec(attention, feed=feed, norm=norm, **said) for attention in attentions]
