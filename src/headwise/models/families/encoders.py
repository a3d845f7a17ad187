"""Encoders: BERT and its relatives, and the text and vision encoders of CLIP and SigLIP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...attention.parts.collaborative import Collaborative
from ...attention.parts.relative_position_bias import T5Bias
from ...attention.presets import design
from ...attention.spec.attention_spec import AttentionSpec
from ..model_spec import (
    ApproximateAttention,
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
    UnsupportedPart,
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
from .decoders import (
    LayerAttention,
    Switch,
    family_function,
    read_switch,
    refuse_keys,
    register_families,
)

# --- The table of a family ------------------------------------------------------------------------

KEYS = {
    "model": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "hidden": "intermediate_size",
    "act": "hidden_act",
    "eps": "layer_norm_eps",
}


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes, norm and feed-forward of an encoder, as read from its config."""

    model: int
    heads: int
    layers: int
    tokens: int
    norm: NormSpec
    feed: FeedForwardSpec


@dataclass
class Extras:
    """Functions that a family adds to its table. `masked` replaces the masked-LM head, `pooler` the
    transform of classifiers, `tasks` adds tasks with their heads.
    """

    attentions: Sequence[LayerAttention] | None = None
    embedding: EmbeddingSpec | None = None
    has_embedding: bool = True
    masked: OutputHeadSpec | None = None
    pooler: HeadTransformSpec | None = None
    tasks: dict[str, list[OutputHeadSpec]] = field(default_factory=dict[str, list[OutputHeadSpec]])
    stack: dict[str, Any] = field(default_factory=dict[str, Any])
    unsupported: tuple[UnsupportedPart, ...] = ()


@dataclass(frozen=True)
class Encoder:
    """How the config.json of a family of encoders like BERT is read; the defaults are BERT's.

    - `model` to `eps` are defaults of the keys in `KEYS`, which `keys` renames; "" is a fixed
      value.
    - `types` is the default number of token types, None without the key. `offset` is how rows
      before the first position are counted: "" for none, "pad" after pad_token_id.
    - `masked_act` is the activation of the masked-LM head ("": as in the layers). `pooler_act` is
      the activation of the pooler, which `pools_base` adds to the model without a task.
    """

    prefix: str
    model: int = 768
    heads: int = 12
    layers: int = 12
    tokens: int = 30522
    hidden: int = 3072
    act: str = "gelu"
    eps: float = 1e-12
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    pattern: str | Switch = "full()"
    types: int | None = 2
    fewest_types: int = 1
    offset: str = ""
    masked_act: str = ""
    pooler_act: str = "tanh"
    pools_base: bool = True
    masked_tasks: tuple[str, ...] = ("ForMaskedLM", "ForCausalLM")
    default_task: str = "ForMaskedLM"
    extras: Callable[[TransformersConfig, str, EncoderSizes], Extras] | None = None


def read_encoder_sizes(config: TransformersConfig, family: Encoder) -> EncoderSizes:
    """Return the sizes of a config of this family."""
    keys = {name: text.split() for name, text in (KEYS | dict(family.keys)).items()}
    model = config.read_int(*keys["model"], default=family.model)
    heads = config.read_num_heads(*keys["heads"], default=family.heads)
    config.resolve_head_dim(model, heads)
    refuse_keys(config, family.refused)
    hidden = family.hidden
    if keys["hidden"]:
        hidden = config.read_int(*keys["hidden"], default=family.hidden)
    act = config.read_activation(keys["act"][0], family.act)
    layers = config.read_num_layers(*keys["layers"], default=family.layers)
    tokens = config.read_int("vocab_size", default=family.tokens) if family.tokens else 0
    eps = config.read_float(*keys["eps"], default=family.eps) if keys["eps"] else family.eps
    feed = FeedForwardSpec(hidden, act, bias="ud")
    return EncoderSizes(model, heads, layers, tokens, NormSpec("layer", eps), feed)


