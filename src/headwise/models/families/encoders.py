"""Encoder-decoders: BART and its relatives (mBART, Marian, Pegasus), and T5. Encoders: BERT and its
relatives, and ViT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...attention.parts.collaborative import Collaborative
from ...attention.parts.dot_product import DotProduct
from ...attention.parts.relative_position_bias import T5Bias
from ...attention.presets import design
from ...attention.spec.attention_spec import AttentionSpec
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    StackSpec,
)
from ..model_spec.model import group_blocks
from .attention_config import make_dot
from .config_reader import (
    ACTIVATIONS,
    TransformersConfig,
    assemble_model,
    read_num_labels,
    read_tied_stack,
    register_family,
    select_heads,
)
from .decoders import read_base, refuse_keys, register_families

# --- BART (1910.13461) and its relatives ----------------------------------------------------------


@dataclass(frozen=True)
class BartFamily:
    """How a family differs: vocabulary, placement of norms, positions, and norms after embedding
    and last layer.

    `positions` are "learned" or "halves" (first all sines, then all cosines); `skipped` rows
    precede the first position.
    """

    prefix: str
    tokens: int
    placement: str = "post"
    positions: str = "learned"
    skipped: int = 0
    embedding_norm: bool = False
    final_norm: bool = False
    default_task: str = "ForConditionalGeneration"


UNTIED_REASON = "would create four embedding matrices, one of them not used"


def build_bart(config: TransformersConfig, task: str, family: BartFamily) -> ModelSpec:
    """Build a model with one table of token embeddings."""
    config.require_default("tie_word_embeddings", True, UNTIED_REASON)
    tokens = config.read_int("vocab_size", default=family.tokens)
    return _build_bart(config, task, family, (tokens, tokens))


register_families("encoder_decoders", BartFamily, build_bart)
MARIAN = read_base("marian", BartFamily)


@register_family("marian", "Marian", default_task="MTModel")
def read_marian(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Marian (1804.00344); encoder and decoder may have separate token embeddings."""
    target = config.read_optional_int("decoder_vocab_size")
    tokens = config.read_int("vocab_size", default=MARIAN.tokens)
    is_shared = config.read_bool("share_encoder_decoder_embeddings", True)
    if is_shared and target not in (None, tokens):
        config.fail(f"decoder_vocab_size = {target} differs from vocab_size", "give both alike")
    reason = "gives the output head its own matrix, which is not described"
    config.require_default("tie_word_embeddings", True, UNTIED_REASON if is_shared else reason)
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
    model = config.read_int("d_model", "hidden_size", default=1024)
    length = config.read_int("max_position_embeddings", default=1024)
    positions = PositionSpec("learned", length, skipped=family.skipped)
    if family.positions == "halves":
        positions = PositionSpec("sinusoidal", length, layout="halves")
    embedding_args: dict[str, Any] = {
        "positions": positions,
        "norm": NormSpec() if family.embedding_norm else None,
        "scale": model**0.5 if config.read_bool("scale_embedding", False) else 1.0,
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
    head = OutputHeadSpec("tokens", tokens[1], bias="constant", table=table)
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
    return assemble_model(config, "encoder-decoder", stacks, heads)


def _make_stack(
    config: TransformersConfig, family: BartFamily, model: int, name: str, embedding: EmbeddingSpec
) -> StackSpec:
    """Return the stack "encoder" or "decoder"."""
    is_encoder = name == "encoder"
    other_names = ("num_hidden_layers", "num_attention_heads") if is_encoder else ()
    layers = config.read_num_layers(f"{name}_layers", *other_names[:1], default=12)
    heads = config.read_num_heads(f"{name}_attention_heads", *other_names[1:], default=16)
    config.resolve_head_dim(model, heads)
    hidden = config.read_int(f"{name}_ffn_dim", default=4096)
    act = config.read_activation("activation_function", "gelu")
    feed = FeedForwardSpec(hidden, act, bias="ud")
    full = design(model=model, heads=heads, bias="qkvo")
    causal = design(model=model, heads=heads, bias="qkvo", pattern="causal()")
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


# --- BERT (1810.04805) and its relatives ----------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """How the config.json of a family of encoders like BERT is read; the defaults are BERT's.

    `offset` is how rows before the first position are counted: "" for none, "pad" after
    pad_token_id. `masked_act` is the activation of the masked-LM head ("": as in the layers).
    """

    prefix: str
    tokens: int = 30522
    refused: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    fewest_types: int = 1
    offset: str = ""
    masked_act: str = ""
    masked_tasks: tuple[str, ...] = ("ForMaskedLM", "ForCausalLM")
    default_task: str = "ForMaskedLM"


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes, norm and feed-forward of an encoder, as read from its config."""

    model: int
    heads: int
    layers: int
    norm: NormSpec
    feed: FeedForwardSpec


def read_encoder_sizes(config: TransformersConfig) -> EncoderSizes:
    """Return the sizes of a config."""
    model = config.read_int("hidden_size", default=768)
    heads = config.read_num_heads("num_attention_heads", default=12)
    config.resolve_head_dim(model, heads)
    hidden = config.read_int("intermediate_size", default=3072)
    act = config.read_activation("hidden_act", "gelu")
    layers = config.read_num_layers("num_hidden_layers", default=12)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    return EncoderSizes(model, heads, layers, norm, FeedForwardSpec(hidden, act, bias="ud"))


def build_encoder(config: TransformersConfig, task: str, family: Encoder) -> ModelSpec:
    """Return an encoder with post-norm layers (1706.03762) and the output heads of a task."""
    refuse_keys(config, family.refused)
    sizes = read_encoder_sizes(config)
    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    block = BlockSpec(attention, feed=sizes.feed, norm=sizes.norm, placement="post")
    embedding = _read_embedding(config, family, sizes)
    stack = StackSpec.from_blocks(
        "encoder", sizes.model, [block] * sizes.layers, embedding=embedding
    )
    count = read_num_labels(config)
    pool = HeadTransformSpec(sizes.model)
    table = read_tied_stack(config, "encoder", True)
    act = family.masked_act or sizes.feed.activation
    inner = HeadTransformSpec(sizes.model, act, sizes.norm)
    masked = OutputHeadSpec(
        "tokens", embedding.tokens, transform=inner, bias="learned", table=table
    )
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pool)],
        **{key: [masked] for key in family.masked_tasks},
        "ForSequenceClassification": [OutputHeadSpec("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [OutputHeadSpec("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", count, bias="learned")],
    }
    if config.family_name == "bert":
        following = OutputHeadSpec("next", 2, "first", pool, "learned")
        heads_by_task["ForPreTraining"] = [masked, following]
        heads_by_task["ForNextSentencePrediction"] = [following]
        if not table:
            config.add_note(
                "tie_word_embeddings: the second bias of the decoder in transformers is left out"
            )
    return assemble_model(config, "encoder", (stack,), select_heads(config, task, heads_by_task))


def _read_embedding(
    config: TransformersConfig, family: Encoder, sizes: EncoderSizes
) -> EmbeddingSpec:
    tokens = config.read_int("vocab_size", default=family.tokens)
    types = config.read_int("type_vocab_size", default=2, minimum=family.fewest_types)
    rows = config.read_int("max_position_embeddings", default=512)
    skipped = 0
    if family.offset:  # numbered as in fairseq: the first position uses the row after padding
        skipped = 1 + config.read_int("pad_token_id", default=1, minimum=0)
        if rows <= skipped:
            config.fail(
                f"max_position_embeddings = {rows} leaves no positions after pad_token_id",
                f"give more than {skipped}",
            )
    positions = PositionSpec("learned", rows - skipped, skipped=skipped)
    return EmbeddingSpec(tokens, positions=positions, types=types, norm=sizes.norm)


register_families("encoders", Encoder, build_encoder)

# --- BERT with collaborative heads ----------------------------------------------------------------


MIXING_NAME = re.compile(r"encoder\.layer\.(\d+)\.attention\.self\.mixing$")


def with_collaborative_heads(model: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """Return BERT with one query-key space for all heads (2006.16362) in the layers that have
    mixing vectors.

    Only the tensors show this: the released config.json does not. The released code divides scores
    by sqrt(width / heads).
    """
    matches = ((MIXING_NAME.search(name), shape) for name, shape in shapes.items())
    widths = {int(match[1]): shape[1] for match, shape in matches if match}
    if not widths:
        return model
    (stack,) = model.stacks
    blocks = list(stack.layers)
    for layer, width in widths.items():
        if layer >= len(blocks):
            continue  # reading the tensors reports the missing layer
        spec = blocks[layer].attention
        assert isinstance(spec, AttentionSpec)
        similarity = make_dot((width / spec.heads.q) ** -0.5, spec.heads.dim**-0.5)
        shared = replace(spec, project=Collaborative(width=width, bias="v"), similarity=similarity)
        blocks[layer] = replace(blocks[layer], attention=shared)
    return replace(model, stacks=(replace(stack, runs=group_blocks(blocks)),))


# --- ViT (2010.11929) -----------------------------------------------------------------------------


@register_family("vit", "ViT", default_task="ForImageClassification")
def read_vit(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ViT: square or oblong patches after a learned vector; pixels beyond the last whole patch
    are dropped.
    """
    sizes = read_encoder_sizes(config)
    image = config.read_pair("image_size", 224)
    size = config.read_pair("patch_size", 16)
    rows = image[0] // size[0]
    columns = image[1] // size[1]
    if not (rows and columns):
        config.fail(
            f"patch_size = {size} is larger than image_size = {image}", "give a smaller patch_size"
        )
    patches = PatchSpec(rows, columns, *size, channels=config.read_int("num_channels", default=3))
    positions = PositionSpec("learned", patches.num_patches + 1)
    attention = design(
        model=sizes.model,
        heads=sizes.heads,
        dim=config.resolve_head_dim(sizes.model, sizes.heads, "head_dim"),
        bias="qkvo" if config.read_bool("qkv_bias", True) else "o",
    )
    stack = StackSpec.from_blocks(
        "encoder",
        sizes.model,
        [BlockSpec(attention, feed=sizes.feed, norm=sizes.norm)] * sizes.layers,
        embedding=EmbeddingSpec(patches=patches, first=1, positions=positions),
        norm=sizes.norm,
    )
    act = config.read_activation("pooler_act", "tanh")
    pooled = HeadTransformSpec(config.read_optional_int("pooler_output_size") or sizes.model, act)
    classes = OutputHeadSpec("classes", read_num_labels(config), "first", bias="learned")
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pooled)],
        "ForImageClassification": [classes],
    }
    return assemble_model(config, "vision", (stack,), select_heads(config, task, heads_by_task))
