"""BART and its kin: an encoder and a decoder after Vaswani, which differ in norms and positions."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..blueprint import UnsupportedPart, BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, StackSpec, HeadTransformSpec
from ..presets import design
from .config import TransformersConfig
from .registry import select_heads, register_family, read_num_labels


class BartVariant(NamedTuple):
    """What differs: norms before sublayers or behind, positions, a norm behind the table, one at the end, biases."""

    placement: str = "post"
    positions: str = "learned"
    position_offset: int = 0
    embedding_norm: NormSpec | None = None
    final_norm: NormSpec | None = None
    layers: int = 12
    heads: int = 16
    hidden: int = 4096
    activation: str = "gelu"
    bias: str = "qkvo"


BART = BartVariant(position_offset=2, embedding_norm=NormSpec())
MBART = BartVariant("pre", position_offset=2, embedding_norm=NormSpec(), final_norm=NormSpec())
MARIAN = BartVariant(positions="halves")
PEGASUS = BartVariant("pre", positions="halves", final_norm=NormSpec())
M2M = BartVariant("pre", positions="none", final_norm=NormSpec(), activation="relu")
BLENDERBOT = BartVariant("pre", final_norm=NormSpec(), heads=32, hidden=10240)
UNTIED_REASON = "would keep four tables of tokens, of which one is read by nobody"


@register_family("bart", "Bart", default_task="ForConditionalGeneration")
def read_bart(config: TransformersConfig, task: str) -> ModelSpec:
    """Two rows of the table of positions stand before the first (1910.13461)."""
    return _build_bart(config, task, BART, tokens=50265)


@register_family("mbart", "MBart", default_task="ForConditionalGeneration")
def read_mbart(config: TransformersConfig, task: str) -> ModelSpec:
    """BART with norms before sublayers and one at the end (2001.08210)."""
    return _build_bart(config, task, MBART, tokens=50265)


@register_family("marian", "Marian", default_task="MTModel")
def read_marian(config: TransformersConfig, task: str) -> ModelSpec:
    """Sines, then cosines, in the place of a table of positions (1804.00344)."""
    own = config.read_optional_int("decoder_vocab_size")
    if not config.read_bool("share_encoder_decoder_embeddings", True):
        return _build_untied_marian(config, task, own)
    if own not in (None, config.read_int("vocab_size", default=58101)):
        config.fail(f"decoder_vocab_size = {own} of a table that both share", "give that of vocab_size")
    return _build_bart(config, task, MARIAN, tokens=58101)


@register_family("pegasus", "Pegasus", default_task="ForConditionalGeneration")
def read_pegasus(config: TransformersConfig, task: str) -> ModelSpec:
    """Sines, then cosines, and norms before sublayers (1912.08777)."""
    return _build_bart(config, task, PEGASUS, tokens=50265)


@register_family("blenderbot", "Blenderbot", default_task="ForConditionalGeneration")
def read_blenderbot(config: TransformersConfig, task: str) -> ModelSpec:
    """Two layers that read, twenty-four that write (2004.13637)."""
    deep = {"encoder_layers": 2, "decoder_layers": 24, "d_model": 2560, "max_position_embeddings": 128}
    inner = TransformersConfig(deep | dict(config.values), config.source)
    inner.family_name, inner.notes = config.family_name, config.notes
    return _build_bart(inner, task, BLENDERBOT, tokens=8008)


@register_family("m2m_100", "M2M100", default_task="ForConditionalGeneration")
def read_m2m(config: TransformersConfig, task: str) -> ModelSpec:
    """Its sines have frequencies of their own, and no bias stands over its tokens (2010.11125)."""
    why = "positions are sines, then cosines, whose last frequency is 1 / 10,000, from 2 on, which no word says"
    return _build_bart(config, task, M2M, tokens=128112, beyond=(UnsupportedPart(why),))


def read_width(config: TransformersConfig) -> int:
    """How wide it is."""
    return config.read_int("d_model", "hidden_size", default=1024)


def _build_bart(config: TransformersConfig, task: str, kin: BartVariant, tokens: int, beyond: tuple[UnsupportedPart, ...] = ()) -> ModelSpec:
    model, count = read_width(config), config.read_int("vocab_size", default=tokens)
    config.require_default("tie_word_embeddings", True, UNTIED_REASON)
    said = _embedding_args(config, kin, model)
    tables = (("encoder", EmbeddingSpec(count, **said)), ("decoder", EmbeddingSpec(count, **said, table="encoder")))
    stacks = tuple(_make_stack(config, kin, model, name, table) for name, table in tables)
    over = OutputHeadSpec("tokens", count, bias="" if config.family_name == "m2m_100" else "constant", table="encoder")
    return ModelSpec(config.family_name, "encoder-decoder", stacks, _select_heads(config, task, over, model), tuple(config.notes), beyond)


def _build_untied_marian(config: TransformersConfig, task: str, tokens: int | None) -> ModelSpec:
    """A Marian whose stacks have each a table of their own; what it writes is read off the second."""
    model, first = read_width(config), config.read_int("vocab_size", default=58101)
    config.require_default("tie_word_embeddings", True, "would give the head a table of its own, which is not described")
    said = _embedding_args(config, MARIAN, model)
    tables = (("encoder", EmbeddingSpec(first, **said)), ("decoder", EmbeddingSpec(tokens or first, **said)))
    stacks = tuple(_make_stack(config, MARIAN, model, name, table) for name, table in tables)
    over = OutputHeadSpec("tokens", tokens or first, bias="constant", table="decoder")
    return ModelSpec(config.family_name, "encoder-decoder", stacks, _select_heads(config, task, over, model), tuple(config.notes))


def _embedding_args(config: TransformersConfig, kin: BartVariant, model: int) -> dict[str, Any]:
    """Positions, norm and scale of both tables."""
    length = config.read_int("max_position_embeddings", default=1024)
    positions = {
        "learned": PositionSpec("learned", length, skipped=kin.position_offset),
        "halves": PositionSpec("sinusoidal", length, layout="halves"),
        "none": None,
    }
    scale = model**0.5 if config.read_bool("scale_embedding", config.family_name == "m2m_100") else 1.0
    return {"positions": positions[kin.positions], "norm": kin.embedding_norm, "scale": scale}


def _make_stack(config: TransformersConfig, kin: BartVariant, model: int, name: str, table: EmbeddingSpec) -> StackSpec:
    return StackSpec.from_blocks(name, model, make_bart_blocks(config, kin, model, name), embedding=table, norm=kin.final_norm)


def make_bart_blocks(config: TransformersConfig, variant: BartVariant, model: int, stack: str) -> list[BlockSpec]:
    """The layers of one stack."""
    layers = config.read_num_layers(f"{stack}_layers", default=variant.layers)
    heads = config.read_num_heads(f"{stack}_attention_heads", default=variant.heads)
    config.resolve_head_dim(model, heads)
    hidden = config.read_int(f"{stack}_ffn_dim", default=variant.hidden)
    feed = FeedForwardSpec(hidden, config.read_activation("activation_function", variant.activation), bias="ud")
    every = design(model=model, heads=heads, bias=variant.bias)
    if stack == "encoder":
        return [BlockSpec(every, feed=feed, placement=variant.placement)] * layers
    past = design(model=model, heads=heads, bias=variant.bias, pattern="causal()")
    return [BlockSpec(past, every, feed, placement=variant.placement)] * layers


def _select_heads(config: TransformersConfig, task: str, over: OutputHeadSpec, model: int) -> tuple[OutputHeadSpec, ...]:
    classes = OutputHeadSpec("classes", read_num_labels(config, 3), "last", HeadTransformSpec(model), "learned")
    ways = {
        "ForConditionalGeneration": [over],
        "MTModel": [over],
        "Model": [],
        "ForSequenceClassification": [classes],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    return select_heads(config, task, ways)