def build_encoder(config: TransformersConfig, task: str, family: Encoder) -> ModelSpec:
    """Return an encoder with post-norm layers (1706.03762) and the output heads of a task."""
    sizes = read_encoder_sizes(config, family)
    extras = family.extras(config, task, sizes) if family.extras else Extras()
    attentions = extras.attentions
    if attentions is None:
        pattern = read_switch(config, family.pattern)
        spec = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
        attentions = [spec] * sizes.layers
    blocks = [
        BlockSpec(attention, feed=sizes.feed, norm=sizes.norm, placement="post")
        for attention in attentions
    ]
    embedding = extras.embedding
    if embedding is None and extras.has_embedding:
        embedding = _read_embedding(config, family, sizes)
    stack = StackSpec.from_blocks("encoder", sizes.model, blocks, embedding=embedding)
    stack = replace(stack, **extras.stack)
    count = read_num_labels(config)
    pool = extras.pooler or HeadTransformSpec(sizes.model, family.pooler_act)
    act = family.masked_act or sizes.feed.activation
    masked = extras.masked or make_masked_head(config, sizes, act)
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pool)] * family.pools_base,
        **{key: [masked] for key in family.masked_tasks},
        "ForSequenceClassification": [OutputHeadSpec("classes", count, "first", pool, "learned")],
        "ForMultipleChoice": [OutputHeadSpec("choice", 1, "first", pool, "learned")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", count, bias="learned")],
        **extras.tasks,
    }
    heads = select_heads(config, task, heads_by_task)
    return assemble_model(config, "encoder", (stack,), heads, extras.unsupported)


def _read_embedding(
    config: TransformersConfig, family: Encoder, sizes: EncoderSizes
) -> EmbeddingSpec:
    types = 0
    if family.types is not None:
        types = config.read_int(
            "type_vocab_size", default=family.types, minimum=family.fewest_types
        )
    rows = config.read_int("max_position_embeddings", default=512)
    skipped = 0
    if family.offset:  # numbered as in fairseq: the first position uses the row after padding
        pad = config.read_int("pad_token_id", default=1, minimum=0) if family.offset == "pad" else 1
        skipped = 1 + pad
        if rows <= skipped:
            config.fail(
                f"max_position_embeddings = {rows} leaves no positions after pad_token_id",
                f"give more than {skipped}",
            )
    positions = PositionSpec("learned", rows - skipped, skipped=skipped)
    return EmbeddingSpec(sizes.tokens, positions=positions, types=types, norm=sizes.norm)


def make_masked_head(
    config: TransformersConfig, sizes: EncoderSizes, act: str, narrow: int | None = None
) -> OutputHeadSpec:
    """Return the masked-LM head, without its output matrix if the embeddings are narrower."""
    table = read_tied_stack(config, "encoder", True)
    inner = HeadTransformSpec(narrow or sizes.model, act, sizes.norm)
    if narrow not in (None, sizes.model):
        return OutputHeadSpec("tokens", transform=inner)
    return OutputHeadSpec("tokens", sizes.tokens, transform=inner, bias="learned", table=table)


# --- BERT (1810.04805), and BERT with collaborative heads -----------------------------------------


@family_function
def bert(config: TransformersConfig, task: str, sizes: EncoderSizes) -> Extras:
    """Heads of pretraining."""
    masked = make_masked_head(config, sizes, sizes.feed.activation)
    if not masked.table:
        config.add_note(
            "tie_word_embeddings: the second bias of the decoder in transformers is left out"
        )
    following = OutputHeadSpec("next", 2, "first", HeadTransformSpec(sizes.model), "learned")
    pretraining = {"ForPreTraining": [masked, following], "ForNextSentencePrediction": [following]}
    return Extras(masked=masked, tasks=pretraining)


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


# --- MPNet, Longformer ----------------------------------------------------------------------------


