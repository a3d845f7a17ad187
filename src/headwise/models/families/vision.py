"""Vision transformers (ViT, DeiT, DINOv2), and the text and vision encoders of CLIP and SigLIP:
pre-norm layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...attention.presets import design
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    ModelSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    StackSpec,
    UnsupportedPart,
)
from .config_reader import (
    TransformersConfig,
    assemble_model,
    read_num_labels,
    register_family,
    select_heads,
)
from .encoders import Encoder, EncoderSizes, read_encoder_sizes


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
