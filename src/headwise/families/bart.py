"""BART and its kin: an encoder and a decoder after Vaswani, which differ in norms and positions."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
    UnsupportedPart,
)
from ..presets import design
from .config_reader import TransformersConfig, read_num_labels, register_family, select_heads
from .weight_names import TensorLocation, WeightNames


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


def _build_bart(
    config: TransformersConfig, task: str, kin: BartVariant, tokens: int, beyond: tuple[UnsupportedPart, ...] = ()
) -> ModelSpec:
    model, count = read_width(config), config.read_int("vocab_size", default=tokens)
    config.require_default("tie_word_embeddings", True, UNTIED_REASON)
    said = _embedding_args(config, kin, model)
    tables = (("encoder", EmbeddingSpec(count, **said)), ("decoder", EmbeddingSpec(count, **said, table="encoder")))
    stacks = tuple(_make_stack(config, kin, model, name, table) for name, table in tables)
    over = OutputHeadSpec("tokens", count, bias="" if config.family_name == "m2m_100" else "constant", table="encoder")
    return ModelSpec(
        config.family_name,
        "encoder-decoder",
        stacks,
        _select_heads(config, task, over, model),
        tuple(config.notes),
        beyond,
    )


def _build_untied_marian(config: TransformersConfig, task: str, tokens: int | None) -> ModelSpec:
    """A Marian whose stacks have each a table of their own; what it writes is read off the second."""
    model, first = read_width(config), config.read_int("vocab_size", default=58101)
    config.require_default(
        "tie_word_embeddings", True, "would give the head a table of its own, which is not described"
    )
    said = _embedding_args(config, MARIAN, model)
    tables = (("encoder", EmbeddingSpec(first, **said)), ("decoder", EmbeddingSpec(tokens or first, **said)))
    stacks = tuple(_make_stack(config, MARIAN, model, name, table) for name, table in tables)
    over = OutputHeadSpec("tokens", tokens or first, bias="constant", table="decoder")
    return ModelSpec(
        config.family_name, "encoder-decoder", stacks, _select_heads(config, task, over, model), tuple(config.notes)
    )


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
    return StackSpec.from_blocks(
        name, model, make_bart_blocks(config, kin, model, name), embedding=table, norm=kin.final_norm
    )


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


def _select_heads(
    config: TransformersConfig, task: str, over: OutputHeadSpec, model: int
) -> tuple[OutputHeadSpec, ...]:
    classes = OutputHeadSpec("classes", read_num_labels(config, 3), "last", HeadTransformSpec(model), "learned")
    ways = {
        "ForConditionalGeneration": [over],
        "MTModel": [over],
        "Model": [],
        "ForSequenceClassification": [classes],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    return select_heads(config, task, ways)


# --- BART and its kin ----------------------------------------------------------------------------------


def name_attention(own_prefix: str, file_prefix: str) -> dict[str, str]:
    """The rows of one attention."""
    sides = {f"project.{side}": f"{side}_proj" for side in "qkv"} | {"output.o": "out_proj"}
    matrices = {f"{own_prefix}.{name}": f"{file_prefix}.{other}.weight" for name, other in sides.items()}
    return matrices | {f"{own_prefix}.{name}_bias": f"{file_prefix}.{other}.bias" for name, other in sides.items()}


def name_norm(own_prefix: str, file_prefix: str) -> dict[str, str]:
    """The rows of one norm."""
    return {f"{own_prefix}.{name}": f"{file_prefix}.{name}" for name in ("weight", "bias")}


def name_stack(name: str) -> dict[str, str]:
    """The rows of one stack."""
    ours, layer = f"{name}.{{layer}}", f".{name}.layers.{{layer}}"
    return {
        f"{name}.embedding.positions": f".{name}.embed_positions.weight",
        **name_norm(f"{name}.embedding.norm", f".{name}.layernorm_embedding"),
        **name_norm(f"{name}.norm", f".{name}.layer_norm"),
        **name_attention(f"{ours}.attention", f"{layer}.self_attn"),
        **name_norm(f"{ours}.attention_norm", f"{layer}.self_attn_layer_norm"),
        f"{ours}.feed.up": f"{layer}.fc1.weight",
        f"{ours}.feed.up_bias": f"{layer}.fc1.bias",
        f"{ours}.feed.down": f"{layer}.fc2.weight",
        f"{ours}.feed.down_bias": f"{layer}.fc2.bias",
        **name_norm(f"{ours}.feed_norm", f"{layer}.final_layer_norm"),
    }


BART_WEIGHTS = WeightNames(
    families=("bart", "mbart", "marian", "pegasus"),
    prefixes=("model", ""),
    locations={
        "encoder.embedding.tokens": ".shared.weight",
        "decoder.embedding.tokens": ".decoder.embed_tokens.weight",
        **name_stack("encoder"),
        **name_stack("decoder"),
        **name_attention("decoder.{layer}.cross", ".decoder.layers.{layer}.encoder_attn"),
        **name_norm("decoder.{layer}.cross_norm", ".decoder.layers.{layer}.encoder_attn_layer_norm"),
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": TensorLocation("final_logits_bias", "one output", {"one": 0}, {"one": 1}),
        "head.classes.transform": "classification_head.dense.weight",
        "head.classes.transform_bias": "classification_head.dense.bias",
        "head.classes.weight": "classification_head.out_proj.weight",
        "head.classes.bias": "classification_head.out_proj.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    tied_names={".encoder.embed_tokens.weight": ".shared.weight"},
    ignored=(r"(encoder|decoder)\.version$", r"^model\.(encoder|decoder)\.embed_positions\.weight$"),
)

# --- Whisper -------------------------------------------------------------------------------------------

WHISPER = BartVariant("pre", final_norm=NormSpec(), layers=4, heads=6, hidden=1536, bias="qvo")


@register_family("whisper", "Whisper", default_task="ForConditionalGeneration")
def read_whisper(config: TransformersConfig, task: str) -> ModelSpec:
    """The frames of a spectrogram, two to a position."""
    model = config.read_int("d_model", "hidden_size", default=384)
    tokens, bins = config.read_int("vocab_size", default=51865), config.read_int("num_mel_bins", default=80)
    frames = config.read_int("max_source_positions", default=1500)
    scale = model**0.5 if config.read_bool("scale_embedding", False) else 1.0
    config.require_default("tie_word_embeddings", True, "gives the head a table of its own, which is not described")
    why = f"sound enters by two convolutions over time and {frames} positions of sines, which no word says"
    sizes = {"conv1": model * bins * 3 + model, "conv2": model * model * 3 + model}
    sound = UnsupportedPart(why, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items()))

    positions = PositionSpec("learned", config.read_int("max_target_positions", default=448))
    table = EmbeddingSpec(tokens, positions=positions, scale=scale)
    reads = StackSpec.from_blocks(
        "encoder", model, make_bart_blocks(config, WHISPER, model, "encoder"), norm=WHISPER.final_norm
    )
    writes = StackSpec.from_blocks(
        "decoder", model, make_bart_blocks(config, WHISPER, model, "decoder"), embedding=table, norm=WHISPER.final_norm
    )
    ways = {"ForConditionalGeneration": [OutputHeadSpec("tokens", tokens, table="decoder")], "Model": []}
    heads = select_heads(config, task, ways)
    return ModelSpec("whisper", "encoder-decoder", (reads, writes), heads, tuple(config.notes), (sound,))