@family_function
def mpnet(config: TransformersConfig, task: str, sizes: EncoderSizes) -> Extras:
    """Relative position biases as in T5."""
    bias = T5Bias(32, 128, "both")
    spec = design(model=sizes.model, heads=sizes.heads, bias="qkvo", modifiers=(bias,))
    return Extras([spec] * sizes.layers)


GLOBAL_TOKENS_REASON = (
    "global tokens are chosen per call and have their own projections; exact without global tokens"
)


@family_function
def longformer(config: TransformersConfig, task: str, sizes: EncoderSizes) -> Extras:
    """A spec without global tokens; hw.attention.LongformerAttention runs the full layer."""
    setting = config.values.get("attention_window", 512)
    windows: list[Any] = [setting] * sizes.layers
    if isinstance(setting, (list, tuple)):
        windows = config.read_list("attention_window") or []
    is_even = [type(window) is int and window >= 2 and not window % 2 for window in windows]
    if len(windows) != sizes.layers or not all(is_even):
        config.fail(
            f"attention_window = {setting!r} is not an even number for each of {sizes.layers} "
            "layers",
            "give 512 or a list of one per layer",
        )
    sides = ("query_global", "key_global", "value_global")
    weights = [(f"{side}.weight", sizes.model**2) for side in sides]
    own = (*weights, *((f"{side}.bias", sizes.model) for side in sides))
    attentions = list[LayerAttention]()
    for window in windows:
        pattern = f"window({window + 1}, after={window // 2})"
        spec = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
        attentions.append(ApproximateAttention(spec, GLOBAL_TOKENS_REASON, own))
    return Extras(attentions)


# --- ELECTRA (2003.10555) and ALBERT: token embeddings that may be narrower than the layers -------


def _narrow_embedding(config: TransformersConfig, sizes: EncoderSizes, narrow: int) -> Extras:
    """Embeddings with their norm and the projection to the width of the layers, and the masked-LM
    head on them.
    """
    length = config.read_int("max_position_embeddings", default=512)
    rows = length + config.read_int("type_vocab_size", default=2) + sizes.tokens
    own = {
        "encoder.embedding.rows": rows * narrow,
        "encoder.embedding.norm": 2 * narrow,
        "encoder.embedding.wider": narrow * sizes.model + sizes.model,
    }
    reason = (
        f"embeddings have {narrow} channels, projected to {sizes.model}, which EmbeddingSpec lacks"
    )
    return Extras(has_embedding=False, unsupported=(UnsupportedPart(reason, tuple(own.items())),))


def _narrow_head(config: TransformersConfig, sizes: EncoderSizes, narrow: int) -> UnsupportedPart:
    """Return the bias of the head of narrow token embeddings, and its matrix unless tied."""
    own = [("head.tokens.bias", sizes.tokens)]
    if not read_tied_stack(config, "encoder", True):
        own.append(("head.tokens.weight", sizes.tokens * narrow))
    return UnsupportedPart("the masked-LM head uses the narrow embeddings", tuple(own))


@family_function
def electra(config: TransformersConfig, task: str, sizes: EncoderSizes) -> Extras:
    """The pretraining head detects replaced tokens."""
    narrow = config.read_int("embedding_size", default=128)
    extras = Extras()
    if narrow != sizes.model:
        extras = _narrow_embedding(config, sizes, narrow)
        if task in ("ForMaskedLM", "ForCausalLM"):
            extras.unsupported += (_narrow_head(config, sizes, narrow),)
    inner = HeadTransformSpec(sizes.model, sizes.feed.activation)
    extras.masked = make_masked_head(config, sizes, "gelu", narrow)
    extras.tasks = {
        "ForPreTraining": [OutputHeadSpec("replaced", 1, transform=inner, bias="learned")]
    }
    return extras


