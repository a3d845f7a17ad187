"""ViT: an image as patches behind one vector of its own, LayerNorm before, learned positions."""

from __future__ import annotations

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PatchSpec, PositionSpec, StackSpec, HeadTransformSpec
from ..presets import design
from .config import TransformersConfig
from .registry import select_heads, register_family, read_num_labels


@register_family("vit", "ViT", default_task="ForImageClassification")
def read_vit(config: TransformersConfig, task: str) -> ModelSpec:
    """Pixels that fill no whole patch are left out (2010.11929)."""
    model = config.read_int("hidden_size", default=768)
    heads = config.read_num_heads("num_attention_heads", default=12)
    layers = config.read_num_layers("num_hidden_layers", default=12)
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-12))
    image, patch = config.read_pair("image_size", 224), config.read_pair("patch_size", 16)
    rows, columns = (whole // part for whole, part in zip(image, patch, strict=True))
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
    ways = {
        "Model": [OutputHeadSpec("pooler", at="first", transform=pooled)],
        "ForImageClassification": [OutputHeadSpec("classes", read_num_labels(config), "first", bias="learned")],
    }
    return ModelSpec("vit", "vision", (stack,), select_heads(config, task, ways), tuple(config.notes))
