"""Text and vision encoders of CLIP (2103.00020) and SigLIP (2303.15343)."""

from __future__ import annotations

from typing import NamedTuple

from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    StackSpec,
    UnsupportedPart,
)
from ..presets import design
from .config_reader import TransformersConfig, register_family, select_heads


class ClipTower(NamedTuple):
    """The layers and norm of an encoder, for text or images."""

    model: int
    blocks: list[BlockSpec]
    norm: NormSpec


class ClipDefaults(NamedTuple):
    """Defaults for keys missing in a config."""

    model: int
    heads: int
    hidden: int
    activation: str
    eps: float


TEXT_DEFAULTS = ClipDefaults(512, 8, 2048, "quick_gelu", 1e-5)
VISION_DEFAULTS = ClipDefaults(768, 12, 3072, "quick_gelu", 1e-5)
SIGLIP_DEFAULTS = ClipDefaults(768, 12, 3072, "gelu_pytorch_tanh", 1e-6)


@register_family("clip_text_model", "CLIPText", default_task="Model")
def read_clip_text(config: TransformersConfig, task: str) -> ModelSpec:
    """Read CLIP's causal text encoder; its output is the end-of-text token."""
    tower = _read_tower(config, TEXT_DEFAULTS, "causal()")
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=77))
    table = EmbeddingSpec(config.read_int("vocab_size", default=49408), positions=positions)
    stack = StackSpec.from_blocks("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    return ModelSpec(
        config.family_name, "encoder", (stack,), select_heads(config, task, {"Model": []}), tuple(config.notes)
    )


@register_family("clip_vision_model", "CLIPVision", default_task="Model")
def read_clip_vision(config: TransformersConfig, task: str) -> ModelSpec:
    """Read CLIP's vision encoder: patches without a bias after a class token, a norm before the first layer."""
    tower = _read_tower(config, VISION_DEFAULTS, "full()")
    table = _make_patch_embedding(config, 224, 32, first=1, norm=tower.norm)
    stack = StackSpec.from_blocks("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    config.add_note("transformers applies the last norm to the class token only; here it applies to all tokens")
    width = config.read_int("projection_dim", default=512)
    heads_by_task = {"Model": [], "ModelWithProjection": [OutputHeadSpec("projection", width, at="first")]}
    return ModelSpec(
        config.family_name, "vision", (stack,), select_heads(config, task, heads_by_task), tuple(config.notes)
    )


@register_family("siglip_text_model", "SiglipText", default_task="Model")
def read_siglip_text(config: TransformersConfig, task: str) -> ModelSpec:
    """Read SigLIP's bidirectional text encoder; its output is the last token."""
    tower = _read_tower(config, SIGLIP_DEFAULTS, "full()")
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=64))
    table = EmbeddingSpec(config.read_int("vocab_size", default=32000), positions=positions)
    stack = StackSpec.from_blocks("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    width = config.read_optional_int("projection_size") or tower.model
    heads_by_task = {"Model": [OutputHeadSpec("projection", width, at="last", bias="learned")]}
    return ModelSpec(
        config.family_name, "encoder", (stack,), select_heads(config, task, heads_by_task), tuple(config.notes)
    )


@register_family("siglip_vision_model", "SiglipVision", default_task="Model")
def read_siglip_vision(config: TransformersConfig, task: str) -> ModelSpec:
    """Read SigLIP's vision encoder; a learned query pools the patches."""
    tower = _read_tower(config, SIGLIP_DEFAULTS, "full()")
    table = _make_patch_embedding(config, 224, 16, first=0)
    stack = StackSpec.from_blocks("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    d, hidden, unsupported = (
        tower.model,
        config.read_int("intermediate_size", default=3072),
        tuple[UnsupportedPart, ...](),
    )
    if config.read_bool("vision_use_head", True):
        sizes = {"probe": d, "attention": 4 * d * d + 4 * d, "norm": 2 * d, "feed": 2 * d * hidden + hidden + d}
        reason = "a learned query pools all patches through its own layers, which OutputHeadSpec lacks"
        unsupported = (UnsupportedPart(reason, tuple((f"head.pooler.{name}", size) for name, size in sizes.items())),)
    return ModelSpec(
        config.family_name,
        "vision",
        (stack,),
        select_heads(config, task, {"Model": []}),
        tuple(config.notes),
        unsupported,
    )


def _read_tower(config: TransformersConfig, usual: ClipDefaults, pattern: str) -> ClipTower:
    wide = config.read_int("hidden_size", default=usual.model)
    asked = config.read_num_heads("num_attention_heads", default=usual.heads)
    config.resolve_head_dim(wide, asked)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=usual.eps))
    hidden = config.read_int("intermediate_size", default=usual.hidden)
    feed = FeedForwardSpec(hidden, config.read_activation("hidden_act", usual.activation), bias="ud")
    spec = design(model=wide, heads=asked, pattern=pattern, bias="qkvo")
    return ClipTower(
        wide, [BlockSpec(spec, feed=feed, norm=norm)] * config.read_num_layers("num_hidden_layers", default=12), norm
    )


def _make_patch_embedding(
    config: TransformersConfig, image: int, patch: int, first: int, norm: NormSpec | None = None
) -> EmbeddingSpec:
    """Return a patch embedding; pixels beyond the last whole patch are dropped."""
    image_size, patch_size = config.read_pair("image_size", image), config.read_pair("patch_size", patch)
    rows, columns = (side // patch_side for side, patch_side in zip(image_size, patch_size, strict=True))
    if not (rows and columns):
        config.fail(f"patch_size = {patch_size} is larger than image_size = {image_size}", "give a smaller patch_size")
    bias = "none" if first else "learned"
    patches = PatchSpec(rows, columns, *patch_size, channels=config.read_int("num_channels", default=3), bias=bias)
    return EmbeddingSpec(
        patches=patches, first=first, positions=PositionSpec("learned", patches.num_patches + first), norm=norm
    )
