"""Encoders: BERT and its relatives, and ViT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...attention.parts.collaborative import Collaborative
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
    TransformersConfig,
    assemble_model,
    read_num_labels,
    read_tied_stack,
    register_family,
    select_heads,
)
from .decoders import refuse_keys, register_families

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
