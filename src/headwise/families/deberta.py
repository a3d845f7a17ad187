"""DeBERTa 2 and 3: content and positions are compared apart (2006.03654)."""

from __future__ import annotations

from ..blueprint import Beyond, Embedding, Head, Model, Nearly, Positions, Transform
from ..presets import design
from . import reading
from .config import Config
from .registry import family, tied
from .trunk import Attention

WHY = "scores add what queries make of distances and distances of keys, from one table for all layers"

USUAL = reading.Usual(1536, 24, 24, 128100, 6144, eps=1e-7)


@family("deberta-v2", "DebertaV2", usual="ForMaskedLM")
def deberta(config: Config, task: str) -> Model:
    """Without relative_attention it is BERT."""
    sizes = reading.encoder(config, USUAL)
    config.refuse("embedding_size", sizes.model, "is a table of another width, which is not described")
    config.refuse("legacy", True, "has another head over tokens, which is not described")
    length = config.size("max_position_embeddings", default=512)
    placed = Positions("learned", length) if config.flag("position_biased_input", True) else None
    types = config.size("type_vocab_size", default=0, least=0)
    table = Embedding(sizes.tokens, positions=placed, types=types, norm=sizes.norm)
    body = reading.stack(sizes, [_attention(config, sizes)] * sizes.layers, table)
    masked = Head(
        "tokens",
        sizes.tokens,
        transform=Transform(sizes.model, sizes.act, sizes.norm),
        bias="learned",
        table=tied(config, "encoder", True),
    )
    wide = config.size("pooler_hidden_size", default=sizes.model)
    pool = Transform(wide, config.activation("pooler_hidden_act", "gelu"))
    return reading.whole(config, task, body, reading.Said(pool, masked, bare=False), _beyond(config, sizes, length))


def _attention(config: Config, sizes: reading.Encoder) -> Attention:
    spec = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    if not config.flag("relative_attention", False):
        return spec
    sides = {"c2p": "pos_key", "p2c": "pos_query"}
    asked = (
        [] if config.flag("share_att_key", False) else [name for kind, name in sides.items() if kind in _kinds(config)]
    )
    more = [(f"{name}.weight", sizes.model**2) for name in asked] + [(f"{name}.bias", sizes.model) for name in asked]
    return Nearly(spec, WHY, tuple(more))


def _kinds(config: Config) -> list[str]:
    """Which comparisons there are; old files write them as one word."""
    told = config.said.get("pos_att_type")
    return [kind.strip() for kind in told.lower().split("|")] if isinstance(told, str) else list(told or [])


def _beyond(config: Config, sizes: reading.Encoder, length: int) -> tuple[Beyond, ...]:
    """The table of distances, its norm, and a convolution beside the first layer."""
    found = list[Beyond]()
    if config.flag("relative_attention", False):
        reach = config.said.get("max_relative_positions", -1)
        buckets = config.said.get("position_buckets", -1)
        rows = 2 * (
            buckets if type(buckets) is int and buckets > 0 else reach if type(reach) is int and reach > 0 else length
        )
        normed = (("encoder.embedding.distances_norm", 2 * sizes.model),)
        has = "layer_norm" in str(config.said.get("norm_rel_ebd", "none")).lower()
        table = (("encoder.embedding.distances", rows * sizes.model), *(normed if has else ()))
        found.append(Beyond("distances have a table of their own, which all layers compare with", table))
    if kernel := config.size("conv_kernel_size", default=0, least=0):
        groups = config.size("conv_groups", default=1)
        numbers = sizes.model * sizes.model // groups * kernel + 3 * sizes.model
        why = "a convolution of the embedding joins what the first layer gives"
        found.append(Beyond(why, (("encoder.0.feed.convolution", numbers),)))
    return tuple(found)
