"""GPT-NeoX and BLOOM: queries, keys and values of a head lie side by side."""

from __future__ import annotations

from ..plan import WeightNames
from ..slots import TensorLocation

GPT_NEOX_LAYER = "decoder.{layer}"


def name_gpt_neox_layer(file_prefix: str, attention: str) -> dict[str, str | TensorLocation]:
    """The rows of one layer."""
    fused, sides = f"{file_prefix}.{attention}.query_key_value", {"qkv": 3}
    rows: dict[str, str | TensorLocation] = {}
    for place, side in enumerate("qkv"):
        at = {"qkv": place}
        matrix = TensorLocation(f"{fused}.weight", "(q qkv dim) model", at, sides, own_layout="(q dim) model")
        bias = TensorLocation(f"{fused}.bias", "(q qkv dim)", at, sides, own_layout="(q dim)")
        rows |= {f"{GPT_NEOX_LAYER}.attention.project.{side}": matrix, f"{GPT_NEOX_LAYER}.attention.project.{side}_bias": bias}
    names = {
        "attention.output.o": f"{attention}.dense.weight",
        "attention.output.o_bias": f"{attention}.dense.bias",
        "attention_norm.weight": "input_layernorm.weight",
        "attention_norm.bias": "input_layernorm.bias",
        "feed_norm.weight": "post_attention_layernorm.weight",
        "feed_norm.bias": "post_attention_layernorm.bias",
        "feed.up": "mlp.dense_h_to_4h.weight",
        "feed.up_bias": "mlp.dense_h_to_4h.bias",
        "feed.down": "mlp.dense_4h_to_h.weight",
        "feed.down_bias": "mlp.dense_4h_to_h.bias",
    }
    return rows | {f"{GPT_NEOX_LAYER}.{ours}": f"{file_prefix}.{theirs}" for ours, theirs in names.items()}


GPT_NEOX_WEIGHTS = WeightNames(
    families=("gpt_neox",),
    prefixes=("gpt_neox", ""),
    locations={
        "decoder.embedding.tokens": ".embed_in.weight",
        **name_gpt_neox_layer(".layers.{layer}", "attention"),
        "decoder.norm.weight": ".final_layer_norm.weight",
        "decoder.norm.bias": ".final_layer_norm.bias",
        "head.tokens.weight": "embed_out.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)
