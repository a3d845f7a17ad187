"""Encoder-decoders: BART and its relatives (mBART, Marian, Pegasus, Blenderbot, M2M-100, Whisper),
and T5.
"""

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
from ..parts.dot_product import Dot
from ..parts.relative_position_bias import T5Bias
from ..presets import design
from .config_reader import (
    ACTIVATIONS,
    TransformersConfig,
    assemble_model,
    read_num_labels,
    register_family,
    select_heads,
)
from .weight_names import TensorLocation, WeightNames


class BartVariant(NamedTuple):
    """How the families differ: placement of norms, positions, norms after embedding and last layer,
    sizes, biases.
    """

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
UNTIED_REASON = "would create four embedding matrices, one of them not used"


@register_family("bart", "Bart", default_task="ForConditionalGeneration")
def read_bart(config: TransformersConfig, task: str) -> ModelSpec:
    """Read BART (1910.13461); its position table has two rows before the first position."""
    return _build_bart(config, task, BART, tokens=50265)


@register_family("mbart", "MBart", default_task="ForConditionalGeneration")
def read_mbart(config: TransformersConfig, task: str) -> ModelSpec:
    """Read mBART (2001.08210): BART with pre-norm layers and a final norm."""
    return _build_bart(config, task, MBART, tokens=50265)


