"""Encoder-decoders: BART and its relatives (mBART, Marian, Pegasus, Blenderbot, M2M-100, Whisper),
and T5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...attention.parts.dot_product import DotProduct
from ...attention.parts.relative_position_bias import T5Bias
from ...attention.presets import design
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
from .config_reader import (
    ACTIVATIONS,
    TransformersConfig,
    assemble_model,
    read_num_labels,
    register_family,
    select_heads,
)
from .decoders import read_base, register_families

# --- BART (1910.13461) and its relatives ----------------------------------------------------------


@dataclass(frozen=True)
class BartFamily:
    """How a family differs: defaults of sizes, placement of norms, positions, norms after embedding
    and last layer, biases.

    `layers` counts encoder and decoder layers. `positions` are "learned", "halves" (first all
    sines, then all cosines) or None; `skipped` rows precede the first position.
    """

    prefix: str
    tokens: int
    placement: str = "post"
    positions: str | None = "learned"
    skipped: int = 0
    embedding_norm: bool = False
    final_norm: bool = False
    layers: Sequence[int] = (12, 12)
    heads: int = 16
    hidden: int = 4096
    model: int = 1024
    length: int = 1024
    activation: str = "gelu"
    bias: str = "qkvo"
    head_bias: str = "constant"
    is_scaled: bool = False
    default_task: str = "ForConditionalGeneration"
    unsupported: str = ""


UNTIED_REASON = "would create four embedding matrices, one of them not used"
OWN_HEAD_REASON = "gives the output head its own matrix, which is not described"
WIDTH_KEYS = ("d_model", "hidden_size")


def build_bart(config: TransformersConfig, task: str, family: BartFamily) -> ModelSpec:
    """Build a model with one table of token embeddings."""
    config.require_default("tie_word_embeddings", True, UNTIED_REASON)
    tokens = config.read_int("vocab_size", default=family.tokens)
    return _build_bart(config, task, family, (tokens, tokens))


register_families("encoder_decoders", BartFamily, build_bart)
MARIAN = read_base("marian", BartFamily)
WHISPER = read_base("whisper", BartFamily)


@register_family("marian", "Marian", default_task="MTModel")
def read_marian(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Marian (1804.00344); encoder and decoder may have separate token embeddings."""
    target = config.read_optional_int("decoder_vocab_size")
    tokens = config.read_int("vocab_size", default=MARIAN.tokens)
    is_shared = config.read_bool("share_encoder_decoder_embeddings", True)
    if is_shared and target not in (None, tokens):
        config.fail(f"decoder_vocab_size = {target} differs from vocab_size", "give both alike")
    reason = UNTIED_REASON if is_shared else OWN_HEAD_REASON
    config.require_default("tie_word_embeddings", True, reason)
    table = "encoder" if is_shared else "decoder"
    return _build_bart(config, task, MARIAN, (tokens, target or tokens), table)


