"""Vision transformers (ViT, DeiT, DINOv2), and the text and vision encoders of CLIP and SigLIP."""

from __future__ import annotations

from typing import NamedTuple

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
    UnsupportedPart,
)
from ..presets import design
from .config_reader import (
    TransformersConfig,
    assemble_model,
    read_num_labels,
    register_family,
    select_heads,
)
from .weight_names import TensorLocation, WeightNames

# --- ViT, DeiT and DINOv2: patches after a class token, pre-LayerNorm, learned positions ----------


@register_family("vit", "ViT", default_task="ForImageClassification")
def read_vit(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ViT (2010.11929); pixels beyond the last whole patch are dropped."""
    return _build_vit(config, task, first=1)


# --- ViT ------------------------------------------------------------------------------------------

VIT_LAYER, BATCH_OF_ONE = ".encoder.layer.{layer}", ({"one": 0}, {"one": 1})

VIT_WEIGHTS = WeightNames(
    families=("vit",),
    prefixes=("vit", ""),
    locations={
        "encoder.embedding.patches": ".embeddings.patch_embeddings.projection.weight",
        "encoder.embedding.patches_bias": ".embeddings.patch_embeddings.projection.bias",
        "encoder.embedding.first": TensorLocation(
            ".embeddings.cls_token", "one first model", *BATCH_OF_ONE
        ),
        "encoder.embedding.positions": TensorLocation(
            ".embeddings.position_embeddings", "one position model", *BATCH_OF_ONE
        ),
        "encoder.{layer}.attention_norm.weight": f"{VIT_LAYER}.layernorm_before.weight",
        "encoder.{layer}.attention_norm.bias": f"{VIT_LAYER}.layernorm_before.bias",
        "encoder.{layer}.attention.project.q": f"{VIT_LAYER}.attention.attention.query.weight",
        "encoder.{layer}.attention.project.k": f"{VIT_LAYER}.attention.attention.key.weight",
        "encoder.{layer}.attention.project.v": f"{VIT_LAYER}.attention.attention.value.weight",
        "encoder.{layer}.attention.project.q_bias": f"{VIT_LAYER}.attention.attention.query.bias",
        "encoder.{layer}.attention.project.k_bias": f"{VIT_LAYER}.attention.attention.key.bias",
        "encoder.{layer}.attention.project.v_bias": f"{VIT_LAYER}.attention.attention.value.bias",
        "encoder.{layer}.attention.output.o": f"{VIT_LAYER}.attention.output.dense.weight",
        "encoder.{layer}.attention.output.o_bias": f"{VIT_LAYER}.attention.output.dense.bias",
        "encoder.{layer}.feed_norm.weight": f"{VIT_LAYER}.layernorm_after.weight",
        "encoder.{layer}.feed_norm.bias": f"{VIT_LAYER}.layernorm_after.bias",
        "encoder.{layer}.feed.up": f"{VIT_LAYER}.intermediate.dense.weight",
        "encoder.{layer}.feed.up_bias": f"{VIT_LAYER}.intermediate.dense.bias",
        "encoder.{layer}.feed.down": f"{VIT_LAYER}.output.dense.weight",
        "encoder.{layer}.feed.down_bias": f"{VIT_LAYER}.output.dense.bias",
        "encoder.norm.weight": ".layernorm.weight",
        "encoder.norm.bias": ".layernorm.bias",
        "head.pooler.transform": ".pooler.dense.weight",
        "head.pooler.transform_bias": ".pooler.dense.bias",
        "head.classes.weight": "classifier.weight",
        "head.classes.bias": "classifier.bias",
    },
)

# --- DeiT and DINOv2 ------------------------------------------------------------------------------


@register_family("deit", "DeiT", default_task="ForImageClassification")
def read_deit(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DeiT (2012.12877): ViT with a second learned vector, the distillation token."""
    return _build_vit(config, task, first=2)


def _build_vit(config: TransformersConfig, task: str, first: int) -> ModelSpec:
    """Build an encoder of patches after `first` learned vectors, with a pooler and a classifier on
    the first.
    """
    model = config.read_int("hidden_size", default=768)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    hidden, act = (
        config.read_int("intermediate_size", default=3072),
        config.read_activation("hidden_act", "gelu"),
    )
    feed = FeedForwardSpec(hidden, act, bias="ud")
    stack = _make_stack(config, model, norm, feed, _make_patches(config, 16), first)
    pooler_act = config.read_activation("pooler_act", "tanh")
    pooled = HeadTransformSpec(config.read_optional_int("pooler_output_size") or model, pooler_act)
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pooled)],
        "ForImageClassification": [
            OutputHeadSpec("classes", read_num_labels(config), "first", bias="learned")
        ],
    }
    return assemble_model(config, "vision", (stack,), select_heads(config, task, heads_by_task))


