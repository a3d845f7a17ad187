"""DeBERTa 2 and 3: disentangled attention scores content and relative positions separately (2006.03654)."""

from __future__ import annotations

from ..model_spec import (
    ApproximateAttention,
    EmbeddingSpec,
    HeadTransformSpec,
    ModelSpec,
    OutputHeadSpec,
    PositionSpec,
    UnsupportedPart,
)
from ..presets import design
from . import model_builders
from .config_reader import TransformersConfig, read_tied_stack, register_family
from .model_builders import LayerAttention

DISENTANGLED_REASON = "scores add content-to-position and position-to-content terms, from one table for all layers"

DEBERTA_DEFAULTS = model_builders.EncoderDefaults(1536, 24, 24, 128100, 6144, eps=1e-7)


@register_family("deberta-v2", "DebertaV2", default_task="ForMaskedLM")
def read_deberta(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DeBERTa 2 and 3; without relative_attention the layers are BERT's."""
    sizes = model_builders.read_encoder_sizes(config, DEBERTA_DEFAULTS)
    config.require_default(
        "embedding_size", sizes.model, "gives token embeddings another width, which is not described"
    )
    config.require_default("legacy", True, "has another head over tokens, which is not described")
    length = config.read_int("max_position_embeddings", default=512)
    placed = PositionSpec("learned", length) if config.read_bool("position_biased_input", True) else None
    types = config.read_int("type_vocab_size", default=0, minimum=0)
    table = EmbeddingSpec(sizes.vocab_size, positions=placed, types=types, norm=sizes.norm)
    body = model_builders.make_encoder_stack(sizes, [_make_attention(config, sizes)] * sizes.layers, table)
    masked = OutputHeadSpec(
        "tokens",
        sizes.vocab_size,
        transform=HeadTransformSpec(sizes.model, sizes.activation, sizes.norm),
        bias="learned",
        table=read_tied_stack(config, "encoder", True),
    )
    wide = config.read_int("pooler_hidden_size", default=sizes.model)
    pool = HeadTransformSpec(wide, config.read_activation("pooler_hidden_act", "gelu"))
    return model_builders.build_encoder(
        config,
        task,
        body,
        model_builders.EncoderHeads(pool, masked, pools_base_model=False),
        _unsupported_parts(config, sizes, length),
    )


def _make_attention(config: TransformersConfig, sizes: model_builders.EncoderSizes) -> LayerAttention:
    spec = design(model=sizes.model, heads=sizes.heads, bias="qkvo")
    if not config.read_bool("relative_attention", False):
        return spec
    sides = {"c2p": "pos_key", "p2c": "pos_query"}
    sides_used = (
        []
        if config.read_bool("share_att_key", False)
        else [name for kind, name in sides.items() if kind in _read_score_types(config)]
    )
    parameters = [(f"{name}.weight", sizes.model**2) for name in sides_used] + [
        (f"{name}.bias", sizes.model) for name in sides_used
    ]
    return ApproximateAttention(spec, DISENTANGLED_REASON, tuple(parameters))


def _read_score_types(config: TransformersConfig) -> list[str]:
    """Return the relative score terms (c2p, p2c); old files join them with |."""
    terms = config.values.get("pos_att_type")
    return [kind.strip() for kind in terms.lower().split("|")] if isinstance(terms, str) else list(terms or [])


def _unsupported_parts(
    config: TransformersConfig, sizes: model_builders.EncoderSizes, length: int
) -> tuple[UnsupportedPart, ...]:
    """The relative position table, its norm, and the convolution beside the first layer."""
    parts = list[UnsupportedPart]()
    if config.read_bool("relative_attention", False):
        reach = config.values.get("max_relative_positions", -1)
        buckets = config.values.get("position_buckets", -1)
        rows = 2 * (
            buckets if type(buckets) is int and buckets > 0 else reach if type(reach) is int and reach > 0 else length
        )
        normed = (("encoder.embedding.distances_norm", 2 * sizes.model),)
        has = "layer_norm" in str(config.values.get("norm_rel_ebd", "none")).lower()
        table = (("encoder.embedding.distances", rows * sizes.model), *(normed if has else ()))
        parts.append(UnsupportedPart("relative positions have a table of embeddings that all layers share", table))
    if kernel := config.read_int("conv_kernel_size", default=0, minimum=0):
        groups = config.read_int("conv_groups", default=1)
        numbers = sizes.model * sizes.model // groups * kernel + 3 * sizes.model
        reason = "a convolution of the embeddings is added to the output of the first layer"
        parts.append(UnsupportedPart(reason, (("encoder.0.feed.convolution", numbers),)))
    return tuple(parts)