@family_function
def albert(config: TransformersConfig, task: str, sizes: EncoderSizes) -> Extras:
    """All layers share the weights of the first."""
    narrow = config.read_int("embedding_size", default=128)
    if narrow == sizes.model:
        config.fail(
            f"embedding_size = {narrow} equals hidden_size",
            "give a smaller one: ALBERT always has a projection between them",
        )
    extras = _narrow_embedding(config, sizes, narrow)
    if task == "ForMaskedLM":
        extras.unsupported += (_narrow_head(config, sizes, narrow),)
    extras.masked = make_masked_head(config, sizes, sizes.feed.activation, narrow)
    extras.stack = {"tied_layers": True}
    return extras


# --- DeBERTa 2 and 3: content and relative positions are scored separately (2006.03654) -----------

DISENTANGLED_REASON = (
    "scores add content-to-position and position-to-content terms, from one table for all layers"
)


@family_function
def deberta(config: TransformersConfig, task: str, sizes: EncoderSizes) -> Extras:
    """Without relative_attention the layers are BERT's."""
    config.require_default(
        "embedding_size",
        sizes.model,
        "gives token embeddings another width, which is not described",
    )
    length = config.read_int("max_position_embeddings", default=512)
    is_placed = config.read_bool("position_biased_input", True)
    types = config.read_int("type_vocab_size", default=0, minimum=0)
    wide = config.read_int("pooler_hidden_size", default=sizes.model)
    return Extras(
        attentions=[_deberta_attention(config, sizes)] * sizes.layers,
        embedding=EmbeddingSpec(
            sizes.tokens,
            positions=PositionSpec("learned", length) if is_placed else None,
            types=types,
            norm=sizes.norm,
        ),
        pooler=HeadTransformSpec(wide, config.read_activation("pooler_hidden_act", "gelu")),
        unsupported=_deberta_parts(config, sizes, length),
    )


def _deberta_attention(config: TransformersConfig, sizes: EncoderSizes) -> LayerAttention:
    spec = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    if not config.read_bool("relative_attention", False):
        return spec
    terms: Any = config.values.get("pos_att_type") or []
    if isinstance(terms, str):  # old files join them with |
        terms = [term.strip() for term in terms.lower().split("|")]
    is_shared = config.read_bool("share_att_key", False)
    sides = {} if is_shared else {"c2p": "pos_key", "p2c": "pos_query"}
    used = [name for term, name in sides.items() if term in list(terms)]
    weights = [(f"{name}.weight", sizes.model**2) for name in used]
    own = (*weights, *((f"{name}.bias", sizes.model) for name in used))
    return ApproximateAttention(spec, DISENTANGLED_REASON, own)


def _deberta_parts(
    config: TransformersConfig, sizes: EncoderSizes, length: int
) -> tuple[UnsupportedPart, ...]:
    """Return the relative position table, its norm, and the convolution next to the first layer."""
    parts = list[UnsupportedPart]()
    if config.read_bool("relative_attention", False):
        settings = [
            config.values.get(name) for name in ("position_buckets", "max_relative_positions")
        ]
        positive_sizes = [value for value in settings if type(value) is int and value > 0]
        rows = 2 * (positive_sizes[0] if positive_sizes else length)
        table = [("encoder.embedding.distances", rows * sizes.model)]
        if "layer_norm" in str(config.values.get("norm_rel_ebd", "none")).lower():
            table.append(("encoder.embedding.distances_norm", 2 * sizes.model))
        reason = "relative positions have a table of embeddings that all layers share"
        parts.append(UnsupportedPart(reason, tuple(table)))
    kernel = config.read_int("conv_kernel_size", default=0, minimum=0)
    if kernel:
        groups = config.read_int("conv_groups", default=1)
        numbers = sizes.model * sizes.model // groups * kernel + 3 * sizes.model
        reason = "a convolution of the embeddings is added to the output of the first layer"
        parts.append(UnsupportedPart(reason, (("encoder.0.feed.convolution", numbers),)))
    return tuple(parts)


register_families("encoders", Encoder, build_encoder)


