"""The towers of CLIP and SigLIP: one reads pictures, the other reads words (2103.00020, 2303.15343)."""

from __future__ import annotations

from typing import NamedTuple

from ..blueprint import Beyond, Block, Dense, Embedding, Head, Model, Norm, Patches, Positions, Stack
from ..presets import design
from .config import Config
from .registry import choose, family


class Tower(NamedTuple):
    """What both towers have alike."""

    model: int
    blocks: list[Block]
    norm: Norm


class Usual(NamedTuple):
    """What a config takes that does not say its own."""

    model: int
    heads: int
    hidden: int
    act: str
    eps: float


WORDS = Usual(512, 8, 2048, "quick_gelu", 1e-5)
PICTURES = Usual(768, 12, 3072, "quick_gelu", 1e-5)
SIGLIP = Usual(768, 12, 3072, "gelu_pytorch_tanh", 1e-6)


@family("clip_text_model", "CLIPText", usual="Model")
def clip_text(config: Config, task: str) -> Model:
    """A causal one; what is compared with pictures is read off the token that ends a text."""
    tower = _tower(config, WORDS, "causal()")
    positions = Positions("learned", config.size("max_position_embeddings", default=77))
    table = Embedding(config.size("vocab_size", default=49408), positions=positions)
    stack = Stack.of("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    return Model(config.name, "encoder", (stack,), choose(config, task, {"Model": []}), tuple(config.notes))


@family("clip_vision_model", "CLIPVision", usual="Model")
def clip_vision(config: Config, task: str) -> Model:
    """Patches without a bias behind one vector of its own, and a norm before the first layer."""
    tower = _tower(config, PICTURES, "full()")
    table = _patched(config, 224, 32, first=1, norm=tower.norm)
    stack = Stack.of("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    config.note("the last norm is of the first vector alone in transformers; here it is of all")
    wide = config.size("projection_dim", default=512)
    ways = {"Model": [], "ModelWithProjection": [Head("projection", wide, at="first")]}
    return Model(config.name, "vision", (stack,), choose(config, task, ways), tuple(config.notes))


@family("siglip_text_model", "SiglipText", usual="Model")
def siglip_text(config: Config, task: str) -> Model:
    """One that reads ahead too; its last token is what is compared with pictures."""
    tower = _tower(config, SIGLIP, "full()")
    positions = Positions("learned", config.size("max_position_embeddings", default=64))
    table = Embedding(config.size("vocab_size", default=32000), positions=positions)
    stack = Stack.of("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    wide = config.maybe("projection_size") or tower.model
    ways = {"Model": [Head("projection", wide, at="last", bias="learned")]}
    return Model(config.name, "encoder", (stack,), choose(config, task, ways), tuple(config.notes))


@family("siglip_vision_model", "SiglipVision", usual="Model")
def siglip_vision(config: Config, task: str) -> Model:
    """What is compared with words is what one learned query reads of all patches."""
    tower = _tower(config, SIGLIP, "full()")
    table = _patched(config, 224, 16, first=0)
    stack = Stack.of("encoder", tower.model, tower.blocks, embedding=table, norm=tower.norm)
    d, hidden, beyond = tower.model, config.size("intermediate_size", default=3072), tuple[Beyond, ...]()
    if config.flag("vision_use_head", True):
        sizes = {"probe": d, "attention": 4 * d * d + 4 * d, "norm": 2 * d, "feed": 2 * d * hidden + hidden + d}
        why = "one learned query reads all patches, through layers of its own, which no word says"
        beyond = (Beyond(why, tuple((f"head.pooler.{name}", size) for name, size in sizes.items())),)
    return Model(config.name, "vision", (stack,), choose(config, task, {"Model": []}), tuple(config.notes), beyond)


def _tower(config: Config, usual: Usual, pattern: str) -> Tower:
    wide = config.size("hidden_size", default=usual.model)
    asked = config.heads("num_attention_heads", default=usual.heads)
    config.dim(wide, asked)
    norm = Norm("layer", config.number("layer_norm_eps", default=usual.eps))
    hidden = config.size("intermediate_size", default=usual.hidden)
    feed = Dense(hidden, config.activation("hidden_act", usual.act), bias="ud")
    spec = design(model=wide, heads=asked, pattern=pattern, bias="qkvo")
    return Tower(wide, [Block(spec, feed=feed, norm=norm)] * config.layers("num_hidden_layers", default=12), norm)


def _patched(config: Config, image: int, patch: int, first: int, norm: Norm | None = None) -> Embedding:
    """An image as patches; pixels that fill no whole one are left out."""
    whole, part = config.pair("image_size", image), config.pair("patch_size", patch)
    rows, columns = (side // piece for side, piece in zip(whole, part, strict=True))
    if not (rows and columns):
        config.wrong(f"patch_size = {part} is larger than image_size = {whole}", "give a smaller patch_size")
    bias = "none" if first else "learned"
    patches = Patches(rows, columns, *part, channels=config.size("num_channels", default=3), bias=bias)
    return Embedding(patches=patches, first=first, positions=Positions("learned", patches.count + first), norm=norm)