@register_family("marian", "Marian", default_task="MTModel")
def read_marian(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Marian (1804.00344): sinusoidal positions, first all sines, then all cosines."""
    decoder_tokens = config.read_optional_int("decoder_vocab_size")
    if not config.read_bool("share_encoder_decoder_embeddings", True):
        return _build_untied_marian(config, task, decoder_tokens)
    if decoder_tokens not in (None, config.read_int("vocab_size", default=58101)):
        config.fail(
            f"decoder_vocab_size = {decoder_tokens} differs from vocab_size", "give both alike"
        )
    return _build_bart(config, task, MARIAN, tokens=58101)


@register_family("pegasus", "Pegasus", default_task="ForConditionalGeneration")
def read_pegasus(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Pegasus (1912.08777): sinusoidal positions as in Marian, pre-norm layers."""
    return _build_bart(config, task, PEGASUS, tokens=50265)


@register_family("blenderbot", "Blenderbot", default_task="ForConditionalGeneration")
def read_blenderbot(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Blenderbot (2004.13637): two encoder layers and 24 decoder layers by default."""
    deep = {
        "encoder_layers": 2,
        "decoder_layers": 24,
        "d_model": 2560,
        "max_position_embeddings": 128,
    }
    inner = TransformersConfig(deep | dict(config.values), config.source)
    inner.family_name, inner.notes = config.family_name, config.notes
    return _build_bart(inner, task, BLENDERBOT, tokens=8008)


@register_family("m2m_100", "M2M100", default_task="ForConditionalGeneration")
def read_m2m(config: TransformersConfig, task: str) -> ModelSpec:
    """Read M2M-100 (2010.11125); its sinusoids use other frequencies, its
    output head has no bias.
    """
    reason = (
        "positions count from 2 and are sinusoids with 1 / 10,000 as the last frequency, "
        "which PositionSpec lacks"
    )
    return _build_bart(config, task, M2M, tokens=128112, unsupported=(UnsupportedPart(reason),))


def read_width(config: TransformersConfig) -> int:
    """Return the model width."""
    return config.read_int("d_model", "hidden_size", default=1024)


def _build_bart(
    config: TransformersConfig,
    task: str,
    variant: BartVariant,
    tokens: int,
    unsupported: tuple[UnsupportedPart, ...] = (),
) -> ModelSpec:
    model, count = read_width(config), config.read_int("vocab_size", default=tokens)
    config.require_default("tie_word_embeddings", True, UNTIED_REASON)
    embedding_args = _embedding_args(config, variant, model)
    tables = (
        ("encoder", EmbeddingSpec(count, **embedding_args)),
        ("decoder", EmbeddingSpec(count, **embedding_args, table="encoder")),
    )
    stacks = tuple(_make_stack(config, variant, model, name, table) for name, table in tables)
    token_head = OutputHeadSpec(
        "tokens", count, bias="" if config.family_name == "m2m_100" else "constant", table="encoder"
    )
    return assemble_model(
        config,
        "encoder-decoder",
        stacks,
        _select_heads(config, task, token_head, model),
        unsupported,
    )


def _build_untied_marian(config: TransformersConfig, task: str, tokens: int | None) -> ModelSpec:
    """Build a Marian with separate token embeddings; the output head is tied to the decoder's."""
    model, first = read_width(config), config.read_int("vocab_size", default=58101)
    config.require_default(
        "tie_word_embeddings", True, "gives the output head its own matrix, which is not described"
    )
    embedding_args = _embedding_args(config, MARIAN, model)
    tables = (
        ("encoder", EmbeddingSpec(first, **embedding_args)),
        ("decoder", EmbeddingSpec(tokens or first, **embedding_args)),
    )
    stacks = tuple(_make_stack(config, MARIAN, model, name, table) for name, table in tables)
    token_head = OutputHeadSpec("tokens", tokens or first, bias="constant", table="decoder")
    return assemble_model(
        config, "encoder-decoder", stacks, _select_heads(config, task, token_head, model)
    )


def _embedding_args(config: TransformersConfig, variant: BartVariant, model: int) -> dict[str, Any]:
    """Positions, norm and scale of both embeddings."""
    length = config.read_int("max_position_embeddings", default=1024)
    positions = {
        "learned": PositionSpec("learned", length, skipped=variant.position_offset),
        "halves": PositionSpec("sinusoidal", length, layout="halves"),
        "none": None,
    }
    scale = (
        model**0.5 if config.read_bool("scale_embedding", config.family_name == "m2m_100") else 1.0
    )
    return {
        "positions": positions[variant.positions],
        "norm": variant.embedding_norm,
        "scale": scale,
    }


def _make_stack(
    config: TransformersConfig, variant: BartVariant, model: int, name: str, table: EmbeddingSpec
) -> StackSpec:
    return StackSpec.from_blocks(
        name,
        model,
        make_bart_blocks(config, variant, model, name),
        embedding=table,
        norm=variant.final_norm,
    )


def make_bart_blocks(
    config: TransformersConfig, variant: BartVariant, model: int, stack: str
) -> list[BlockSpec]:
    """Return the layers of one stack, "encoder" or "decoder"."""
    other_names = ("num_hidden_layers", "num_attention_heads") if stack == "encoder" else ()
    layers = config.read_num_layers(f"{stack}_layers", *other_names[:1], default=variant.layers)
    heads = config.read_num_heads(
        f"{stack}_attention_heads", *other_names[1:], default=variant.heads
    )
    config.resolve_head_dim(model, heads)
    hidden = config.read_int(f"{stack}_ffn_dim", default=variant.hidden)
    feed = FeedForwardSpec(
        hidden, config.read_activation("activation_function", variant.activation), bias="ud"
    )
    full_attention = design(model=model, heads=heads, bias=variant.bias)
    if stack == "encoder":
        return [BlockSpec(full_attention, feed=feed, placement=variant.placement)] * layers
    causal_attention = design(model=model, heads=heads, bias=variant.bias, pattern="causal()")
    return [BlockSpec(causal_attention, full_attention, feed, placement=variant.placement)] * layers


def _select_heads(
    config: TransformersConfig, task: str, token_head: OutputHeadSpec, model: int
) -> tuple[OutputHeadSpec, ...]:
    classes = OutputHeadSpec(
        "classes", read_num_labels(config, 3), "last", HeadTransformSpec(model), "learned"
    )
    heads_by_task = {
        "ForConditionalGeneration": [token_head],
        "MTModel": [token_head],
        "Model": [],
        "ForSequenceClassification": [classes],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    return select_heads(config, task, heads_by_task)


# --- Weight names of BART and its relatives -------------------------------------------------------


def name_attention(own_prefix: str, file_prefix: str) -> dict[str, str]:
    """Map the tensors of one attention to their stored names."""
    sides = {f"project.{side}": f"{side}_proj" for side in "qkv"} | {"output.o": "out_proj"}
    matrices = {
        f"{own_prefix}.{name}": f"{file_prefix}.{other}.weight" for name, other in sides.items()
    }
    return matrices | {
        f"{own_prefix}.{name}_bias": f"{file_prefix}.{other}.bias" for name, other in sides.items()
    }


def name_norm(own_prefix: str, file_prefix: str) -> dict[str, str]:
    """Map weight and bias of one norm to their stored names."""
    return {f"{own_prefix}.{name}": f"{file_prefix}.{name}" for name in ("weight", "bias")}


def name_stack(name: str) -> dict[str, str]:
    """Map the tensors of one stack to their stored names."""
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
        **name_norm(
            "decoder.{layer}.cross_norm", ".decoder.layers.{layer}.encoder_attn_layer_norm"
        ),
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": TensorLocation(
            "final_logits_bias", "one output", {"one": 0}, {"one": 1}
        ),
        "head.classes.transform": "classification_head.dense.weight",
        "head.classes.transform_bias": "classification_head.dense.bias",
        "head.classes.weight": "classification_head.out_proj.weight",
        "head.classes.bias": "classification_head.out_proj.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    tied_names={".encoder.embed_tokens.weight": ".shared.weight"},
    ignored=(
        r"(encoder|decoder)\.version$",
        r"^model\.(encoder|decoder)\.embed_positions\.weight$",
    ),
)

# --- Whisper --------------------------------------------------------------------------------------

WHISPER = BartVariant("pre", final_norm=NormSpec(), layers=4, heads=6, hidden=1536, bias="qvo")


@register_family("whisper", "Whisper", default_task="ForConditionalGeneration")
def read_whisper(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Whisper; the encoder's convolutions over spectrogram frames are not modelled."""
    model = config.read_int("d_model", "hidden_size", default=384)
    tokens, bins = (
        config.read_int("vocab_size", default=51865),
        config.read_int("num_mel_bins", default=80),
    )
    frames = config.read_int("max_source_positions", default=1500)
    scale = model**0.5 if config.read_bool("scale_embedding", False) else 1.0
    config.require_default(
        "tie_word_embeddings", True, "gives the output head its own matrix, which is not described"
    )
    reason = (
        f"audio enters by two convolutions and {frames} sinusoidal positions, which "
        "EmbeddingSpec lacks"
    )
    sizes = {"conv1": model * bins * 3 + model, "conv2": model * model * 3 + model}
    audio = UnsupportedPart(
        reason, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items())
    )

    positions = PositionSpec("learned", config.read_int("max_target_positions", default=448))
    table = EmbeddingSpec(tokens, positions=positions, scale=scale)
    encoder = StackSpec.from_blocks(
        "encoder",
        model,
        make_bart_blocks(config, WHISPER, model, "encoder"),
        norm=WHISPER.final_norm,
    )
    decoder = StackSpec.from_blocks(
        "decoder",
        model,
        make_bart_blocks(config, WHISPER, model, "decoder"),
        embedding=table,
        norm=WHISPER.final_norm,
    )
    heads_by_task = {
        "ForConditionalGeneration": [OutputHeadSpec("tokens", tokens, table="decoder")],
        "Model": [],
    }
    heads = select_heads(config, task, heads_by_task)
    return ModelSpec(
        "whisper", "encoder-decoder", (encoder, decoder), heads, tuple(config.notes), (audio,)
    )


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
    heads = config.read_num_heads("num_heads", "num_attention_heads", default=8)
    design_args: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "dim": config.read_head_dim("d_kv", "head_dim", default=64),
    }
    design_args |= {"similarity": Dot(scale=1.0)}

    both = design(**design_args, modifiers=(T5Bias(buckets, reach, "both"),))
    back = design(**design_args, modifiers=(T5Bias(buckets, reach, "back"),), pattern="causal()")
    feed = _read_feed_forward(config)
    encoder = [BlockSpec(both, feed=feed, norm=norm)] * layers
    decoder = [BlockSpec(back, design(**design_args), feed, norm)] * deep
    stacks = (
        StackSpec.from_blocks(
            "encoder", model, encoder, embedding=EmbeddingSpec(tokens), norm=norm
        ),
        StackSpec.from_blocks(
            "decoder", model, decoder, embedding=EmbeddingSpec(tokens, table="encoder"), norm=norm
        ),
    )
    # Old files scale the head's input if embeddings are tied; transformers 5 has the key
    # scale_decoder_outputs.
    tied = config.read_bool("tie_word_embeddings", True)
    scale = model**-0.5 if config.read_bool("scale_decoder_outputs", tied) else 1.0
    classes = OutputHeadSpec("classes", read_num_labels(config), bias="learned")
    heads_by_task = {
        "ForConditionalGeneration": [
            OutputHeadSpec("tokens", tokens, table="encoder", scale=scale)
        ],
        "WithLMHeadModel": [OutputHeadSpec("tokens", tokens, table="encoder", scale=scale)],
        "Model": [],
        "EncoderModel": [],
        "ForTokenClassification": [classes],
    }
    kind, num_stacks = (
        ("encoder", 1)
        if task in ("EncoderModel", "ForTokenClassification")
        else ("encoder-decoder", 2)
    )
    if num_stacks == 2:
        config.require_default(
            "is_encoder_decoder", True, "removes the attention from decoder to encoder"
        )
    return ModelSpec(
        "t5",
        kind,
        stacks[:num_stacks],
        select_heads(config, task, heads_by_task),
        tuple(config.notes),
    )