def _build(
    config: TransformersConfig,
    task: str,
    stack: StackSpec,
    heads_by_task: dict[str, list[OutputHeadSpec]],
    unsupported: tuple[UnsupportedPart, ...] = (),
) -> ModelSpec:
    kind = "vision" if stack.embedding and stack.embedding.patches else "encoder"
    heads = select_heads(config, task, heads_by_task)
    return assemble_model(config, kind, (stack,), heads, unsupported)


def _make_stack(sizes: EncoderSizes, embedding: EmbeddingSpec, **design_args: Any) -> StackSpec:
    args: dict[str, Any] = {"model": sizes.model, "heads": sizes.heads, "bias": "qkvo"}
    spec = design(**(args | design_args))
    blocks = [BlockSpec(spec, feed=sizes.feed, norm=sizes.norm)] * sizes.layers
    return StackSpec.from_blocks(
        "encoder", sizes.model, blocks, embedding=embedding, norm=sizes.norm
    )


def _embed_patches(
    config: TransformersConfig, patch: int, first: int, bias: str = "learned", **others: Any
) -> EmbeddingSpec:
    """Return square or oblong patches after `first` learned vectors; pixels beyond the last whole
    patch are dropped.
    """
    image = config.read_pair("image_size", 224)
    size = config.read_pair("patch_size", patch)
    rows = image[0] // size[0]
    columns = image[1] // size[1]
    if not (rows and columns):
        config.fail(
            f"patch_size = {size} is larger than image_size = {image}", "give a smaller patch_size"
        )
    channels = config.read_int("num_channels", default=3)
    patches = PatchSpec(rows, columns, *size, channels=channels, bias=bias)
    positions = PositionSpec("learned", patches.num_patches + first)
    return EmbeddingSpec(patches=patches, first=first, positions=positions, **others)


# --- ViT (2010.11929), DeiT (2012.12877) and DINOv2 (2304.07193) ----------------------------------

VIT = Encoder("", tokens=0)


def _design_args(config: TransformersConfig, sizes: EncoderSizes) -> dict[str, Any]:
    dim = config.resolve_head_dim(sizes.model, sizes.heads, "head_dim")
    return {"dim": dim, "bias": "qkvo" if config.read_bool("qkv_bias", True) else "o"}


