"""DeiT and DINOv2: ViT with a second vector of its own, and ViT whose sublayers are scaled channel by channel."""

from __future__ import annotations

from ..blueprint import UnsupportedPart, BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PatchSpec, PositionSpec, StackSpec, HeadTransformSpec
from ..presets import design
from .config import TransformersConfig
from .registry import select_heads, register_family, read_num_labels


@register_family("deit", "DeiT", default_task="ForImageClassification")
def read_deit(config: TransformersConfig, task: str) -> ModelSpec:
    """The second vector learns from a teacher (2012.12877)."""
    model, norm = config.read_int("hidden_size", default=768), NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=3072), config.read_activation("hidden_act", "gelu"), bias="ud")
    stack = _make_stack(config, model, norm, feed, _make_patches(config, 16), first=2)
    pooled = HeadTransformSpec(config.read_optional_int("pooler_output_size") or model, config.read_activation("pooler_act", "tanh"))
    ways = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pooled)],
        "ForImageClassification": [OutputHeadSpec("classes", read_num_labels(config), "first", bias="learned")],
    }
    return ModelSpec("deit", "vision", (stack,), select_heads(config, task, ways), tuple(config.notes))


@register_family("dinov2", "Dinov2", default_task="Model")
def read_dinov2(config: TransformersConfig, task: str) -> ModelSpec:
    """What every sublayer adds is scaled channel by channel (2304.07193)."""
    model, norm = config.read_int("hidden_size", default=768), NormSpec("layer", config.read_float("layer_norm_eps", default=1e-6))
    hidden, act = int(model * config.read_float("mlp_ratio", default=4)), config.read_activation("hidden_act", "gelu")
    feed = FeedForwardSpec(hidden, act, bias="ud")
    if config.read_bool("use_swiglu_ffn", False):
        feed = FeedForwardSpec((int(hidden * 2 / 3) + 7) // 8 * 8, "silu", "gated", "ugd")
    stack = _make_stack(config, model, norm, feed, _make_patches(config, 14), first=1)
    scales = tuple(
        (f"encoder.{n}.{name}.scale", model) for n in range(len(stack.layers)) for name in ("attention", "feed")
    )
    mask = (("encoder.embedding.mask", model),) if config.read_bool("use_mask_token", True) else ()
    beyond = (UnsupportedPart("what every sublayer adds is scaled channel by channel, which no word says", (*scales, *mask)),)
    return ModelSpec("dinov2", "vision", (stack,), select_heads(config, task, {"Model": []}), tuple(config.notes), beyond)


def _make_patches(config: TransformersConfig, usual: int) -> PatchSpec:
    image, patch = config.read_pair("image_size", 224), config.read_pair("patch_size", usual)
    rows, columns = (whole // part for whole, part in zip(image, patch, strict=True))
    if not (rows and columns):
        config.fail(f"patch_size = {patch} is larger than image_size = {image}", "give a smaller patch_size")
    return PatchSpec(rows, columns, *patch, channels=config.read_int("num_channels", default=3))


def _make_stack(config: TransformersConfig, model: int, norm: NormSpec, feed: FeedForwardSpec, patches: PatchSpec, first: int) -> StackSpec:
    heads = config.read_num_heads("num_attention_heads", default=12)
    config.resolve_head_dim(model, heads)
    spec = design(model=model, heads=heads, bias="qkvo" if config.read_bool("qkv_bias", True) else "o")
    blocks = [BlockSpec(spec, feed=feed, norm=norm)] * config.read_num_layers("num_hidden_layers", default=12)
    embedding = EmbeddingSpec(patches=patches, first=first, positions=PositionSpec("learned", patches.num_patches + first))
    return StackSpec.from_blocks("encoder", model, blocks, embedding=embedding, norm=norm)