def _build_bart(
    config: TransformersConfig,
    task: str,
    family: BartFamily,
    tokens: tuple[int, int],
    table: str = "encoder",
) -> ModelSpec:
    """Build a model; `table` is the stack that shares its token embedding with the output head. The
    decoder shares it too if `table` is "encoder".
    """
    model = config.read_int(*WIDTH_KEYS, default=family.model)
    length = config.read_int("max_position_embeddings", default=family.length)
    positions = {
        "learned": PositionSpec("learned", length, skipped=family.skipped),
        "halves": PositionSpec("sinusoidal", length, layout="halves"),
        None: None,
    }
    is_scaled = config.read_bool("scale_embedding", family.is_scaled)
    embedding_args: dict[str, Any] = {
        "positions": positions[family.positions],
        "norm": NormSpec() if family.embedding_norm else None,
        "scale": model**0.5 if is_scaled else 1.0,
    }
    shared = "encoder" if table == "encoder" else ""
    embeddings = {
        "encoder": EmbeddingSpec(tokens[0], **embedding_args),
        "decoder": EmbeddingSpec(tokens[1], **embedding_args, table=shared),
    }
    stacks = tuple(
        _make_stack(config, family, model, name, embedding)
        for name, embedding in embeddings.items()
    )
    head = OutputHeadSpec("tokens", tokens[1], bias=family.head_bias, table=table)
    pool = HeadTransformSpec(model)
    labels = read_num_labels(config, 3)
    heads_by_task = {
        "ForConditionalGeneration": [head],
        "MTModel": [head],
        "Model": [],
        "ForSequenceClassification": [OutputHeadSpec("classes", labels, "last", pool, "learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    heads = select_heads(config, task, heads_by_task)
    unsupported = (UnsupportedPart(family.unsupported),) if family.unsupported else ()
    return assemble_model(config, "encoder-decoder", stacks, heads, unsupported)


def _make_stack(
    config: TransformersConfig,
    family: BartFamily,
    model: int,
    name: str,
    embedding: EmbeddingSpec | None,
) -> StackSpec:
    """Return the stack "encoder" or "decoder"."""
    is_encoder = name == "encoder"
    other_names = ("num_hidden_layers", "num_attention_heads") if is_encoder else ()
    default = family.layers[0 if is_encoder else 1]
    layers = config.read_num_layers(f"{name}_layers", *other_names[:1], default=default)
    heads = config.read_num_heads(f"{name}_attention_heads", *other_names[1:], default=family.heads)
    config.resolve_head_dim(model, heads)
    hidden = config.read_int(f"{name}_ffn_dim", default=family.hidden)
    act = config.read_activation("activation_function", family.activation)
    feed = FeedForwardSpec(hidden, act, bias="ud")
    full = design(model=model, heads=heads, bias=family.bias)
    causal = design(model=model, heads=heads, bias=family.bias, pattern="causal()")
    block = BlockSpec(full, feed=feed, placement=family.placement)
    if not is_encoder:
        block = replace(block, attention=causal, cross=full)
    return StackSpec.from_blocks(
        name,
        model,
        [block] * layers,
        embedding=embedding,
        norm=NormSpec() if family.final_norm else None,
    )


# --- Whisper --------------------------------------------------------------------------------------


@register_family("whisper", "Whisper", default_task="ForConditionalGeneration")
def read_whisper(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Whisper; the encoder's convolutions over spectrogram frames are not modelled."""
    model = config.read_int(*WIDTH_KEYS, default=384)
    tokens = config.read_int("vocab_size", default=WHISPER.tokens)
    bins = config.read_int("num_mel_bins", default=80)
    frames = config.read_int("max_source_positions", default=1500)
    scale = model**0.5 if config.read_bool("scale_embedding", False) else 1.0
    config.require_default("tie_word_embeddings", True, OWN_HEAD_REASON)
    reason = (
        f"audio enters by two convolutions and {frames} sinusoidal positions, which "
        "EmbeddingSpec lacks"
    )
    convolutions = (
        ("encoder.embedding.conv1", model * bins * 3 + model),
        ("encoder.embedding.conv2", model * model * 3 + model),
    )
    positions = PositionSpec("learned", config.read_int("max_target_positions", default=448))
    embedding = EmbeddingSpec(tokens, positions=positions, scale=scale)
    stacks = (
        _make_stack(config, WHISPER, model, "encoder", None),
        _make_stack(config, WHISPER, model, "decoder", embedding),
    )
    head = OutputHeadSpec("tokens", tokens, table="decoder")
    heads = select_heads(config, task, {"ForConditionalGeneration": [head], "Model": []})
    audio = UnsupportedPart(reason, convolutions)
    return assemble_model(config, "encoder-decoder", stacks, heads, (audio,))


# --- T5 -------------------------------------------------------------------------------------------


@register_family("t5", "T5", default_task="ForConditionalGeneration")
def read_t5(config: TransformersConfig, task: str) -> ModelSpec:
    """Read T5; v1.1 has gated feed-forwards and does not scale the input of the output head."""
    model = config.read_int("d_model", "hidden_size", default=512)
    tokens = config.read_int("vocab_size", default=32128)
    layers = config.read_num_layers("num_layers", "num_hidden_layers", default=6)
    deep = config.read_optional_int("num_decoder_layers", maximum=10_000) or layers
    norm = NormSpec("rms", config.read_float("layer_norm_epsilon", default=1e-6))
    buckets = config.read_int("relative_attention_num_buckets", default=32, maximum=1 << 16)
    reach = config.read_int("relative_attention_max_distance", default=128)
    design_args: dict[str, Any] = {
        "model": model,
        "heads": config.read_num_heads("num_heads", "num_attention_heads", default=8),
        "dim": config.read_head_dim("d_kv", "head_dim", default=64),
        "similarity": DotProduct(scale=1.0),
    }
    both = design(**design_args, modifiers=(T5Bias(buckets, reach, "both"),))
    back = design(**design_args, modifiers=(T5Bias(buckets, reach, "back"),), pattern="causal()")
    forms = {name: ("plain", ours) for name, ours in ACTIVATIONS.items()}
    forms |= {f"gated-{name}": ("gated", ours) for name, ours in ACTIVATIONS.items()}
    forms["gated-gelu"] = ("gated", "gelu_tanh")
    form, act = forms[config.read_choice("feed_forward_proj", "relu", forms)]
    feed = FeedForwardSpec(config.read_int("d_ff", default=2048), act, form)
    encoder = [BlockSpec(both, feed=feed, norm=norm)] * layers
    decoder = [BlockSpec(back, design(**design_args), feed, norm)] * deep
    shared = EmbeddingSpec(tokens, table="encoder")
    stacks = (
        StackSpec.from_blocks(
            "encoder", model, encoder, embedding=EmbeddingSpec(tokens), norm=norm
        ),
        StackSpec.from_blocks("decoder", model, decoder, embedding=shared, norm=norm),
    )
    # Old files scale the head's input if embeddings are tied; transformers 5 has the key
    # scale_decoder_outputs.
    tied = config.read_bool("tie_word_embeddings", True)
    scale = model**-0.5 if config.read_bool("scale_decoder_outputs", tied) else 1.0
    head = OutputHeadSpec("tokens", tokens, table="encoder", scale=scale)
    classes = OutputHeadSpec("classes", read_num_labels(config), bias="learned")
    heads_by_task = {
        "ForConditionalGeneration": [head],
        "WithLMHeadModel": [head],
        "Model": [],
        "EncoderModel": [],
        "ForTokenClassification": [classes],
    }
    kind = "encoder-decoder"
    if task in ("EncoderModel", "ForTokenClassification"):
        kind = "encoder"
        stacks = stacks[:1]
    else:
        config.require_default(
            "is_encoder_decoder", True, "removes the attention from decoder to encoder"
        )
    return assemble_model(config, kind, stacks, select_heads(config, task, heads_by_task))