@register_family("vit", "ViT", default_task="ForImageClassification")
@register_family("deit", "DeiT", default_task="ForImageClassification")
def read_vit(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ViT, or DeiT with a second learned vector, the distillation token."""
    sizes = read_encoder_sizes(config, VIT)
    embedding = _embed_patches(config, 16, first=1 if config.family_name == "vit" else 2)
    stack = _make_stack(sizes, embedding, **_design_args(config, sizes))
    act = config.read_activation("pooler_act", "tanh")
    pooled = HeadTransformSpec(config.read_optional_int("pooler_output_size") or sizes.model, act)
    classes = OutputHeadSpec("classes", read_num_labels(config), "first", bias="learned")
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pooled)],
        "ForImageClassification": [classes],
    }
    return _build(config, task, stack, heads_by_task)


@register_family("dinov2", "Dinov2", default_task="Model")
def read_dinov2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DINOv2: ViT with a learned scale per channel on each residual branch (LayerScale)."""
    sizes = read_encoder_sizes(config, replace(VIT, eps=1e-6, keys={"hidden": ""}))
    hidden = int(sizes.model * config.read_float("mlp_ratio", default=4))
    feed = replace(sizes.feed, hidden=hidden)
    if config.read_bool("use_swiglu_ffn", False):
        feed = FeedForwardSpec((int(hidden * 2 / 3) + 7) // 8 * 8, "silu", "gated", "ugd")
    embedding = _embed_patches(config, 14, first=1)
    stack = _make_stack(replace(sizes, feed=feed), embedding, **_design_args(config, sizes))
    own = list[tuple[str, int]]()
    for layer in range(sizes.layers):
        own += [(f"encoder.{layer}.{name}.scale", sizes.model) for name in ("attention", "feed")]
    if config.read_bool("use_mask_token", True):
        own.append(("encoder.embedding.mask", sizes.model))
    reason = "every residual branch is scaled per channel (LayerScale), which BlockSpec lacks"
    return _build(config, task, stack, {"Model": []}, (UnsupportedPart(reason, tuple(own)),))


# --- CLIP (2103.00020) and SigLIP (2303.15343) ----------------------------------------------------

CLIP_TEXT = Encoder("", 512, 8, tokens=49408, hidden=2048, act="quick_gelu", eps=1e-5)
CLIP_VISION = Encoder("", tokens=0, act="quick_gelu", eps=1e-5)
SIGLIP = Encoder("", tokens=32000, act="gelu_pytorch_tanh", eps=1e-6)


def _embed_tokens(config: TransformersConfig, sizes: EncoderSizes, length: int) -> EmbeddingSpec:
    length = config.read_int("max_position_embeddings", default=length)
    return EmbeddingSpec(sizes.tokens, positions=PositionSpec("learned", length))


@register_family("clip_text_model", "CLIPText", default_task="Model")
def read_clip_text(config: TransformersConfig, task: str) -> ModelSpec:
    """Read CLIP's causal text encoder; its output is the end-of-text token."""
    sizes = read_encoder_sizes(config, CLIP_TEXT)
    stack = _make_stack(sizes, _embed_tokens(config, sizes, 77), pattern="causal()")
    return _build(config, task, stack, {"Model": []})


@register_family("clip_vision_model", "CLIPVision", default_task="Model")
def read_clip_vision(config: TransformersConfig, task: str) -> ModelSpec:
    """Read CLIP's vision encoder: patches without a bias after a class token, a norm before the
    first layer.
    """
    sizes = read_encoder_sizes(config, CLIP_VISION)
    embedding = _embed_patches(config, 32, first=1, bias="none", norm=sizes.norm)
    config.add_note(
        "transformers applies the last norm to the class token only; here it applies to all tokens"
    )
    width = config.read_int("projection_dim", default=512)
    projection = [OutputHeadSpec("projection", width, at="first")]
    heads_by_task = {"Model": [], "ModelWithProjection": projection}
    return _build(config, task, _make_stack(sizes, embedding), heads_by_task)


@register_family("siglip_text_model", "SiglipText", default_task="Model")
def read_siglip_text(config: TransformersConfig, task: str) -> ModelSpec:
    """Read SigLIP's bidirectional text encoder; its output is the last token."""
    sizes = read_encoder_sizes(config, SIGLIP)
    stack = _make_stack(sizes, _embed_tokens(config, sizes, 64))
    width = config.read_optional_int("projection_size") or sizes.model
    head = OutputHeadSpec("projection", width, at="last", bias="learned")
    return _build(config, task, stack, {"Model": [head]})


@register_family("siglip_vision_model", "SiglipVision", default_task="Model")
def read_siglip_vision(config: TransformersConfig, task: str) -> ModelSpec:
    """Read SigLIP's vision encoder; a learned query pools the patches."""
    sizes = read_encoder_sizes(config, replace(SIGLIP, tokens=0))
    stack = _make_stack(sizes, _embed_patches(config, 16, first=0))
    width = sizes.model
    hidden = sizes.feed.hidden
    own = {
        "head.pooler.probe": width,
        "head.pooler.attention": 4 * width * width + 4 * width,
        "head.pooler.norm": 2 * width,
        "head.pooler.feed": 2 * width * hidden + hidden + width,
    }
    reason = "a learned query pools all patches through its own layers, which OutputHeadSpec lacks"
    has_head = config.read_bool("vision_use_head", True)
    unsupported = (UnsupportedPart(reason, tuple(own.items())),) if has_head else ()
    return _build(config, task, stack, {"Model": []}, unsupported)