@register_family("dinov2", "Dinov2", default_task="Model")
def read_dinov2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DINOv2 (2304.07193): ViT with a learned scale per channel on each residual branch
    (LayerScale).
    """
    model = config.read_int("hidden_size", default=768)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-6))
    hidden, act = (
        int(model * config.read_float("mlp_ratio", default=4)),
        config.read_activation("hidden_act", "gelu"),
    )
    feed = FeedForwardSpec(hidden, act, bias="ud")
    if config.read_bool("use_swiglu_ffn", False):
        feed = FeedForwardSpec((int(hidden * 2 / 3) + 7) // 8 * 8, "silu", "gated", "ugd")
    stack = _make_stack(config, model, norm, feed, _make_patches(config, 14), first=1)
    scales = tuple(
        (f"encoder.{n}.{name}.scale", model)
        for n in range(len(stack.layers))
        for name in ("attention", "feed")
    )
    mask = (("encoder.embedding.mask", model),) if config.read_bool("use_mask_token", True) else ()
    unsupported = (
        UnsupportedPart(
            "every residual branch is scaled per channel (LayerScale), which BlockSpec lacks",
            (*scales, *mask),
        ),
    )
    return assemble_model(
        config, "vision", (stack,), select_heads(config, task, {"Model": []}), unsupported
    )


def _make_patches(config: TransformersConfig, usual: int, bias: str = "learned") -> PatchSpec:
    """Return square or oblong patches; pixels beyond the last whole patch are dropped."""
    image, patch = config.read_pair("image_size", 224), config.read_pair("patch_size", usual)
    rows, columns = (size // patch_size for size, patch_size in zip(image, patch, strict=True))
    if not (rows and columns):
        config.fail(
            f"patch_size = {patch} is larger than image_size = {image}", "give a smaller patch_size"
        )
    return PatchSpec(
        rows, columns, *patch, channels=config.read_int("num_channels", default=3), bias=bias
    )


def _make_stack(
    config: TransformersConfig,
    model: int,
    norm: NormSpec,
    feed: FeedForwardSpec,
    patches: PatchSpec,
    first: int,
) -> StackSpec:
    heads = config.read_num_heads("num_attention_heads", default=12)
    dim = config.resolve_head_dim(model, heads, "head_dim")
    spec = design(
        model=model,
        heads=heads,
        dim=dim,
        bias="qkvo" if config.read_bool("qkv_bias", True) else "o",
    )
    blocks = [BlockSpec(spec, feed=feed, norm=norm)] * config.read_num_layers(
        "num_hidden_layers", default=12
    )
    embedding = EmbeddingSpec(
        patches=patches, first=first, positions=PositionSpec("learned", patches.num_patches + first)
    )
    return StackSpec.from_blocks("encoder", model, blocks, embedding=embedding, norm=norm)


# --- CLIP (2103.00020) and SigLIP (2303.15343) ----------------------------------------------------


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
    stack = StackSpec.from_blocks(
        "encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm
    )
    return assemble_model(config, "encoder", (stack,), select_heads(config, task, {"Model": []}))


@register_family("clip_vision_model", "CLIPVision", default_task="Model")
def read_clip_vision(config: TransformersConfig, task: str) -> ModelSpec:
    """Read CLIP's vision encoder: patches without a bias after a class token, a norm before the
    first layer.
    """
    tower = _read_tower(config, VISION_DEFAULTS, "full()")
    table = _make_patch_embedding(config, 32, first=1, norm=tower.norm)
    stack = StackSpec.from_blocks(
        "encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm
    )
    config.add_note(
        "transformers applies the last norm to the class token only; here it applies to all tokens"
    )
    width = config.read_int("projection_dim", default=512)
    heads_by_task = {
        "Model": [],
        "ModelWithProjection": [OutputHeadSpec("projection", width, at="first")],
    }
    return assemble_model(config, "vision", (stack,), select_heads(config, task, heads_by_task))


@register_family("siglip_text_model", "SiglipText", default_task="Model")
def read_siglip_text(config: TransformersConfig, task: str) -> ModelSpec:
    """Read SigLIP's bidirectional text encoder; its output is the last token."""
    tower = _read_tower(config, SIGLIP_DEFAULTS, "full()")
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=64))
    table = EmbeddingSpec(config.read_int("vocab_size", default=32000), positions=positions)
    stack = StackSpec.from_blocks(
        "encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm
    )
    width = config.read_optional_int("projection_size") or tower.model
    heads_by_task = {"Model": [OutputHeadSpec("projection", width, at="last", bias="learned")]}
    return assemble_model(config, "encoder", (stack,), select_heads(config, task, heads_by_task))