def _read_feed_forward(config: TransformersConfig) -> FeedForwardSpec:
    """Read feed_forward_proj: "relu", or "gated-gelu", which means the tanh
    approximation of GELU.
    """
    forms = {name: ("plain", ours) for name, ours in ACTIVATIONS.items()}
    forms |= {f"gated-{name}": ("gated", ours) for name, ours in ACTIVATIONS.items()}
    forms["gated-gelu"] = ("gated", "gelu_tanh")
    form, act = forms[config.read_choice("feed_forward_proj", "relu", forms)]
    return FeedForwardSpec(config.read_int("d_ff", default=2048), act, form)


# --- T5 -------------------------------------------------------------------------------------------

OWN_LAYER, FILE_BLOCK = "{stack}.{{layer}}", "{stack}.block.{{layer}}.layer"


def name_t5_stack(name: str, feed_forward_index: int) -> dict[str, str]:
    """Map the tensors of one stack to their stored names; the feed-forward is sublayer
    `feed_forward_index`.
    """
    ours, block = OWN_LAYER.format(stack=name), FILE_BLOCK.format(stack=name)
    return {
        f"{ours}.attention.project.q": f"{block}.0.SelfAttention.q.weight",
        f"{ours}.attention.project.k": f"{block}.0.SelfAttention.k.weight",
        f"{ours}.attention.project.v": f"{block}.0.SelfAttention.v.weight",
        f"{ours}.attention.output.o": f"{block}.0.SelfAttention.o.weight",
        f"{ours}.attention.t5_bias.table": f"{block}.0.SelfAttention.relative_attention_bias.weight",
        f"{ours}.attention_norm.weight": f"{block}.0.layer_norm.weight",
        f"{ours}.feed.up": f"{block}.{feed_forward_index}.DenseReluDense.wi.weight",
        f"{ours}.feed.gate": f"{block}.{feed_forward_index}.DenseReluDense.wi_0.weight",
        f"{ours}.feed.down": f"{block}.{feed_forward_index}.DenseReluDense.wo.weight",
        f"{ours}.feed_norm.weight": f"{block}.{feed_forward_index}.layer_norm.weight",
        f"{name}.norm.weight": f"{name}.final_layer_norm.weight",
    }


T5_WEIGHTS = WeightNames(
    families=("t5",),
    locations={
        "encoder.embedding.tokens": "shared.weight",
        "decoder.embedding.tokens": "decoder.embed_tokens.weight",
        **name_t5_stack("encoder", feed_forward_index=1),
        **name_t5_stack("decoder", feed_forward_index=2),
        "decoder.{layer}.cross.project.q": "decoder.block.{layer}.layer.1.EncDecAttention.q.weight",
        "decoder.{layer}.cross.project.k": "decoder.block.{layer}.layer.1.EncDecAttention.k.weight",
        "decoder.{layer}.cross.project.v": "decoder.block.{layer}.layer.1.EncDecAttention.v.weight",
        "decoder.{layer}.cross.output.o": "decoder.block.{layer}.layer.1.EncDecAttention.o.weight",
        "decoder.{layer}.cross_norm.weight": "decoder.block.{layer}.layer.1.layer_norm.weight",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "classifier.weight",
        "head.classes.bias": "classifier.bias",
    },
    tied_names={"encoder.embed_tokens.weight": "shared.weight"},
    suffix_aliases={"DenseReluDense.wi_1.weight": "DenseReluDense.wi.weight"},
    ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
)
