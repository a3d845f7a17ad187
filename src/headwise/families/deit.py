"""DeiT and DINOv2: ViT with a second vector of its own, and ViT whose sublayers are scaled channel by channel."""

from __future__ import annotations

from ..blueprint import Beyond, Block, Dense, Embedding, Head, Model, Norm, Patches, Positions, Stack, Transform
from ..presets import design
from .config import Config
from .registry import choose, family, labels


@family("deit", "DeiT", usual="ForImageClassification")
def deit(config: Config, task: str) -> Model:
    """The second vector learns from a teacher (2012.12877)."""
    model, norm = config.size("hidden_size", default=768), Norm("layer", config.number("layer_norm_eps", default=1e-12))
    feed = Dense(config.size("intermediate_size", default=3072), config.activation("hidden_act", "gelu"), bias="ud")
    stack = _stack(config, model, norm, feed, _patches(config, 16), first=2)
    pooled = Transform(config.maybe("pooler_output_size") or model, config.activation("pooler_act", "tanh"))
    ways = {
        "Model": [Head("pooler", at="first", transform=pooled)],
        "ForImageClassification": [Head("classes", labels(config), "first", bias="learned")],
    }
    return Model("deit", "vision", (stack,), choose(config, task, ways), tuple(config.notes))


@family("dinov2", "Dinov2", usual="Model")
def dinov2(config: Config, task: str) -> Model:
    """What every sublayer adds is scaled channel by channel (2304.07193)."""
    model, norm = config.size("hidden_size", default=768), Norm("layer", config.number("layer_norm_eps", default=1e-6))
    hidden, act = int(model * config.number("mlp_ratio", default=4)), config.activation("hidden_act", "gelu")
    feed = Dense(hidden, act, bias="ud")
    if config.flag("use_swiglu_ffn", False):
        feed = Dense((int(hidden * 2 / 3) + 7) // 8 * 8, "silu", "gated", "ugd")
    stack = _stack(config, model, norm, feed, _patches(config, 14), first=1)
    scales = tuple(
        (f"encoder.{n}.{name}.scale", model) for n in range(len(stack.layers)) for name in ("attention", "feed")
    )
    mask = (("encoder.embedding.mask", model),) if config.flag("use_mask_token", True) else ()
    beyond = (Beyond("what every sublayer adds is scaled channel by channel, which no word says", (*scales, *mask)),)
    return Model("dinov2", "vision", (stack,), choose(config, task, {"Model": []}), tuple(config.notes), beyond)


def _patches(config: Config, usual: int) -> Patches:
    image, patch = config.pair("image_size", 224), config.pair("patch_size", usual)
    rows, columns = (whole // part for whole, part in zip(image, patch, strict=True))
    if not (rows and columns):
        config.wrong(f"patch_size = {patch} is larger than image_size = {image}", "give a smaller patch_size")
    return Patches(rows, columns, *patch, channels=config.size("num_channels", default=3))


def _stack(config: Config, model: int, norm: Norm, feed: Dense, patches: Patches, first: int) -> Stack:
    heads = config.heads("num_attention_heads", default=12)
    config.dim(model, heads)
    spec = design(model=model, heads=heads, bias="qkvo" if config.flag("qkv_bias", True) else "o")
    blocks = [Block(spec, feed=feed, norm=norm)] * config.layers("num_hidden_layers", default=12)
    embedding = Embedding(patches=patches, first=first, positions=Positions("learned", patches.count + first))
    return Stack.of("encoder", model, blocks, embedding=embedding, norm=norm)