@register_family("siglip_vision_model", "SiglipVision", default_task="Model")
def read_siglip_vision(config: TransformersConfig, task: str) -> ModelSpec:
    """Read SigLIP's vision encoder; a learned query pools the patches."""
    tower = _read_tower(config, SIGLIP_DEFAULTS, "full()")
    table = _make_patch_embedding(config, 16, first=0)
    stack = StackSpec.from_blocks(
        "encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm
    )
    d = tower.model
    hidden = config.read_int("intermediate_size", default=3072)
    unsupported = tuple[UnsupportedPart, ...]()
    if config.read_bool("vision_use_head", True):
        sizes = {
            "probe": d,
            "attention": 4 * d * d + 4 * d,
            "norm": 2 * d,
            "feed": 2 * d * hidden + hidden + d,
        }
        reason = (
            "a learned query pools all patches through its own layers, which OutputHeadSpec lacks"
        )
        unsupported = (
            UnsupportedPart(
                reason, tuple((f"head.pooler.{name}", size) for name, size in sizes.items())
            ),
        )
    return assemble_model(
        config, "vision", (stack,), select_heads(config, task, {"Model": []}), unsupported
    )


def _read_tower(config: TransformersConfig, usual: ClipDefaults, pattern: str) -> ClipTower:
    wide = config.read_int("hidden_size", default=usual.model)
    num_heads = config.read_num_heads("num_attention_heads", default=usual.heads)
    config.resolve_head_dim(wide, num_heads)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=usual.eps))
    hidden = config.read_int("intermediate_size", default=usual.hidden)
    feed = FeedForwardSpec(
        hidden, config.read_activation("hidden_act", usual.activation), bias="ud"
    )
    spec = design(model=wide, heads=num_heads, pattern=pattern, bias="qkvo")
    return ClipTower(
        wide,
        [BlockSpec(spec, feed=feed, norm=norm)]
        * config.read_num_layers("num_hidden_layers", default=12),
        norm,
    )


def _make_patch_embedding(
    config: TransformersConfig, patch: int, first: int, norm: NormSpec | None = None
) -> EmbeddingSpec:
    patches = _make_patches(config, patch, "none" if first else "learned")
    return EmbeddingSpec(
        patches=patches,
        first=first,
        positions=PositionSpec("learned", patches.num_patches + first),
        norm=norm,
    )
