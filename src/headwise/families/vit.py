"""ViT, DeiT and DINOv2: image patches after a class token, pre-LayerNorm, learned positions."""

from __future__ import annotations

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
from .config_reader import TransformersConfig, read_num_labels, register_family, select_heads
from .weight_names import TensorLocation, WeightNames


@register_family("vit", "ViT", default_task="ForImageClassification")
def read_vit(config: TransformersConfig, task: str) -> ModelSpec:
    """Read ViT (2010.11929); pixels beyond the last whole patch are dropped."""
    model = config.read_int("hidden_size", default=768)
    heads = config.read_num_heads("num_attention_heads", default=12)
    layers = config.read_num_layers("num_hidden_layers", default=12)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    image, patch = config.read_pair("image_size", 224), config.read_pair("patch_size", 16)
    rows, columns = (size // part for size, part in zip(image, patch, strict=True))
    if not (rows and columns):
        config.fail(f"patch_size = {patch} is larger than image_size = {image}", "give a smaller patch_size")
    patches = PatchSpec(rows, columns, *patch, channels=config.read_int("num_channels", default=3))
    positions = PositionSpec("learned", patches.num_patches + 1)
    config.resolve_head_dim(model, heads)

    bias = "qkvo" if config.read_bool("qkv_bias", True) else "o"
    hidden = config.read_int("intermediate_size", default=3072)
    feed = FeedForwardSpec(hidden, config.read_activation("hidden_act", "gelu"), bias="ud")
    blocks = [BlockSpec(design(model=model, heads=heads, bias=bias), feed=feed, norm=norm)] * layers
    embedding = EmbeddingSpec(patches=patches, first=1, positions=positions)
    stack = StackSpec.from_blocks("encoder", model, blocks, embedding=embedding, norm=norm)

    act = config.read_activation("pooler_act", "tanh")
    pooled = HeadTransformSpec(config.read_optional_int("pooler_output_size") or model, act)
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pooled)],
        "ForImageClassification": [OutputHeadSpec("classes", read_num_labels(config), "first", bias="learned")],
    }
    return ModelSpec("vit", "vision", (stack,), select_heads(config, task, heads_by_task), tuple(config.notes))


# --- ViT -----------------------------------------------------------------------------------------------

VIT_LAYER, BATCH_OF_ONE = ".encoder.layer.{layer}", ({"one": 0}, {"one": 1})

VIT_WEIGHTS = WeightNames(
    families=("vit",),
    prefixes=("vit", ""),
    locations={
        "encoder.embedding.patches": ".embeddings.patch_embeddings.projection.weight",
        "encoder.embedding.patches_bias": ".embeddings.patch_embeddings.projection.bias",
        "encoder.embedding.first": TensorLocation(".embeddings.cls_token", "one first model", *BATCH_OF_ONE),
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

# --- DeiT and DINOv2 -----------------------------------------------------------------------------------


@register_family("deit", "DeiT", default_task="ForImageClassification")
def read_deit(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DeiT (2012.12877): ViT with a second learned vector, the distillation token."""
    model, norm = (
        config.read_int("hidden_size", default=768),
        NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12)),
    )
    feed = FeedForwardSpec(
        config.read_int("intermediate_size", default=3072), config.read_activation("hidden_act", "gelu"), bias="ud"
    )
    stack = _make_stack(config, model, norm, feed, _make_patches(config, 16), first=2)
    pooled = HeadTransformSpec(
        config.read_optional_int("pooler_output_size") or model, config.read_activation("pooler_act", "tanh")
    )
    heads_by_task = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pooled)],
        "ForImageClassification": [OutputHeadSpec("classes", read_num_labels(config), "first", bias="learned")],
    }
    return ModelSpec("deit", "vision", (stack,), select_heads(config, task, heads_by_task), tuple(config.notes))


@register_family("dinov2", "Dinov2", default_task="Model")
def read_dinov2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DINOv2 (2304.07193): ViT with a learned scale per channel on each residual branch (LayerScale)."""
    model, norm = (
        config.read_int("hidden_size", default=768),
        NormSpec("layer", config.read_float("layer_norm_eps", default=1e-6)),
    )
    hidden, act = int(model * config.read_float("mlp_ratio", default=4)), config.read_activation("hidden_act", "gelu")
    feed = FeedForwardSpec(hidden, act, bias="ud")
    if config.read_bool("use_swiglu_ffn", False):
        feed = FeedForwardSpec((int(hidden * 2 / 3) + 7) // 8 * 8, "silu", "gated", "ugd")
    stack = _make_stack(config, model, norm, feed, _make_patches(config, 14), first=1)
    scales = tuple(
        (f"encoder.{n}.{name}.scale", model) for n in range(len(stack.layers)) for name in ("attention", "feed")
    )
    mask = (("encoder.embedding.mask", model),) if config.read_bool("use_mask_token", True) else ()
    unsupported = (
        UnsupportedPart(
            "every residual branch is scaled per channel (LayerScale), which BlockSpec lacks", (*scales, *mask)
        ),
    )
    return ModelSpec(
        "dinov2", "vision", (stack,), select_heads(config, task, {"Model": []}), tuple(config.notes), unsupported
    )


def _make_patches(config: TransformersConfig, usual: int) -> PatchSpec:
    image, patch = config.read_pair("image_size", 224), config.read_pair("patch_size", usual)
    rows, columns = (whole // part for whole, part in zip(image, patch, strict=True))
    if not (rows and columns):
        config.fail(f"patch_size = {patch} is larger than image_size = {image}", "give a smaller patch_size")
    return PatchSpec(rows, columns, *patch, channels=config.read_int("num_channels", default=3))


def _make_stack(
    config: TransformersConfig, model: int, norm: NormSpec, feed: FeedForwardSpec, patches: PatchSpec, first: int
) -> StackSpec:
    heads = config.read_num_heads("num_attention_heads", default=12)
    config.resolve_head_dim(model, heads)
    spec = design(model=model, heads=heads, bias="qkvo" if config.read_bool("qkv_bias", True) else "o")
    blocks = [BlockSpec(spec, feed=feed, norm=norm)] * config.read_num_layers("num_hidden_layers", default=12)
    embedding = EmbeddingSpec(
        patches=patches, first=first, positions=PositionSpec("learned", patches.num_patches + first)
    )
    return StackSpec.from_blocks("encoder", model, blocks, embedding=embedding, norm=norm)
