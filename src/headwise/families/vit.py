"""ViT: an image as patches behind one vector of its own, LayerNorm before, learned positions."""

from __future__ import annotations

from ..blueprint import Block, Dense, Embedding, Head, Model, Norm, Patches, Positions, Stack, Transform
from ..presets import design
from .config import Config
from .registry import choose, family, labels


@family("vit", "ViT", usual="ForImageClassification")
def vit(config: Config, task: str) -> Model:
    """Pixels that fill no whole patch are left out (2010.11929)."""
    model = config.size("hidden_size", default=768)
    heads = config.heads("num_attention_heads", default=12)
    layers = config.layers("num_hidden_layers", default=12)
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-12))
    image, patch = config.pair("image_size", 224), config.pair("patch_size", 16)
    rows, columns = (whole // part for whole, part in zip(image, patch, strict=True))
    if not (rows and columns):
        config.wrong(f"patch_size = {patch} is larger than image_size = {image}", "give a smaller patch_size")
    patches = Patches(rows, columns, *patch, channels=config.size("num_channels", default=3))
    positions = Positions("learned", patches.count + 1)
    config.dim(model, heads)

    bias = "qkvo" if config.flag("qkv_bias", True) else "o"
    hidden = config.size("intermediate_size", default=3072)
    feed = Dense(hidden, config.activation("hidden_act", "gelu"), bias="ud")
    blocks = [Block(design(model=model, heads=heads, bias=bias), feed=feed, norm=norm)] * layers
    embedding = Embedding(patches=patches, first=1, positions=positions)
    stack = Stack.of("encoder", model, blocks, embedding=embedding, norm=norm)

    act = config.activation("pooler_act", "tanh")
    pooled = Transform(config.maybe("pooler_output_size") or model, act)
    ways = {
        "Model": [Head("pooler", at="first", transform=pooled)],
        "ForImageClassification": [Head("classes", labels(config), "first", bias="learned")],
    }
    return Model("vit", "vision", (stack,), choose(config, task, ways), tuple(config.notes))
